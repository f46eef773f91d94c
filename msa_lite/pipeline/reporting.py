"""Write the report of a run, as a page, as Markdown and as JSON, from the files of its folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from msa_lite.benchmarks import OWN
from msa_lite.errors import FormatError, MismatchError, UsageError, join_faults
from msa_lite.evals.benchmark import Records, benchmark_class
from msa_lite.evals.examples import pick_examples
from msa_lite.evals.rows import list_rows
from msa_lite.io.extras import require
from msa_lite.io.files import write_json, write_text
from msa_lite.io.reading import local_path
from msa_lite.io.seal import MANIFEST
from msa_lite.io.verify import verify_stages
from msa_lite.pipeline.verdict import scored_records
from msa_lite.report import REPORT_FILE
from msa_lite.report.examples import SideBySide
from msa_lite.report.page import PAGE_FILE, write_page
from msa_lite.report.provenance import RECIPE_FILE, read_run
from msa_lite.report.purged import PURGED_FILE, purge_day
from msa_lite.report.rows import RowList
from msa_lite.report.run_json import run_json
from msa_lite.report.run_markdown import run_markdown
from msa_lite.report.story import Story, load_story
from msa_lite.report.verdict import VERDICT_FILE

MARKDOWN_FILE = "report.md"
REPORT_FILES = (PAGE_FILE, MARKDOWN_FILE, REPORT_FILE)
"""The files of a report, the one to open first at the front."""


def report_run(folder: str | Path, show_examples: bool = False, rows: bool = False) -> Story:
    """Write report.html, report.md and report.json of a run, finished or not, into its folder. Return its story.

    show_examples: add ten questions with the models' answers, which hold the data. rows: list every row to forget in
    the returned story (`forget_rows`); only with show_examples are they also in the files. Raise UsageError for what is
    no run, and for rows of a run that has none or was purged, MismatchError for a run whose files are not as they were
    written, FormatError for broken files; nothing is written then.
    """
    folder = local_path(folder)
    require("train", "the pictures of a report need matplotlib")
    read_run(folder)
    _check_unchanged(folder)
    listed = _rows(folder) if rows else None
    examples = _examples(folder) if show_examples else ()
    story = write_run_report(folder, examples, listed if show_examples else None)
    return replace(story, forget_rows=listed)


def write_run_report(folder: Path, examples: Sequence[SideBySide] = (), rows: RowList | None = None) -> Story:
    """Write the three forms of a run's report. The same files in its folder give the same bytes."""
    story = replace(load_story(folder, examples), forget_rows=rows)
    text, values = run_markdown(story), run_json(story)
    write_text(folder / MARKDOWN_FILE, text)
    write_json(folder / REPORT_FILE, values)
    write_page(story, folder / PAGE_FILE)
    return story


def drop_report(folder: Path) -> None:
    """Remove the verdict and the report of an earlier run, perhaps of another model, from a run's folder."""
    for name in (VERDICT_FILE, *REPORT_FILES):
        (folder / name).unlink(missing_ok=True)


def _check_unchanged(folder: Path) -> None:
    """Raise MismatchError, as `msa-lite verify` does, where a file of a stage is not as it was written."""
    if not any(folder.rglob(MANIFEST)):
        return
    faults = verify_stages(folder)
    lines = [f"{stage.relative_to(folder)}/{fault}" for stage, of_stage in faults.items() for fault in of_stage]
    if lines:
        broken = sum(map(bool, faults.values()))
        headline = f"{folder}: differs from its manifest ({broken} of {len(faults)} folders):"
        raise MismatchError(join_faults(headline, lines, limit=100))


def _examples(folder: Path) -> list[SideBySide]:
    """Return ten questions with the models' answers, the same that a run shows; none where nothing was answered."""
    story = load_story(folder)
    target = story.reports.get("target")
    if target is None:
        return []
    with _reading_records(folder):
        models = _scored(story)
        kind, seed = benchmark_class(target.benchmark), story.provenance.seed or 0
        return pick_examples(kind, models, seed) if "target" in models else []


def _rows(folder: Path) -> RowList:
    """Return all rows to forget. Raise UsageError, with what is missing, where the unlearned model has no records."""
    story = load_story(folder)
    day = purge_day(folder)
    if day is not None:
        raise UsageError(
            f"{folder}: its rows cannot be listed: the data was purged on {day}, the records of single rows with it "
            f"({PURGED_FILE})"
        )
    unlearned = story.reports.get("unlearned")
    if unlearned is None:
        lines = [line for line in story.missing if not line.startswith("verdict")]
        reason = str((story.verdict or {}).get("reason") or "nothing was scored (evaluate: null)")
        again = f"; `msa-lite {folder / RECIPE_FILE}` goes on with the run" if lines else ""
        raise UsageError(f"{folder}: its rows cannot be listed: {'; '.join(lines) or reason}{again}")
    with _reading_records(folder):
        models = _scored(story)
        listed = list_rows(benchmark_class(unlearned.benchmark), models, _known_rows(story))
    if "unlearned" not in models or not listed.rows:
        raise UsageError(
            f"{folder}: its rows cannot be listed: evaluation/unlearned has no records of rows to forget "
            f"(benchmark {unlearned.benchmark})"
        )
    return listed


def _known_rows(story: Story) -> int:
    """Return the number of rows to forget that there are to our knowledge: those scored on target, or learnt."""
    sets = [part["target"].settings.get("sets") for part in (story.reports, story.validation) if "target" in part]
    counts = [named["forget"]["rows"] for named in sets if isinstance(named, Mapping) and "forget" in named]
    divided = "target" in story.reports and story.reports["target"].benchmark != OWN
    scored = sum(counts) if divided else max(counts, default=0)  # one's own forget rows are whole in both parts
    evaluate = story.provenance.values.get("evaluate")
    same = isinstance(evaluate, Mapping) and evaluate.get("benchmark") == OWN and not evaluate.get("forget")
    learnt = story.fits["forget"].rows if same and "forget" in story.fits else None
    return max(scored, learnt or 0)


def _scored(story: Story) -> dict[str, Records]:
    """Return the records of target, unlearned model and ideal: of test and validation part if both have them all."""
    target, validation = (part.get("target") for part in (story.reports, story.validation))
    same = target is not None and validation is not None and validation.benchmark == target.benchmark
    both = same and "unlearned" in story.validation
    return dict(scored_records(story.folder, ["_validation", ""] if both else [""]))


@contextmanager
def _reading_records(folder: Path) -> Iterator[None]:
    """Raise FormatError for records that are not as msa-lite writes them."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise FormatError(f"{folder / 'evaluation'}: its records are not as msa-lite writes them ({error})") from error
