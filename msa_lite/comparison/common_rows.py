"""Compare models on the rows that all of them were scored on.

A run that chooses between points or epochs is scored on the rows that it did not choose by. A run with nothing to
choose is scored on all rows, and an evaluation may be limited to a sample. The records beside each report hold what
the model answered, so the metrics of the common rows are computed without any model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msa_lite.comparison.agreement import TAKEN_FROM, whole_split
from msa_lite.errors import MismatchError, MsaError, join_faults
from msa_lite.io.extras import require
from msa_lite.io.seal import load_manifest
from msa_lite.report import REPORT_FILE, Report, load_report

if TYPE_CHECKING:
    from msa_lite.evals.benchmark import Benchmark, Record

_HEADLINE = "these reports are on different rows, and cannot be computed anew on those that all share:"

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
        raise MismatchError(join_faults(_HEADLINE, faults))
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


def _difference(name: str, rows: Sequence[int], one: Evaluation, other: Evaluation) -> str | None:
    """Return how the questions of two evaluations differ in the common rows of a set; None where they do not."""
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
    """Return the numbers of tokens of each text. Texts that are too long for the model are not in the records."""
    return {name: [text["n_tokens"] for text in texts] for name, texts in (record.get("scores") or {}).items()}


def _split(evaluations: Sequence[Evaluation], rows: RowNumbers) -> str:
    """Return the split that the reports name: "forget10, rows in common: 340 forget, 340 retain"."""
    splits = {evaluation.report.split for evaluation in evaluations}
    split = splits.pop() if len(splits) == 1 else whole_split(splits.pop())
    counts = ", ".join(f"{len(numbers)} {name.replace('_', ' ')}" for name, numbers in rows.items())
    return f"rows in common: {counts}" if split == "all" else f"{split}, rows in common: {counts}"


def _computed_anew(evaluation: Evaluation, evaluations: Sequence[Evaluation], rows: RowNumbers, split: str) -> Report:
    before = evaluation.report
    benchmark = _benchmark_of(evaluation)
    ideal = _ideal_of(evaluation, evaluations)
    try:
        metrics = benchmark.metrics(evaluation.on(rows), ideal.on(rows) if ideal else None)
    except ModuleNotFoundError:  # scipy: a plain installation has none
        require("train", "computing these metrics on common rows needs scipy")
        raise
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
