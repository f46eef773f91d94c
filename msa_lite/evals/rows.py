"""List the rows to forget from the records of a run's models."""

from __future__ import annotations

from collections.abc import Mapping

from msa_lite.evals.benchmark import Benchmark, Record, Records
from msa_lite.report.rows import ListedRow, RowList, sorted_rows


def list_rows(benchmark: type[Benchmark], models: Mapping[str, Records], known: int = 0) -> RowList:
    """Return all rows to forget with the answers of target, unlearned model and ideal.

    models: records by set, by the name of the model; known: the rows to forget that there are,
    if that is known; those without a record are counted as `unscored`.
    """
    sides = {name: {record["index"]: record for record in benchmark.forget_records(r)} for name, r in models.items()}
    indices = list(dict.fromkeys(index for records in sides.values() for index in records))
    rows = [
        _row(benchmark, index, {name: records[index] for name, records in sides.items() if index in records})
        for index in indices
    ]
    return RowList(sorted_rows(rows), benchmark.wording, max(0, known - len(rows)))


def _row(benchmark: type[Benchmark], index: int, records: Mapping[str, Record]) -> ListedRow:
    first = next(iter(records.values()))
    question = first.get("question") or first.get("prompt") or ""
    expected = first["answers"] if "answers" in first else [first.get("answer") or first.get("gt") or ""]
    text = first.get("text") or ""
    return ListedRow(
        index,
        question,
        " / ".join(expected),
        text,
        {name: _answer(record) for name, record in records.items()},
        {name: benchmark.fails(record) for name, record in records.items()},
        {name: record.get("exact_memorization") for name, record in records.items()} if text else {},
    )


def _answer(record: Record) -> str | None:
    """Return what was generated; several answers to one question in one text."""
    generated = record.get("generated")
    return generated if generated is None or isinstance(generated, str) else " / ".join(generated)
