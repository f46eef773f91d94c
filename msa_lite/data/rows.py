"""Rows of a data set, questions with answers or texts: read, sampled, split and identified by their content."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from msa_lite.data.forms import Form, Unreadable, find_form, needed_columns
from msa_lite.data.sources import DataSource, load_table, stream_table
from msa_lite.data.subjects import read_subjects, subject_columns
from msa_lite.errors import DataError, join_faults, nearest
from msa_lite.io.files import digest

AnyRow = TypeVar("AnyRow")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """One row: a question with its answer, or a text (the other fields are empty)."""

    index: int
    """Its place in the source, or its place among all rows if conversations of several turns are among them."""
    question: str = ""
    answer: str = ""
    text: str = ""
    earlier: tuple[tuple[str, str], ...] = ()
    """Earlier turns of the conversation: questions with answers."""
    system: str = ""
    """The system message of the conversation."""
    about: str = ""
    """Whom or what the row is about, where its source says so. Rows about one person are no independent rows."""

    @property
    def sha256(self) -> str:
        """Return the hash of the content: it records a row without repeating the text to forget."""
        around = [self.earlier, self.system] if self.earlier or self.system else []
        return digest([self.question, self.answer, self.text, *around])

    @property
    def thread(self) -> str:
        """Return the text, or the first question of the conversation, which rows that belong together share."""
        return self.text or (self.earlier[0][0] if self.earlier else self.question)


def load_rows(source: DataSource) -> list[Row]:
    """Read all rows of a source; each of the assistant's turns of a conversation is a row.

    Raise UsageError when path, configuration or split does not exist, DataError when the set is empty, lacks a column
    (the message names those that it has), or contains records that are no rows.
    """
    table = load_table(source)
    columns = table.column_names
    if source.format == "text" and source.text in columns:  # the other columns of documents need not be read
        table = table.select_columns([source.text, *(set(subject_columns(source, columns)) & set(columns))])
    return parse_rows(source, columns, table)


def parse_rows(source: DataSource, columns: Sequence[str], records: Any) -> list[Row]:
    """Return the rows of a source's records. Raise DataError as `load_rows`."""
    form = _check_columns(source, columns)
    if len(records) == 0:
        raise DataError(f"{source.path}: the data set is empty")
    subjects = read_subjects(source, columns, records)
    if form is None:
        texts = [record[source.text] for record in records]
        _refuse(source, [fault for i, text in enumerate(texts) if (fault := _text_fault(i, source.text, text))])
        return [
            Row(i, text=str(text), about=about) for i, (text, about) in enumerate(zip(texts, subjects, strict=True))
        ]
    conversations, faults = [], []
    for i, record in enumerate(records):
        try:
            conversations.append(form.read(record))
        except Unreadable as error:
            faults.append(f"row {i}, {error}")
    _refuse(source, faults)
    if unanswered := sum(item.unanswered for item in conversations):
        logger.warning("%s: %d conversations end in a question, which is left out", source.path, unanswered)
    pairs = zip(conversations, subjects, strict=True)
    turns = [(item, about, place) for item, about in pairs for place in range(len(item.turns))]
    return [
        Row(i, *item.turns[place], earlier=tuple(item.turns[:place]), system=item.system, about=about)
        for i, (item, about, place) in enumerate(turns)
    ]


def _refuse(source: DataSource, faults: Sequence[str]) -> None:
    if faults:
        raise DataError(join_faults(f"{source.path}: cells without text:", faults))


def stream_texts(source: DataSource) -> Iterator[str]:
    """Yield the texts of a source in its order, reading as it goes. Raise as `load_rows`, on reaching the fault."""
    for index, row in enumerate(stream_table(source)):
        if index == 0:
            _check_columns(source, list(row))
        if fault := _text_fault(index, source.text, row[source.text]):
            raise DataError(f"{source.path}: cell without text: {fault}")
        yield str(row[source.text])


def _check_columns(source: DataSource, columns: Sequence[str]) -> Form | None:
    """Return the form of a source of questions, None for texts. Raise DataError for missing columns."""
    form = find_form(source, columns) if source.format == "qa" else None
    needed = form.columns if form else needed_columns(source) if source.format == "qa" else (source.text,)
    needed = (*needed, *([source.subject] if source.subject else []))
    missing = [column for column in needed if column not in columns]
    if not missing:
        return form
    hint = "".join(nearest(column, columns) for column in missing)
    raise DataError(
        f"{source.path}: no column {', '.join(map(repr, missing))}{hint}; there are "
        f"{', '.join(map(repr, columns))}. Name them in `columns`, as {_example(source, columns)}"
    )


def _example(source: DataSource, columns: Sequence[str]) -> str:
    """Return the line to write into `columns`, with columns of the data if there are enough."""
    keys = ["text"] if source.format == "text" else ["question", "answer"]
    names = list(columns) if len(columns) >= len(keys) else ["…"] * len(keys)
    return "{" + ", ".join(f"{key}: {name}" for key, name in zip(keys, names, strict=False)) + "}"


def _text_fault(index: int, column: str, value: object) -> str | None:
    wrong = not isinstance(value, (str, int, float)) or not str(value).strip()
    return f"row {index}, column '{column}': {value!r}" if wrong else None


def sample_rows(rows: Sequence[AnyRow], count: int, seed: int) -> list[AnyRow]:
    """Draw a seeded sample without replacement, in the source's order; all rows if there are no more than `count`."""
    if count >= len(rows):
        return list(rows)
    chosen = random.Random(seed).sample(range(len(rows)), count)
    return [rows[i] for i in sorted(chosen)]


def split_rows(rows: Sequence[Row], share: float, seed: int) -> tuple[list[Row], list[Row]]:
    """Split rows by a seed into (validation, test); validation gets `share` of the questions (texts), at least one.

    Rows with the same question, and turns of one conversation, go to the same part.
    """
    threads = list(dict.fromkeys(row.thread for row in rows))
    drawn = set(sample_rows(threads, max(1, round(share * len(threads))), seed))
    validation = [row for row in rows if row.thread in drawn]
    return validation, [row for row in rows if row.thread not in drawn]


def rows_identity(rows: Sequence[Row]) -> dict[str, Any]:
    """Return what a manifest records of a data set: the number of rows and one hash over their content."""
    return {"rows": len(rows), "sha256": digest([row.sha256 for row in rows])}
