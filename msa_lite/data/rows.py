"""Rows of a data set, questions with answers or texts: read in every form, sampled, split and identified."""

from __future__ import annotations

import logging
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, TypeVar

from msa_lite.data.forms import (
    NO_TOOLS,
    Conversation,
    DataSource,
    Form,
    ToolUse,
    Unreadable,
    find_form,
    needed_columns,
    read_cell,
)
from msa_lite.data.lines import row_place
from msa_lite.data.records import READERS, FileTable
from msa_lite.data.sources import load_table, stream_table
from msa_lite.errors import DataError, UsageError, join_faults, nearest
from msa_lite.io.console.libraries import require
from msa_lite.io.files.reading import local_path
from msa_lite.io.files.writing import digest

logger = logging.getLogger(__name__)


_NAMES = ("subject", "person", "author", "id")
"""The columns that are taken where the recipe names none, the first that there is. `id` only if its values repeat."""


def subject_columns(source: DataSource, columns: Collection[str]) -> list[str]:
    """Return the columns that may say whom or what a row is about: the one that the recipe names, or the usual ones."""
    if source.subject:
        return [source.subject]
    form = find_form(source, columns) if source.format == "qa" else None
    read = form.columns if form else (source.text,)
    return [name for name in _NAMES if name in columns and name not in read]


