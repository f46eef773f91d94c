"""Evaluate one model on one benchmark into a folder with records and report.

The records hold everything that needs the model. If only the ideal or the judge has changed, the earlier records are
used again.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

from msa_lite.errors import MismatchError, UsageError
from msa_lite.evals.benchmarks.benchmark import Benchmark, JudgeCall, Record, Records
from msa_lite.evals.engine.models import model_identity
from msa_lite.evals.judge import open_judge
from msa_lite.evals.judge.base import Ruling, describe_judge
from msa_lite.evals.scores.records import ANSWERS_FILE, collect_records, open_answers, read_records, write_records
from msa_lite.io.console.progress import Progress, silent
from msa_lite.io.files.cache import Cache
from msa_lite.io.files.reading import local_path
from msa_lite.io.files.writing import canonical_json, digest
from msa_lite.io.finished.manifest import is_finished, partial_folder, stage_folder
from msa_lite.io.finished.seal import folder_faults, load_manifest
from msa_lite.io.launch.crew import Ranks
from msa_lite.io.models.devices import check_device
from msa_lite.io.weights.hub import Source
from msa_lite.report import REPORT_FILE, Report, load_report, write_report
from msa_lite.settings import JudgeSettings

logger = logging.getLogger(__name__)

EVALUATION_KIND = "evaluation"
VERDICTS = "verdicts"  # a key of records: the judge's reply to each call, with what it was shown
PROMPTS_FILE = "judge_prompts.yaml"  # a copy of the file of `JudgeSettings.prompts`
NO_JUDGE = JudgeSettings()
Ideal = Source | Path | Literal["itself"] | None
"""The model that never saw the forget set: a model to score too, the folder of an earlier evaluation, "itself" where it
is the model that is scored, or None."""

Collect = Callable[[Source, Benchmark, str, Progress], dict[str, list[Record]]]
"""Asks a model: collect(source, benchmark, label, progress)."""


def evaluate_benchmark(
    source: Source,
    benchmark: Benchmark,
    out: Path,
    *,
    ideal: Ideal = None,
    judge: JudgeSettings = NO_JUDGE,
    method: Mapping[str, Any] | None = None,
    label: str = "scores",
    progress: Progress = silent,
    collect: Collect | None = None,
) -> Report | None:
    """Score a model. Write `SET.jsonl` records, report.json and a manifest into `out`.

    An ideal that is a model is scored first, into `out`/ideal. A folder made from the same inputs is read instead.
    method: what made the model, for the report. collect: asks the model, where answers are kept elsewhere; else they
    are kept in `out`, so that what was asked before a stop, or for another ideal or judge, is not asked again.

    Return None in the processes of `accelerate launch` that only help. Raise what `check_comparable` and the judge
    raise.
    """
    ranks = Ranks.current()
    if isinstance(ideal, Path):
        check_comparable(ideal, benchmark, out)
    inputs = evaluation_inputs(source, benchmark, ideal, judge, method)
    subject = {name: inputs[name] for name in ("model", "questions")}
    ranks.check_same(digest(inputs))  # before some of them find their own inputs done, and leave
    if is_finished(out, inputs):
        return load_report(out) if ranks.first else None
    open_judge(judge)  # raises before any work where it lacks something
    check_device()

    def collect_all(folder: Path) -> dict[str, list[Record]]:
        ask = collect or partial(_collect, open_answers(folder), ranks)
        if isinstance(ideal, Source):
            own: dict[str, Any] = {"ideal": "itself", "judge": judge, "label": "scores: ideal", "progress": progress}
            evaluate_benchmark(ideal, benchmark, folder / "ideal", **own, collect=ask)
        return ask(source, benchmark, label, progress)

    if not ranks.first:
        progress = silent
        ranks.wait()  # until the first process has made the folder
        collect_all(partial_folder(out))
        return None
    facts = {"sources": {"model": source.pinned()}}
    with stage_folder(out, EVALUATION_KIND, inputs, facts, resumable=True, resume_key=subject) as folder:
        _take_over(out, folder, subject, collect is None)
        if not isinstance(ideal, Source):
            shutil.rmtree(folder / "ideal", ignore_errors=True)
        ranks.wait()
        records = collect_all(folder)
        reference = _ideal_records(folder, ideal, benchmark, records)
        _copy_prompts(judge, folder)
        about = {"model": subject["model"]} | ({"method": method} if method else {})
        return write_scores(folder, benchmark, records, reference, judge, about, progress)


def _collect(
    answers: Cache, ranks: Ranks, source: Source, benchmark: Benchmark, label: str, progress: Progress
) -> dict[str, list[Record]]:
    return collect_records(source, benchmark, answers, ranks, label, progress)


def _take_over(out: Path, folder: Path, subject: Mapping[str, Any], keeps_answers: bool) -> None:
    """Copy the answers of the folder that is made anew; warn where it scored another model or other questions."""
    inputs = (load_manifest(out) or {}).get("inputs", {})
    wanted = json.loads(canonical_json(subject))
    if inputs and any(inputs.get(key) != value for key, value in wanted.items()):
        logger.warning("%s: holds scores of another model, or on other questions, and is made anew", out)
    former, kept = (place / ANSWERS_FILE for place in (out, folder))
    if keeps_answers and former.is_file() and not kept.exists() and ANSWERS_FILE not in folder_faults(out):
        shutil.copyfile(former, kept)


def evaluation_inputs(
    source: Source,
    benchmark: Benchmark,
    ideal: Ideal = None,
    judge: JudgeSettings = NO_JUDGE,
    method: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return all that decides an evaluation, as its manifest records it. Arguments as of `evaluate_benchmark`."""
    inputs = {
        "model": model_identity(source),
        "questions": benchmark.describe(),
        "ideal": ideal_identity(ideal),
        "judge": describe_judge(judge),
    }
    return inputs | ({"method": method} if method else {})


