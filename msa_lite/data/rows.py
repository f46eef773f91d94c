"""Rows of a data set: questions with answers, or texts; read, sampled, split and named by their content."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from msa_lite.data.forms import Form, Unreadable, find_form, wanted_columns
from msa_lite.data.sources import DataSource, load_table, stream_table
from msa_lite.errors import DataError, join_faults, nearest
from msa_lite.io.files import digest

AnyRow = TypeVar("AnyRow")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """One row: a question with its answer, or a text (the other fields are empty)."""

    index: int
    """Its place in the source; where conversations of several turns are among the rows, its place among all rows."""
    question: str = ""
    answer: str = ""
    text: str = ""
    earlier: tuple[tuple[str, str], ...] = ()
    """Earlier turns of the conversation: questions with answers."""
    system: str = ""
    """The system message of the conversation."""

    @property
    def sha256(self) -> str:
        """Hash of the content, by which a row can be recorded without repeating what is to be forgotten."""
        around = [self.earlier, self.system] if self.earlier or self.system else []
        return digest([self.question, self.answer, self.text, *around])

    @property
    def subject(self) -> str:
        """Return what rows that belong together share: the text, or the first question of the conversation."""
        return self.text or (self.earlier[0][0] if self.earlier else self.question)


def load_rows(source: DataSource) -> list[Row]:
    """Read all rows of a source; of a conversation, each of the assistant's turns is a row.

    Raises UsageError when path, configuration or split is not there, DataError when the set is empty, lacks a column
    (those that are there are named), or has records in it that are no rows.
    """
    table = load_table(source)
    form = _check_columns(source, table.column_names)
    if len(table) == 0:
        raise DataError(f"{source.path}: the data set is empty")
    if form is None:
        texts = table[source.text]
        _refuse(source, [fault for i, text in enumerate(texts) if (fault := _text_fault(i, source.text, text))])
        return [Row(i, text=str(text)) for i, text in enumerate(texts)]
    read, faults = [], []
    for i, record in enumerate(table):
        try:
            read.append(form.read(record))
        except Unreadable as error:
            faults.append(f"row {i}, {error}")
    _refuse(source, faults)
    if unanswered := sum(item.unanswered for item in read):
        logger.warning("%s: %d conversations end in a question, which is left out", source.path, unanswered)
    turns = [(item, place) for item in read for place in range(len(item.turns))]
    return [
        Row(i, *item.turns[place], earlier=tuple(item.turns[:place]), system=item.system)
        for i, (item, place) in enumerate(turns)
    ]


def _refuse(source: DataSource, faults: Sequence[str]) -> None:
    if faults:
        raise DataError(join_faults(f"{source.path}: cells without text:", faults))


def stream_texts(source: DataSource) -> Iterator[str]:
    """The texts of a source in its order, as they are asked for. Raises as `load_rows`, once it comes to the fault."""
    for index, row in enumerate(stream_table(source)):
        if index == 0:
            _check_columns(source, list(row))
        if fault := _text_fault(index, source.text, row[source.text]):
            raise DataError(f"{source.path}: cell without text: {fault}")
        yield str(row[source.text])


def _check_columns(source: DataSource, found: Sequence[str]) -> Form | None:
    """Return the form of a source of questions, None for texts. Raises DataError for columns that are not there."""
    if source.format == "qa" and (form := find_form(source, found)):
        return form
    wanted = wanted_columns(source) if source.format == "qa" else (source.text,)
    missing = [column for column in wanted if column not in found]
    if not missing:
        return None
    hint = "".join(nearest(column, found) for column in missing)
    raise DataError(
        f"{source.path}: no column {', '.join(map(repr, missing))}{hint}; there are "
        f"{', '.join(map(repr, found))}. Name them in `columns`, as {_example(source, found)}"
    )


def _example(source: DataSource, found: Sequence[str]) -> str:
    """Return the line to write into `columns`, with columns of the data where they suffice."""
    wanted = ["text"] if source.format == "text" else ["question", "answer"]
    names = list(found) if len(found) >= len(wanted) else ["…"] * len(wanted)
    return "{" + ", ".join(f"{key}: {name}" for key, name in zip(wanted, names, strict=False)) + "}"


def _text_fault(index: int, column: str, value: object) -> str | None:
    wrong = not isinstance(value, (str, int, float)) or not str(value).strip()
    return f"row {index}, column '{column}': {value!r}" if wrong else None


def sample_rows(rows: Sequence[AnyRow], count: int, seed: int) -> list[AnyRow]:
    """A seeded sample without replacement, in the source's order; all rows where there are no more than `count`."""
    if count >= len(rows):
        return list(rows)
    chosen = random.Random(seed).sample(range(len(rows)), count)
    return [rows[i] for i in sorted(chosen)]


def split_rows(rows: Sequence[Row], share: float, seed: int) -> tuple[list[Row], list[Row]]:
    """(validation, test): a seeded split; validation gets `share` of the questions (texts), at least one.

    Rows that ask the same, and turns of one conversation, go to the same part.
    """
    asked = list(dict.fromkeys(row.subject for row in rows))
    drawn = set(sample_rows(asked, max(1, round(share * len(asked))), seed))
    validation = [row for row in rows if row.subject in drawn]
    return validation, [row for row in rows if row.subject not in drawn]


def rows_identity(rows: Sequence[Row]) -> dict[str, Any]:
    """What a manifest records of a data set: the number of rows and one hash over their content."""
    return {"rows": len(rows), "sha256": digest([row.sha256 for row in rows])}
