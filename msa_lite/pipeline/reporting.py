"""Write the report of a run, as a page, as Markdown and as JSON, from the files of its folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msa_lite.errors import FormatError, MismatchError, join_faults
from msa_lite.evals.benchmark import benchmark_class
from msa_lite.evals.examples import pick_examples
from msa_lite.io.extras import require
from msa_lite.io.files import write_json, write_text
from msa_lite.io.reading import local_path
from msa_lite.io.seal import MANIFEST
from msa_lite.io.verify import verify_stages
from msa_lite.pipeline.verdict import scored_records
from msa_lite.report import REPORT_FILE
from msa_lite.report.examples import SideBySide
from msa_lite.report.page import PAGE_FILE, write_page
from msa_lite.report.provenance import read_run
from msa_lite.report.run_json import run_json
from msa_lite.report.run_markdown import run_markdown
from msa_lite.report.story import Story, load_story
from msa_lite.report.verdict import VERDICT_FILE

MARKDOWN_FILE = "report.md"
REPORT_FILES = (PAGE_FILE, MARKDOWN_FILE, REPORT_FILE)
"""The files of a report, the one to open first at the front."""


def report_run(folder: str | Path, show_examples: bool = False) -> Story:
    """Write report.html, report.md and report.json of a run, finished or not, into its folder. Return its story.

    show_examples: add ten questions with the models' answers, which hold the data. Raise UsageError for what is no run,
    MismatchError for a run whose files are not as they were written, FormatError for broken files; nothing is written
    then.
    """
    folder = local_path(folder)
    require("train", "the pictures of a report need matplotlib")
    read_run(folder)
    _check_unchanged(folder)
    return write_run_report(folder, _examples(folder) if show_examples else ())


def write_run_report(folder: Path, examples: Sequence[SideBySide] = ()) -> Story:
    """Write the three forms of a run's report. The same files in its folder give the same bytes."""
    story = load_story(folder, examples)
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
    target, validation = (part.get("target") for part in (story.reports, story.validation))
    if target is None:
        return []
    both = validation is not None and validation.benchmark == target.benchmark and "unlearned" in story.validation
    try:
        models = scored_records(folder, ["_validation", ""] if both else [""])
        kind, seed = benchmark_class(target.benchmark), story.provenance.seed or 0
        return pick_examples(kind, models, seed) if "target" in models else []
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise FormatError(f"{folder / 'evaluation'}: its records are not as msa-lite writes them ({error})") from error
