"""Check that reports can stand side by side, and compute them anew on the rows that all of them share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msa_lite.comparison.entries import Entry
from msa_lite.comparison.published import PublishedTable
from msa_lite.errors import MismatchError, MsaError, join_faults
from msa_lite.io.console.libraries import require
from msa_lite.io.finished.seal import load_manifest
from msa_lite.report import REPORT_FILE, Report, load_report
from msa_lite.report.metrics import metric_kind

if TYPE_CHECKING:
    from msa_lite.evals.benchmark import Benchmark, Record


TEST = " test"  # ends the name of a split whose other rows were used for a choice
_SETTINGS = ("prompt", "compat")  # that decide the questions
# Setting of a report that was computed anew: the evaluation whose records were used.
TAKEN_FROM = "taken_from"
_HEADLINE = "these reports cannot stand side by side:"


def judge_of(report: Report) -> tuple[Any, ...]:
    """Return what decides a judge's verdicts; empty where there was no judge."""
    judge = report.settings.get("judge")
    if not isinstance(judge, Mapping):
        return ()
    return tuple(judge.get(key) for key in ("model", "kind", "prompts"))


def whole_split(split: str) -> str:
    """Return the whole split that a test part belongs to."""
    return "all" if split == TEST.strip() else split.removesuffix(TEST)


def same_rows(entries: Sequence[Entry]) -> bool:
    """Check whether all reports are on the same rows."""
    rows = [(entry.report.split, entry.report.settings.get("sets")) for entry in entries]
    return all(other == rows[0] for other in rows)


def check_agreement(entries: Sequence[Entry], table: PublishedTable | None = None) -> None:
    """Raise MismatchError where benchmark, split, questions, prompt or compat of two reports differ, with all faults.

    A published table must have the reports' benchmark and split. Different judges are allowed, and so are different
    rows of one split.
    """
    if not entries:
        return
    first, faults = entries[0], []
    for entry in entries[1:]:
        if differences := _differences(entry.report, first.report):
            faults.append(f"{_name(entry)}: {', '.join(differences)}")
    if faults:
        faults.insert(0, f"{_name(first)}, with which the others are compared")
    if table and (fault := _table_fault(first.report, table)):
        faults.append(f"{table.name}: {fault}")
    if faults:
        raise MismatchError(join_faults(_HEADLINE, faults, limit=30))


def _name(entry: Entry) -> str:
    return f"{entry.label} ({entry.source})"


def _differences(report: Report, reference: Report) -> list[str]:
    if report.benchmark != reference.benchmark:
        return [f"benchmark {report.benchmark}, not {reference.benchmark}"]
    has_same_split = whole_split(report.split) == whole_split(reference.split)
    faults = [] if has_same_split else [f"split '{report.split}', not '{reference.split}'"]
    return faults + [f"other {key}" for key in _SETTINGS if report.settings.get(key) != reference.settings.get(key)]


def _table_fault(report: Report, table: PublishedTable) -> str | None:
    """Return how benchmark or split of a published table and a report differ, or None."""
    if table.benchmark != report.benchmark:
        return f"its benchmark is {table.benchmark}, that of the reports is {report.benchmark}"
    if table.split is not None and table.split != whole_split(report.split):
        return f"its split is {table.split}, that of the reports is {report.split}"
    return None


