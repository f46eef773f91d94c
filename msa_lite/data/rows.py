"""Rows of a data set: questions with answers, or texts; read, sampled, split and named by their content."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from msa_lite.data.sources import DataSource, load_table, stream_table
from msa_lite.errors import DataError, join_faults, nearest
from msa_lite.io.manifest import digest

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One row: its index in the source, and a question with its answer, or a text (the other fields are empty)."""

    index: int
    question: str = ""
    answer: str = ""
    text: str = ""

    @property
    def sha256(self) -> str:
        """Hash of the content, by which a row can be recorded without repeating what is to be forgotten."""
        return digest([self.question, self.answer, self.text])


def load_rows(source: DataSource) -> list[Row]:
    """Read all rows of a source.

    Raises UsageError when path, configuration or split is not there, DataError when the set is empty, lacks a column
    (those that are there are named), or has empty cells in it.
    """
    table = load_table(source)
    _check_columns(source, table.column_names)
    if len(table) == 0:
        raise DataError(f"{source.path}: the data set is empty")
    columns = {key: table[key] for key in source.columns}
    cells = ((i, key, value) for key, values in columns.items() for i, value in enumerate(values))
    faults = [fault for cell in cells if (fault := _cell_fault(*cell))]
    if faults:
        raise DataError(join_faults(f"{source.path}: cells without text:", faults))
    if source.format == "qa":
        pairs = zip(columns[source.question], columns[source.answer], strict=True)
        return [Row(i, question=str(q), answer=str(a)) for i, (q, a) in enumerate(pairs)]
    return [Row(i, text=str(text)) for i, text in enumerate(columns[source.text])]


def stream_texts(source: DataSource) -> Iterator[str]:
    """The texts of a source in its order, as they are asked for. Raises as `load_rows`, once it comes to the fault."""
    for index, row in enumerate(stream_table(source)):
        if index == 0:
            _check_columns(source, list(row))
        if fault := _cell_fault(index, source.text, row[source.text]):
            raise DataError(f"{source.path}: cell without text: {fault}")
        yield str(row[source.text])


def _check_columns(source: DataSource, found: Sequence[str]) -> None:
    missing = [column for column in source.columns if column not in found]
    if missing:
        hint = "".join(nearest(column, found) for column in missing)
        raise DataError(
            f"{source.path}: no column {', '.join(map(repr, missing))}{hint}; there are "
            f"{', '.join(map(repr, found))}. Set data.columns in the recipe"
        )


def _cell_fault(index: int, column: str, value: object) -> str | None:
    wrong = not isinstance(value, (str, int, float)) or not str(value).strip()
    return f"row {index}, column '{column}': {value!r}" if wrong else None


def sample_rows(rows: Sequence[T], count: int, seed: int) -> list[T]:
    """A seeded sample without replacement, in the source's order; all rows where there are no more than `count`."""
    if count >= len(rows):
        return list(rows)
    chosen = random.Random(seed).sample(range(len(rows)), count)
    return [rows[i] for i in sorted(chosen)]


def split_rows(rows: Sequence[Row], share: float, seed: int) -> tuple[list[Row], list[Row]]:
    """(validation, test): a seeded split; validation gets `share` of the questions (texts), at least one.

    Rows that ask the same go to the same part.
    """
    asked = list(dict.fromkeys(row.question or row.text for row in rows))
    drawn = set(sample_rows(asked, max(1, round(share * len(asked))), seed))
    validation = [row for row in rows if (row.question or row.text) in drawn]
    return validation, [row for row in rows if (row.question or row.text) not in drawn]


def rows_identity(rows: Sequence[Row]) -> dict[str, Any]:
    """What a manifest records of a data set: the number of rows and one hash over their content."""
    return {"rows": len(rows), "sha256": digest([row.sha256 for row in rows])}