def write_scores(
    folder: Path,
    benchmark: Benchmark,
    records: Records,
    ideal: Records | None,
    judge: JudgeSettings,
    about: Mapping[str, Any],
    progress: Progress = silent,
) -> Report:
    """Ask the judge about a model's records, and write the records with the report of their metrics.

    Without a judge, the verdicts of an earlier one are removed. about: the model, for the report's settings.
    """
    opened = open_judge(judge)
    calls = benchmark.judge_calls(records, ideal, judge) if opened else []
    verdicts, usage = opened.ask([call.ask for call in calls], progress) if opened else ([], None)
    _enter_verdicts(records, calls, verdicts)
    for name, items in records.items():
        write_records(folder / f"{name}.jsonl", items)
    judged = {"judge": describe_judge(judge) | asdict(usage)} if usage else {}
    settings = {**benchmark.describe(), **about, **judged}
    report = Report(benchmark.name, benchmark.split, benchmark.metrics(records, ideal), settings)
    write_report(report, folder)
    return report


def read_sets(folder: Path, benchmark: Benchmark) -> dict[str, list[Record]]:
    """Return the records of every set of a benchmark."""
    return {name: read_records(folder / f"{name}.jsonl") for name in benchmark.sets}


def _enter_verdicts(records: Records, calls: Sequence[JudgeCall], verdicts: Sequence[Ruling]) -> None:
    """Put the judge's scores into the records, under "judge", and its replies, under VERDICTS; remove earlier ones."""
    places = {(name, record["index"]): record for name, items in records.items() for record in items}
    for record in places.values():
        record.pop("judge", None)
        record.pop(VERDICTS, None)
    for call, verdict in zip(calls, verdicts, strict=True):
        entry = places[call.set_name, call.index].setdefault("judge", {"valid": True})
        entry["valid"] &= verdict.valid
        entry.update(call.scores[verdict.reply])
        places[call.set_name, call.index].setdefault(VERDICTS, []).append(_verdict_entry(call, verdict))


def _verdict_entry(call: JudgeCall, verdict: Ruling) -> Record:
    """Return what a record keeps of a call, so that a person can answer it too and be held against the judge."""
    scores = {
        letter: {name: value for name, value in values.items() if name != "merged"}
        for letter, values in call.scores.items()
    }
    return {"reply": verdict.reply, "tested": call.ask.tested, "shown": list(call.ask.shown), "scores": scores}


def check_comparable(folder: Path, benchmark: Benchmark, out: Path) -> None:
    """Raise MismatchError unless the evaluation in `folder` asked the same questions in the same way and is whole.

    Raise UsageError where it lies in `out`, whose content is about to be replaced.
    """
    if folder.resolve().is_relative_to(out.resolve()):
        raise UsageError(
            f"{folder}: lies in {out}, which is written anew; give the model instead, whose scores are taken up, or "
            "another output folder"
        )
    theirs = finished_inputs(folder).get("questions", {})
    ours = json.loads(canonical_json(benchmark.describe()))
    differing = [key for key, value in ours.items() if theirs.get(key) != value]
    if differing:
        raise MismatchError(
            f"{folder}: its {', '.join(differing)} are not those of this evaluation, so they cannot stand side by side"
        )


def finished_inputs(folder: Path) -> dict[str, Any]:
    """Return what a finished evaluation was made of: model, questions, ideal, judge.

    Raise MismatchError for another folder, and where its records are not as they were written.
    """
    manifest = load_manifest(folder) or {}
    if manifest.get("kind") != EVALUATION_KIND:
        raise MismatchError(f"{folder}: not the folder of an evaluation; a report needs its records beside it")
    inputs: dict[str, Any] = manifest["inputs"]
    sets = inputs.get("questions", {}).get("sets", {})
    needed = {REPORT_FILE, *(f"{name}.jsonl" for name in sets)}
    if purged := sorted(name for name in needed - manifest["files"].keys() if name != REPORT_FILE):
        raise MismatchError(f"{folder}: {', '.join(purged)}: the records were removed; evaluate that model again")
    if lost := sorted(folder_faults(folder).keys() & needed):
        raise MismatchError(f"{folder}: {', '.join(lost)}: missing, or not as written; evaluate that model again")
    return inputs


def ideal_identity(ideal: Ideal) -> Any:
    """Return what a manifest records of the ideal: the model, or the hashes of an earlier evaluation's records."""
    if isinstance(ideal, Path):
        files = (load_manifest(ideal) or {}).get("files", {})
        return {name: item["sha256"] for name, item in files.items() if name.endswith(".jsonl") and "/" not in name}
    return model_identity(ideal) if isinstance(ideal, Source) else ideal


def _copy_prompts(judge: JudgeSettings, folder: Path) -> None:
    """Keep a copy of the judge's wording beside its verdicts, and none of an earlier judge's."""
    (folder / PROMPTS_FILE).unlink(missing_ok=True)
    if judge.prompts:
        shutil.copyfile(local_path(judge.prompts), folder / PROMPTS_FILE)


def _ideal_records(partial: Path, ideal: Ideal, benchmark: Benchmark, own: Records) -> Records | None:
    if ideal is None or ideal == "itself":
        return own if ideal else None
    folder = ideal if isinstance(ideal, Path) else partial / "ideal"
    return read_sets(folder, benchmark)
