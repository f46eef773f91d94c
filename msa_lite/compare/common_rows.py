"""Models side by side on the rows that all of them were scored on.

A run that chooses between points or epochs is scored on the rows that it did not choose by, one with nothing to choose
on all of them, and an evaluation may be limited to a sample. The records beside each report hold all that a model was
needed for, so that the metrics of the rows in common need none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msa_lite.compare.agreement import TAKEN_FROM, whole_split
from msa_lite.errors import MismatchError, MsaError, join_faults
from msa_lite.io.seal import load_manifest
from msa_lite.report import REPORT_FILE, Report, load_report

if TYPE_CHECKING:
    from msa_lite.evals.benchmark import Benchmark, Record

_HEADLINE = "these reports are on different rows, and cannot be computed anew on those that all share:"

RowNumbers = Mapping[str, Sequence[int]]
"""Rows of each set by its name, in the data's order."""


@dataclass(frozen=True)
class Evaluation:
    """A finished evaluation: its report, what it was made of, and its records by set and row."""

    folder: Path
    report: Report
    inputs: Mapping[str, Any]
    records: Mapping[str, Mapping[int, Record]]

    def on(self, rows: RowNumbers) -> dict[str, list[Record]]:
        """The records of these rows, of the sets that there are."""
        return {name: [found[row] for row in rows[name]] for name, found in self.records.items()}


def on_common_rows(paths: Sequence[Path]) -> list[Report]:
    """The reports of evaluations of one benchmark (paths of their report.json) on the rows that all share.

    A set that only some evaluations have, like a holdout set, is cut to the rows that these share, and its metrics stay
    theirs. What a judge said is in the records and is kept. The ideal is the one that each evaluation was beside; where
    its records are not to be found, metrics that need it are None with the reason.
    Raises MismatchError, with all faults, where records are missing or not as they were written, where the rows of a
    set have nothing in common, and where evaluations have asked something else of one row.
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
        raise MismatchError(join_faults(_HEADLINE, faults))
    split = _split(evaluations, rows)
    return [_computed_anew(evaluation, evaluations, rows, split) for evaluation in evaluations]


def _read(path: Path) -> Evaluation:
    # Here and below: numpy is loaded only where something is computed.
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
    """(rows in common by set, faults)."""
    rows: dict[str, list[int]] = {}
    faults = []
    for name in dict.fromkeys(name for evaluation in evaluations for name in evaluation.records):
        having = [evaluation for evaluation in evaluations if name in evaluation.records]
        rows[name] = sorted(set[int].intersection(*(set(evaluation.records[name]) for evaluation in having)))
        if not rows[name]:
            faults.append(f"{name}: there is no row that all were scored on")
        for other in having[1:]:
            if difference := _difference(name, rows[name], having[0], other):
                faults.append(f"{other.folder}: not asked what {having[0].folder} was: {difference}")
    return rows, faults


def _benchmark_of(evaluation: Evaluation) -> type[Benchmark]:
    from msa_lite.evals.benchmark import benchmark_class

    return benchmark_class(evaluation.report.benchmark)


def _difference(name: str, rows: Sequence[int], one: Evaluation, other: Evaluation) -> str | None:
    """What evaluations were asked differently in a set, in its rows in common; None where nothing is known of it."""
    for row in rows:
        pair = one.records[name][row], other.records[name][row]
        if changed := [key for key in _benchmark_of(one).fields if pair[0].get(key) != pair[1].get(key)]:
            return f"{name}, row {row} has another {' and '.join(changed)}"
        lengths = [_lengths(record) for record in pair]
        if any(lengths[0][text] != lengths[1][text] for text in lengths[0].keys() & lengths[1].keys()):
            return f"{name}, row {row} has another number of tokens"
    limits = [e.report.settings.get("max_new_tokens") for e in (one, other)]
    if None not in limits and limits[0] != limits[1]:
        return f"answers of at most {limits[0]} and {limits[1]} tokens"
    hashes = [e.inputs["questions"]["sets"][name]["sha256"] for e in (one, other)]
    if one.records[name].keys() == other.records[name].keys() and hashes[0] != hashes[1]:
        return f"{name} has the same rows, but other tokens or lengths of answers"
    return None


def _lengths(record: Record) -> dict[str, list[int]]:
    """Tokens of each text; none of those that a model has no room for."""
    return {name: [text["n_tokens"] for text in texts] for name, texts in (record.get("scores") or {}).items()}


def _split(evaluations: Sequence[Evaluation], rows: RowNumbers) -> str:
    """What the numbers are on, as in "forget10, rows in common: 340 forget, 340 retain"."""
    splits = {evaluation.report.split for evaluation in evaluations}
    split = splits.pop() if len(splits) == 1 else whole_split(splits.pop())
    counts = ", ".join(f"{len(found)} {name.replace('_', ' ')}" for name, found in rows.items())
    return f"rows in common: {counts}" if split == "all" else f"{split}, rows in common: {counts}"


def _computed_anew(evaluation: Evaluation, evaluations: Sequence[Evaluation], rows: RowNumbers, split: str) -> Report:
    before = evaluation.report
    benchmark = _benchmark_of(evaluation)
    ideal = _ideal_of(evaluation, evaluations)
    metrics = benchmark.metrics(evaluation.on(rows), ideal.on(rows) if ideal else None)
    settings = {
        **before.settings,
        "sets": {name: {"rows": len(rows[name])} for name in evaluation.records},
        "model": evaluation.inputs["model"],
        TAKEN_FROM: {
            "split": before.split,
            "rows": {name: len(records) for name, records in evaluation.records.items()},
        },
    }
    return Report(before.benchmark, split, metrics, settings)


def _ideal_of(evaluation: Evaluation, evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """The ideal that an evaluation was beside: itself, in or beside its folder, or among the others."""
    from msa_lite.evals.evaluation import ideal_identity

    wanted = evaluation.inputs.get("ideal")
    if wanted in (None, "itself"):
        return evaluation if wanted else None
    known = {other.folder: other for other in evaluations}
    for place in (evaluation.folder / "ideal", evaluation.folder.parent / "ideal", *known):
        model = (load_manifest(place) or {}).get("inputs", {}).get("model")
        if wanted in (ideal_identity(place), model):
            ideal = known.get(place) or _read(place / REPORT_FILE)
            if all(ideal.records.get(name, {}).keys() >= found.keys() for name, found in evaluation.records.items()):
                return ideal
    return None