def merge_references(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries with at most one target and one ideal, each with the values of all its reports.

    Raise MismatchError where two reports of it disagree. Judged values of different judges may differ. Where the
    settings say that the model is the same, the first report's values are taken.
    """
    faults: list[str] = []
    merged: list[Entry] = []
    for entry in entries:
        at = next((i for i, other in enumerate(merged) if entry.role == other.role != "method"), None)
        if at is None:
            merged.append(entry)
        elif differences := _disagreements(merged[at], entry):
            faults.append(f"{_name(merged[at])} and {_name(entry)} differ in {', '.join(differences)}")
        else:
            metrics = merged[at].report.metrics
            known = {name: metric for name, metric in metrics.items() if metric.value is not None}
            report = replace(merged[at].report, metrics={**metrics, **entry.report.metrics, **known})
            merged[at] = replace(merged[at], report=report)
    if faults:
        faults.append("to leave one out, give the reports of unlearned models instead of run folders")
        raise MismatchError(join_faults(_HEADLINE, faults))
    return merged


def _disagreements(first: Entry, second: Entry) -> list[str]:
    """Return the metrics in which two reports of one model differ, with both values."""
    models = [entry.report.settings.get("model") for entry in (first, second)]
    if models[0] is not None and models[0] == models[1]:
        return []  # other devices and batch sizes sum floats in another order
    same_judge = judge_of(first.report) == judge_of(second.report)
    names = [name for name in first.report.metrics if same_judge or metric_kind(name).judge is None]
    pairs = {name: (first.value(name), second.value(name)) for name in names}
    return [
        f"{name} ({a:.6g}, {b:.6g})"
        for name, (a, b) in pairs.items()
        if a is not None and b is not None and not math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)
    ]


_OTHER_ROWS = "these reports are on different rows, and cannot be computed anew on those that all share:"

RowNumbers = Mapping[str, Sequence[int]]
"""Rows of each set by its name, in the data's order."""


@dataclass(frozen=True)
class Evaluation:
    """A finished evaluation, read from its folder."""

    folder: Path
    report: Report
    inputs: Mapping[str, Any]
    """The inputs that its manifest names."""
    records: Mapping[str, Mapping[int, Record]]
    """By set and row."""

    def on(self, rows: RowNumbers) -> dict[str, list[Record]]:
        """Return the records of these rows, for each set of this evaluation."""
        return {name: [records[row] for row in rows[name]] for name, records in self.records.items()}


def on_common_rows(paths: Sequence[Path]) -> list[Report]:
    """Return the reports of evaluations of one benchmark on the rows that all of them share.

    A set that only some evaluations have, like a holdout set, is cut to the rows that these share, and only they have
    its metrics. The judge's verdicts are in the records and are kept. Each evaluation keeps its own ideal. Where the
    ideal's records cannot be found, the metrics that need it are None with the reason.

    paths: of their report.json files. Raise MismatchError, with all faults: records are missing or changed, a set has
    no common row, or two evaluations asked different things about one row.
    """
    evaluations, faults = [], []
    for path in paths:
        try:
            evaluations.append(_read(path))
        except MsaError as error:
            faults.append(str(error))
    if not faults:
        rows, faults = _common_rows(evaluations)
    if faults:
        raise MismatchError(join_faults(_OTHER_ROWS, faults))
    split = _split(evaluations, rows)
    return [_computed_anew(evaluation, evaluations, rows, split) for evaluation in evaluations]


def _read(path: Path) -> Evaluation:
    # Here and below: numpy is loaded only where metrics are computed.
    from msa_lite.evals.evaluation import finished_inputs
    from msa_lite.evals.records import read_records

    if path.name != REPORT_FILE:
        raise MismatchError(f"{path}: not the {REPORT_FILE} of an evaluation's folder, with the records beside it")
    folder = path.parent
    inputs = finished_inputs(folder)
    records = {
        name: {record["index"]: record for record in read_records(folder / f"{name}.jsonl")}
        for name in inputs["questions"]["sets"]
    }
    return Evaluation(folder, load_report(path), inputs, records)


def _common_rows(evaluations: Sequence[Evaluation]) -> tuple[dict[str, list[int]], list[str]]:
    """Return (the common rows by set, the faults)."""
    rows: dict[str, list[int]] = {}
    faults = []
    for name in dict.fromkeys(name for evaluation in evaluations for name in evaluation.records):
        first, *others = (evaluation for evaluation in evaluations if name in evaluation.records)
        rows[name] = sorted(set(first.records[name]).intersection(*(other.records[name] for other in others)))
        if not rows[name]:
            faults.append(f"{name}: there is no row that all were scored on")
        for other in others:
            if difference := _difference(name, rows[name], first, other):
                faults.append(f"{other.folder}: its questions are not those of {first.folder}: {difference}")
    return rows, faults


def _benchmark_of(evaluation: Evaluation) -> type[Benchmark]:
    from msa_lite.evals.benchmark import benchmark_class

    return benchmark_class(evaluation.report.benchmark)


def _difference(name: str, rows: Sequence[int], first: Evaluation, second: Evaluation) -> str | None:
    """Return how the questions of two evaluations differ in the common rows of a set; None where they do not."""
    for row in rows:
        pair = first.records[name][row], second.records[name][row]
        if changed := [key for key in _benchmark_of(first).fields if pair[0].get(key) != pair[1].get(key)]:
            return f"{name}, row {row} has another {' and '.join(changed)}"
        lengths = [_lengths(record) for record in pair]
        if any(lengths[0][text] != lengths[1][text] for text in lengths[0].keys() & lengths[1].keys()):
            return f"{name}, row {row} has another number of tokens"
    limits = [e.report.settings.get("max_new_tokens") for e in (first, second)]
    if None not in limits and limits[0] != limits[1]:
        return f"answers of at most {limits[0]} and {limits[1]} tokens"
    hashes = [e.inputs["questions"]["sets"][name]["sha256"] for e in (first, second)]
    if first.records[name].keys() == second.records[name].keys() and hashes[0] != hashes[1]:
        return f"{name} has the same rows, but other tokens or lengths of answers"
    return None


def _lengths(record: Record) -> dict[str, list[int]]:
    """Return the numbers of tokens of each text. Texts that are too long for the model are not in the records."""
    return {name: [text["n_tokens"] for text in texts] for name, texts in (record.get("scores") or {}).items()}


def _split(evaluations: Sequence[Evaluation], rows: RowNumbers) -> str:
    """Return the split that the reports name: "forget10, rows in common: 340 forget, 340 retain"."""
    splits = {evaluation.report.split for evaluation in evaluations}
    split = splits.pop() if len(splits) == 1 else whole_split(splits.pop())
    counts = ", ".join(f"{len(numbers)} {name.replace('_', ' ')}" for name, numbers in rows.items())
    return f"rows in common: {counts}" if split == "all" else f"{split}, rows in common: {counts}"


def _computed_anew(evaluation: Evaluation, evaluations: Sequence[Evaluation], rows: RowNumbers, split: str) -> Report:
    report = evaluation.report
    benchmark = _benchmark_of(evaluation)
    ideal = _ideal_of(evaluation, evaluations)
    try:
        metrics = benchmark.metrics(evaluation.on(rows), ideal.on(rows) if ideal else None)
    except ModuleNotFoundError:  # scipy: a plain installation has none
        require("train", "computing these metrics on common rows needs scipy")
        raise
    settings = {
        **report.settings,
        "sets": {name: {"rows": len(rows[name])} for name in evaluation.records},
        "model": evaluation.inputs["model"],
        TAKEN_FROM: {
            "split": report.split,
            "rows": {name: len(records) for name, records in evaluation.records.items()},
        },
    }
    return Report(report.benchmark, split, metrics, settings)


def _ideal_of(evaluation: Evaluation, evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """Return the ideal of an evaluation: itself, in or beside its folder, or among the others."""
    from msa_lite.evals.evaluation import ideal_identity

    identity = evaluation.inputs.get("ideal")
    if identity in (None, "itself"):
        return evaluation if identity else None
    by_folder = {other.folder: other for other in evaluations}
    for place in (evaluation.folder / "ideal", evaluation.folder.parent / "ideal", *by_folder):
        model = (load_manifest(place) or {}).get("inputs", {}).get("model")
        if identity in (ideal_identity(place), model):
            ideal = by_folder.get(place) or _read(place / REPORT_FILE)
            if all(ideal.records.get(name, {}).keys() >= rows.keys() for name, rows in evaluation.records.items()):
                return ideal
    return None