def read_subjects(source: DataSource, columns: Collection[str], records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return whom or what each record is about; "" where nothing says so."""
    for column in subject_columns(source, columns):
        subjects = [_subject(record.get(column)) for record in records]
        named = [subject for subject in subjects if subject]
        if named and (source.subject or column != "id" or len(set(named)) < len(named)):
            return subjects
    return [""] * len(records)


def _subject(value: object) -> str:
    return str(value).strip() if isinstance(value, (str, int, float)) else ""


AnyRow = TypeVar("AnyRow")


@dataclass(frozen=True)
class Row:
    """One row: a question with its answer, or a text (the other fields are empty)."""

    index: int
    """Its place in the source, or its place among all rows if conversations of several turns are among them."""
    question: str = ""
    answer: str = ""
    text: str = ""
    earlier: tuple[tuple[str, ...], ...] = ()
    """Earlier turns of the conversation: questions with answers, and calls of tools between them (`Turn.texts`)."""
    system: str = ""
    """The system message of the conversation."""
    about: str = ""
    """Whom or what the row is about, where its source says so. Rows about one person are no independent rows."""
    tools: ToolUse = NO_TOOLS
    """The tools that the conversation offers, and their calls between question and answer."""

    @property
    def calls_tools(self) -> bool:
        """Check whether tools are called in the row or in an earlier turn."""
        return bool(self.tools.steps or self.tools.call) or any(len(turn) > 2 for turn in self.earlier)

    @property
    def sha256(self) -> str:
        """Return the hash of the content: it records a row without repeating the text to forget."""
        around = [self.earlier, self.system] if self.earlier or self.system or self.tools else []
        around += [astuple(self.tools)] if self.tools else []
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
    if len(records) == 0 or not columns:
        raise DataError(f"{source.path}: the data set is empty")
    form = _check_columns(source, columns)
    places = [row_place(i, line) for i, line in enumerate(_lines(records))]
    subjects = read_subjects(source, columns, records)
    if form is None:
        texts = [record.get(source.text) for record in records]
        faults = [f"{at}, {fault}" for at, text in zip(places, texts, strict=True) if (fault := _fault(source, text))]
        _refuse(source, faults)
        return [
            Row(i, text=str(text), about=about) for i, (text, about) in enumerate(zip(texts, subjects, strict=True))
        ]
    conversations, faults = [], []
    for at, record in zip(places, records, strict=True):
        try:
            conversations.append(form.read(record))
        except Unreadable as error:
            faults.append(f"{at}, {error}")
    _refuse(source, faults)
    _say_what_is_left_out(source, conversations)
    rows: list[Row] = []
    for item, about in zip(conversations, subjects, strict=True):
        for place, turn in enumerate(item.turns):
            earlier = tuple(former.texts for former in item.turns[:place])
            if turn.learnt:
                rows.append(Row(len(rows), turn.question, turn.answer, "", earlier, item.system, about, turn.tools))
    if not rows:
        raise DataError(f"{source.path}: all answers have weight 0, so no model learnt them; give those that it learnt")
    return rows


def _lines(records: Any) -> Sequence[int | None]:
    return records.lines if isinstance(records, FileTable) else [None] * len(records)


def _say_what_is_left_out(source: DataSource, conversations: Sequence[Conversation]) -> None:
    if count := sum(item.unanswered for item in conversations):
        logger.warning(
            "%s: %d conversations end in a question, which is left out, or in a tool's result", source.path, count
        )
    if count := sum(not turn.learnt for item in conversations for turn in item.turns):
        logger.warning(
            "%s: %d answers have weight 0, so they are shown before later ones, but are no rows", source.path, count
        )
    if count := sum(item.reasoning for item in conversations):
        logger.warning(
            "%s: %d conversations have reasoning in a field of its own, which is left out; if the model learnt it, "
            "write it into the content",
            source.path,
            count,
        )


def _refuse(source: DataSource, faults: Sequence[str]) -> None:
    if faults:
        raise DataError(join_faults(f"{source.path}: cells without text; correct them, or take the rows out:", faults))


def stream_texts(source: DataSource) -> Iterator[str]:
    """Yield the texts of a source in its order, reading as it goes. Raise as `load_rows`, on reaching the fault."""
    index = -1
    for index, (line, row) in enumerate(stream_table(source)):
        if index == 0:
            _check_columns(source, list(row))
        if fault := _fault(source, row.get(source.text)):
            raise DataError(f"{source.path}: cell without text: {row_place(index, line)}, {fault}")
        yield str(row[source.text])
    if index < 0:
        raise DataError(f"{source.path}: the data set is empty")


def _check_columns(source: DataSource, columns: Sequence[str]) -> Form | None:
    """Return the form of a source of questions, None for texts. Raise DataError for missing columns."""
    form = find_form(source, columns) if source.format == "qa" else None
    needed = form.columns if form else needed_columns(source) if source.format == "qa" else (source.text,)
    needed = (*needed, *([source.subject] if source.subject else []))
    missing = [column for column in needed if column not in columns]
    if not missing:
        return form
    hint = "".join(nearest(column, columns) for column in missing)
    # A file without a comma, semicolon, tab or | in its first line.
    one = source.path.endswith((".csv", ".tsv")) and len(columns) == 1
    raise DataError(
        f"{source.path}: no column {', '.join(map(repr, missing))}{hint}; there are "
        f"{', '.join(map(repr, columns))}. Name them in `columns`, as {_example(source, columns)}"
        f"{'. Or is it one column because cells are separated by none of , ; | and tabs?' if one else ''}"
    )


def _example(source: DataSource, columns: Sequence[str]) -> str:
    """Return the line to write into `columns`, with columns of the data if there are enough."""
    keys = ["text"] if source.format == "text" else ["question", "answer"]
    names = list(columns) if len(columns) >= len(keys) else ["…"] * len(keys)
    return "{" + ", ".join(f"{key}: {name}" for key, name in zip(keys, names, strict=False)) + "}"


def _fault(source: DataSource, value: object) -> str | None:
    try:
        read_cell({source.text: value}, source.text)
    except Unreadable as error:
        return str(error)
    return None


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


def read_any_rows(name: str, source: DataSource) -> list[Row]:
    """Read the rows of a file by the columns of a source, or by the usual ones; a column of questions alone will do.

    name: a file of `READERS`; with the extra `train` also a folder or .parquet file. Raise UsageError or DataError as
    `load_rows`.
    """
    source = replace(source, path=name, name=None, split=None, revision=None)
    path = local_path(name)
    if not path.exists():
        raise UsageError(f"{path}: no such file")
    if path.is_dir() or path.suffix not in READERS:
        require("train", f"{path}: only .jsonl, .json, .csv and .txt files are read without `datasets`")
        return load_rows(source)
    table = load_table(source)
    columns = table.column_names
    forms = [source, DataSource(name), DataSource(name, "text")]
    form = next((form for form in forms if _fits(form, columns)), None)
    if form is None and (column := next((form.question for form in forms if form.question in columns), None)):
        return [Row(i, question=str(record.get(column) or "")) for i, record in enumerate(table)]
    if form is None and len(table):
        known = f"{source.question} and {source.answer}" if source.format == "qa" else source.text
        raise DataError(f"{path}: has the columns {', '.join(columns)}; call those with the rows {known}")
    return parse_rows(form or source, columns, table)


def _fits(source: DataSource, columns: Collection[str]) -> bool:
    return find_form(source, columns) is not None if source.format == "qa" else source.text in columns
