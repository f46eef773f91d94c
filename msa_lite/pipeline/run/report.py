"""What a run ends with: its report, its removal record, and its place on the Hub."""

from __future__ import annotations

import secrets
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from msa_lite.catalogue import OWN
from msa_lite.choose.choice import Values
from msa_lite.data import DataSource, Row
from msa_lite.data.rows import read_any_rows
from msa_lite.errors import MismatchError, MsaError, UsageError, join_faults
from msa_lite.evals.benchmarks.benchmark import Records, find_benchmark
from msa_lite.evals.scores.records import list_rows, pick_examples
from msa_lite.io.console.libraries import require
from msa_lite.io.console.progress import notices
from msa_lite.io.files.reading import local_path, printable
from msa_lite.io.files.writing import hash_file, indented_json, write_text
from msa_lite.io.finished.seal import load_manifest, locked, verify_stages
from msa_lite.io.weights.hub import Source
from msa_lite.merger import Merged, MergedAdapter
from msa_lite.pipeline.prepare.run import Run
from msa_lite.pipeline.run.scores import scored_records
from msa_lite.publish.contents import PublishOptions, changed_when_sent
from msa_lite.publish.upload import Published, find_destination, push_folder
from msa_lite.recipe import Recipe, load_recipe
from msa_lite.record.check import RowAnswer, find_rows
from msa_lite.record.facts import (
    ResultKind,
    edited_files,
    hash_result,
    hash_run_files,
    judgement_of,
    read_earlier,
    read_vectors,
    resealed,
    utc,
    write_run_record,
)
from msa_lite.record.schema import ModelWeights, Removal
from msa_lite.record.seal import KEY_FILE, RECORD_FILE, RowContent, load_key, make_key
from msa_lite.report import REPORT_FILE
from msa_lite.report.page.card import read_target_card
from msa_lite.report.page.run_files import make_page, run_json
from msa_lite.report.run.provenance import PAGE_FILE, PURGED_FILE, RECIPE_FILE, purge_day, read_run
from msa_lite.report.run.rows import RowList, SideBySide
from msa_lite.report.run.story import Story, formula_of, load_story
from msa_lite.report.tables.reports import reading
from msa_lite.report.verdict.verdict import VERDICT_FILE, NoVerdict, Verdict

REPORT_FILES = (PAGE_FILE, REPORT_FILE)
"""The files of a report, the one to open first at the front."""
END_FILES = (VERDICT_FILE, RECORD_FILE, *REPORT_FILES)
"""The files that a run ends with, beside the folders of its stages."""


def report_run(folder: str | Path, show_examples: bool = False, rows: bool = False) -> Story:
    """Write report.html and report.json of a run, finished or not, into its folder. Return its story.

    show_examples: add ten questions with the models' answers, which hold the data. rows: list every row to forget, and
    the rows to keep that were lost, in the returned story (`forget_rows`); with show_examples also in the files. Raise
    before anything is written: UsageError for a folder that is no run, and for rows of a run that has none or was
    purged; MismatchError for files that changed since they were written; FormatError for broken files; OutputError for
    examples of a run in which a process works.
    """
    folder = local_path(folder)
    require("train", "the pictures of a report need matplotlib")
    read_run(folder)
    check_as_written(folder, REPORT_FILES)
    with locked(folder) if show_examples else nullcontext():  # or rows would come back that a purge has just removed
        listed = forget_rows(folder) if rows else None
        examples = _examples(folder) if show_examples else ()
        story = write_run_report(folder, examples, listed if show_examples else None)
    return replace(story, forget_rows=listed)


def write_run_report(
    folder: Path, examples: Sequence[SideBySide] = (), rows: RowList | None = None, written: Sequence[str] = ()
) -> Story:
    """Write both forms of a run's report, and their hashes into its record, if it is finished.

    written: other files that the caller has just written, whose hashes go there, too. The same files in its folder
    give the same bytes. Raise MismatchError, before anything is written, where a file is not as the record has it.
    """
    story = replace(load_story(folder, examples), forget_rows=rows)
    if examples or rows:
        story = replace(story, salt=_salt(folder))
    texts = _report_texts(story)
    hashes = {name: hash_file(folder / name) for name in written}
    with resealed(folder, hashes | {name: sha256(text.encode()).hexdigest() for name, text in texts.items()}):
        _write_report(folder, texts)
    return story


def _salt(folder: Path) -> str:
    """Return what makes the hash of a report with rows useless to whoever guesses at them: the record is public."""
    with suppress(MsaError):
        return load_key(folder / KEY_FILE).digest("report")
    return secrets.token_hex(32)


def _report_texts(story: Story) -> dict[str, str]:
    return {REPORT_FILE: indented_json(run_json(story)), PAGE_FILE: printable(make_page(story))}


def _write_report(folder: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        write_text(folder / name, text)


def drop_report(folder: Path) -> None:
    """Remove the verdict and the report of an earlier run, perhaps of another model, from a run's folder."""
    for name in (VERDICT_FILE, *REPORT_FILES):
        (folder / name).unlink(missing_ok=True)


def check_as_written(folder: Path, written: Sequence[str] = ()) -> None:
    """Raise MismatchError, as `msa-lite verify` does, where a file of a stage or of the record is not as written.

    written: names of files that will be written anew; of these, the user is told.
    """
    faults = verify_stages(folder, needed=False)
    lines = [f"{stage.relative_to(folder)}/{fault}" for stage, of_stage in faults.items() for fault in of_stage]
    broken, edited = sum(map(bool, faults.values())), edited_files(folder)
    for name in edited.keys() & written:
        notices.warning("%s: not the file that %s has the hash of; it is written anew", folder / name, RECORD_FILE)
    lines += [fault for name, fault in edited.items() if name not in written]
    if lines:
        what = f"differs from its manifest ({broken} of {len(faults)} folders)" if broken else "differs from its record"
        raise MismatchError(join_faults(f"{folder}: {what}:", lines, limit=100))


def _examples(folder: Path) -> list[SideBySide]:
    """Return ten questions with the models' answers, the same that a run shows; none where nothing was answered."""
    story = load_story(folder)
    target = story.reports.get("target")
    if target is None:
        return []
    with reading(folder / "evaluation"):
        models = _scored(story)
        kind, seed = find_benchmark(target.benchmark), story.provenance.seed or 0
        return pick_examples(kind, models, seed) if "target" in models else []


def forget_rows(folder: Path) -> RowList:
    """Return all rows to forget, and the rows to keep that were lost.

    Raise UsageError, with what is missing, where the unlearned model has no records.
    """
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
        reason = story.verdict.reason if isinstance(story.verdict, NoVerdict) else "nothing was scored (evaluate: null)"
        again = f"; `msa-lite {folder / RECIPE_FILE}` goes on with the run" if lines else ""
        raise UsageError(f"{folder}: its rows cannot be listed: {'; '.join(lines) or reason}{again}")
    with reading(folder / "evaluation"):
        models = _scored(story)
        listed = list_rows(find_benchmark(unlearned.benchmark), models, _known_rows(story))
        kept = story.verdict.kept if isinstance(story.verdict, Verdict) else None
        listed = replace(listed, learnt=max(0, len(listed.retain) - kept.rows) if kept else 0)
    if "unlearned" not in models or not listed.rows:
        raise UsageError(
            f"{folder}: its rows cannot be listed: evaluation/unlearned has no records of rows to forget "
            f"(benchmark {unlearned.benchmark})"
        )
    return listed


def _known_rows(story: Story) -> int:
    """Return the number of rows to forget that there are to our knowledge: those scored on target, or learnt."""
    sets = [
        reports["target"].settings.get("sets") for reports in (story.reports, story.validation) if "target" in reports
    ]
    counts = [named["forget"]["rows"] for named in sets if isinstance(named, Mapping) and "forget" in named]
    divided = "target" in story.reports and story.reports["target"].benchmark != OWN
    scored = sum(counts) if divided else max(counts, default=0)  # one's own forget rows are whole in both parts
    evaluate = story.provenance.values.get("evaluate")
    same = isinstance(evaluate, Mapping) and evaluate.get("benchmark") == OWN and not evaluate.get("forget")
    learnt = story.fits["forget"].rows if same and "forget" in story.fits else None
    return max(scored, learnt or 0)


def _scored(story: Story) -> dict[str, Records]:
    """Return the records of target, unlearned model and ideal: of test and validation part if both have them all."""
    target, validation = (reports.get("target") for reports in (story.reports, story.validation))
    same = target is not None and validation is not None and validation.benchmark == target.benchmark
    both = same and "unlearned" in story.validation
    return dict(scored_records(story.folder, ["_validation", ""] if both else [""]))


def write_record(run: Run, story: Story, chosen: Values, merged: Merged | MergedAdapter) -> Removal:
    """Write the report of a finished run, and record.json; a rerun leaves both as they are.

    story: the run's. chosen: α and β, or what was chosen for a baseline.
    """
    folder, verdict = run.folder, story.verdict
    assert verdict is not None, "the run is finished"
    _write_report(folder, _report_texts(story))
    kind: ResultKind = "adapter" if isinstance(merged, MergedAdapter) else "model"
    models = [name for name in ("target", "prior", "ideal", "checkpoint") if name in run.sources]
    if run.scope.start == "target":
        models.remove("prior")  # it is the target itself
    manifest = load_manifest(merged.folder)
    assert manifest is not None, "the run is finished"
    earlier = [read_earlier(former.folder) for former in run.earlier]
    result = hash_result(folder, kind)
    published = changed_when_sent(folder / kind, result.files)
    record = Removal(
        request=run.recipe.request,
        method=run.scope.method,
        formula=_formula(run, bool(chosen.get("filter"))),
        strengths=dict(chosen),
        started=utc((folder / RECIPE_FILE).stat().st_mtime),
        finished=utc(time.time()),
        models={name: _model(run.sources[name]) for name in models},
        vectors=read_vectors(manifest),
        result=result.model_copy(update={"published": published}),
        row_counts={name: len(rows) for name, rows in run.rows.items()},
        forget_rows=make_key(folder / KEY_FILE).hash_rows(map(_content, run.rows["forget"])),
        verdict=judgement_of(verdict),
        files=hash_run_files(folder, kind),
        earlier=earlier,
        previous_sha256=earlier[-1].record_sha256 if earlier else None,
    )
    return write_run_record(folder, record)


def find_forgotten(folder: Path, rows: str, key: str | None = None) -> list[RowAnswer]:
    """Return for each row of a file whether a run, or an earlier one in its chain, was to forget it.

    The columns are those of the run's forget set, where its recipe can be read; else the usual ones. key: a copy of
    the run's record.key. Raise as `find_rows`, and FormatError for a file without rows.
    """
    columns = DataSource(rows)
    with suppress(MsaError):
        recipe = load_recipe(str(folder / RECIPE_FILE))
        columns = recipe.forget.data.source(recipe.columns)
    return find_rows(folder, [_content(row) for row in read_any_rows(rows, columns)], key)


def _content(row: Row) -> RowContent:
    """Return the part of a row that its keyed hash is of."""
    return row.question, row.answer, row.text


def _formula(run: Run, is_filtered: bool) -> str:
    """Return the merge of a run in one line."""
    if run.earlier:
        return "θ_u = θ_D + Σ weight · vector, over all vectors of this request and of the earlier ones"
    start = "checkpoint" if run.scope.checkpoint else run.scope.start
    return formula_of(run.scope.method, start, is_filtered, run.recipe.starts_at_retain)


def _model(source: Source) -> ModelWeights:
    """Return a model as the record names it: without the path of a folder."""
    name = "local folder" if source.is_folder else source.pinned()
    tokenizer = source.tokenizer.revision if source.tokenizer else None
    return ModelWeights(name=name, revision=source.revision, tokenizer=tokenizer)


def check_publishing(recipe: Recipe) -> None:
    """Raise before any work if the recipe names a repository that nothing could be sent to."""
    if recipe.publish.repo is not None:
        find_destination(recipe.publish.repo, recipe.publish.private)


def check_licence(run: Run) -> None:
    """Raise UsageError before any work if the run's model is to be public, and nobody says under which licence."""
    wishes = run.recipe.publish
    if wishes.repo is None or wishes.private or wishes.license or run.scope.is_baseline:
        return
    if "license" not in read_target_card(run.sources["target"].folder):
        raise UsageError(
            "publish.license: the card of the target names no licence, and a public model needs one; give the "
            "identifier of the one that holds, such as apache-2.0"
        )


def publish_model(recipe: Recipe, folder: Path, verdict: Verdict | None, accept: bool) -> Published | None:
    """Send a run's model or adapter where the recipe says; return None where it says nothing, or the verdict is FAIL.

    folder: the model's or adapter's. The recipe is the user's consent; nobody is asked. Raise as `push_folder`; the run
    itself is finished then, and a rerun only publishes.
    """
    wishes, accept = recipe.publish, accept or not recipe.verdict
    if wishes.repo is None:
        return None
    if verdict is not None and verdict.outcome == "FAIL" and not accept:
        words = ["msa-lite", "publish", str(folder), wishes.repo, *([] if wishes.private else ["--public"]), "--accept"]
        notices.warning("not published: the verdict is FAIL; to send it anyway: %s", shlex.join(words))
        return None
    options = PublishOptions(public=not wishes.private, accept=accept, license=wishes.license)
    try:
        return push_folder(folder, wishes.repo, options)
    except MsaError as error:
        raise type(error)(f"the run is finished, but not published: {error}") from None
