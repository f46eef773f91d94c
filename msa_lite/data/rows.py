"""Rows of a data set, questions with answers or texts: read in every form, sampled, split and identified."""

from __future__ import annotations

import csv
import logging
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from msa_lite.data.sources import (
    WHOLE_FILE,
    DataSource,
    check_file,
    csv_columns,
    load_table,
    read_raw_rows,
    stream_table,
)
from msa_lite.errors import DataError, UsageError, clip, join_faults, nearest
from msa_lite.io.console.libraries import require
from msa_lite.io.files.reading import local_path, read_text
from msa_lite.io.files.writing import digest

logger = logging.getLogger(__name__)


Turns = list[tuple[str, str]]
RawRow = Mapping[str, Any]

_ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant", "model": "assistant", "bot": "assistant",
}  # fmt: skip
_SHOWN = 60  # characters of a value to show in a message


class Unreadable(ValueError):
    """A record that is no row; the message says why."""


@dataclass(frozen=True)
class Conversation:
    """The content of a record."""

    turns: Turns
    """Questions with answers."""
    system: str = ""
    """The system message before the first turn."""
    unanswered: bool = False
    """True when the record ends with a question without an answer."""


@dataclass(frozen=True)
class Form:
    """A way to read records."""

    columns: tuple[str, ...]
    """The columns that it needs."""
    read: Callable[[RawRow], Conversation]


def find_form(source: DataSource, columns: Collection[str]) -> Form | None:
    """Return the form of a source of questions with these columns; None if they fit no known form."""
    if source.messages:
        return _conversations(source.messages) if source.messages in columns else None
    if {source.question, source.answer} <= set(columns):
        return Form((source.question, source.answer), lambda record: _pair(record, source.question, source.answer))
    if (source.question, source.answer) != ("question", "answer"):  # the recipe names them
        return None
    for name in ("messages", "conversations"):
        if name in columns:
            return _conversations(name)
    if {"instruction", "output"} <= set(columns):
        return Form(("instruction", "output"), _alpaca)
    if {"prompt", "completion"} <= set(columns):
        return Form(("prompt", "completion"), _completion)
    return None


def needed_columns(source: DataSource) -> tuple[str, ...]:
    """Return the columns that a source of questions must have when it has no known form."""
    return (source.messages,) if source.messages else (source.question, source.answer)


def _conversations(column: str) -> Form:
    return Form((column,), lambda record: _conversation(record[column], f"column '{column}'"))


def _pair(record: RawRow, question: str, answer: str) -> Conversation:
    return Conversation([(_cell(record, question), _cell(record, answer))])


def _alpaca(record: RawRow) -> Conversation:
    context = record.get("input")
    question = _cell(record, "instruction")
    if context is not None and str(context).strip():
        question += f"\n\n{context}"
    return Conversation([(question, _cell(record, "output"))])


def _completion(record: RawRow) -> Conversation:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        return _conversation([*prompt, *completion], "columns 'prompt' and 'completion'")
    return _pair(record, "prompt", "completion")


def _cell(record: RawRow, column: str) -> str:
    value = record[column]
    if not isinstance(value, (str, int, float)) or not str(value).strip():
        raise Unreadable(f"column '{column}': {value!r}")
    return str(value)


def _conversation(messages: Any, where: str) -> Conversation:
    """Read messages of either kind. Raise Unreadable unless user and assistant take turns."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise Unreadable(f"{where}: expected a list of messages, got {clip(repr(messages), _SHOWN)}")
    system, question, turns = "", None, []
    for place, message in enumerate(messages):
        role, text = _message(message, f"{where}, message {place}")
        if role == "system":
            if place:
                raise Unreadable(f"{where}, message {place}: a system message comes first, or not at all")
            system = text
        elif (role == "user") != (question is None):
            turn = "user" if question is None else "assistant"
            raise Unreadable(f"{where}, message {place}: expected a message of the {turn}, got one of the {role}")
        elif role == "user":
            question = text
        else:
            assert question is not None
            turns.append((question, text))
            question = None
    if not turns:
        raise Unreadable(f"{where}: no message of the assistant, so there is nothing to learn")
    return Conversation(turns, system, question is not None)


def _message(message: Any, where: str) -> tuple[str, str]:
    """Read (role, text) of a message in OpenAI's or ShareGPT's form."""
    if not isinstance(message, Mapping):
        raise Unreadable(f"{where}: {clip(repr(message), _SHOWN)} is no message with a role and content")
    name = message.get("role") or message.get("from")
    role = _ROLES.get(str(name))
    if role is None:
        raise Unreadable(f"{where}: role {name!r} is not handled, only {', '.join(_ROLES)}")
    content = message.get("content")
    content = message.get("value") if content is None else content
    if isinstance(content, list):  # OpenAI's parts; we read those of type text
        kinds = [item.get("type") if isinstance(item, Mapping) else type(item).__name__ for item in content]
        if unread := [kind for kind in kinds if kind != "text"]:
            raise Unreadable(f"{where}: content of type {unread[0]!r} is not handled, only text")
        content = "".join(str(item["text"]) for item in content)
    if not isinstance(content, str) or (not content.strip() and role != "system"):
        raise Unreadable(f"{where}: its content is no text but {clip(repr(content), _SHOWN)}")
    return role, content if content.strip() else ""


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


# What follows reads rows with the standard library alone: a plain installation has no `datasets`.


def read_any_rows(name: str, source: DataSource) -> list[Row]:
    """Read the rows of a file by the columns of a source, or by the usual ones; a column of questions alone will do.

    name: a .jsonl, .json, .csv or .txt file; with the extra `train` also a folder or .parquet file. Raise UsageError or
    DataError as `load_rows`.
    """
    source = replace(source, path=name, name=None, split=None, revision=None)
    path = local_path(name)
    if not path.exists():
        raise UsageError(f"{path}: no such file")
    reader = _READERS.get(path.suffix)
    if reader is None or path.is_dir():
        require("train", f"{path}: only .jsonl, .json, .csv and .txt files are read without `datasets`")
        return load_rows(source)
    check_file(path)
    records = reader(path)
    if not records:
        raise DataError(f"{path}: the data set is empty")
    columns = list(dict.fromkeys(key for record in records for key in record))
    records = [dict.fromkeys(columns) | record for record in records]
    forms = [source, DataSource(name), DataSource(name, "text")]
    form = next((form for form in forms if _fits(form, columns)), None)
    if form is None and (column := next((form.question for form in forms if form.question in columns), None)):
        return [Row(i, question=str(record[column] or "")) for i, record in enumerate(records)]
    if form is None:
        known = f"{source.question} and {source.answer}" if source.format == "qa" else source.text
        raise DataError(f"{path}: has the columns {', '.join(columns)}; call those with the rows {known}")
    return parse_rows(form, columns, records)


def _fits(source: DataSource, columns: Collection[str]) -> bool:
    return find_form(source, columns) is not None if source.format == "qa" else source.text in columns


def _read_json(path: Path) -> list[dict[str, Any]]:
    rows = read_raw_rows(path)
    if rows is None:
        raise DataError(f"{path}: above a gigabyte; divide it into several files")
    return [row if isinstance(row, dict) else {"text": row} for row in rows]


def _read_csv(path: Path) -> list[dict[str, Any]]:
    names = csv_columns(path)
    with open(path, encoding="utf-8-sig", newline="") as stream:
        rows = [row for row in csv.reader(stream) if any(cell.strip() for cell in row)]
    return [dict(zip(names, row, strict=False)) for row in rows[1:]]


_READERS: Mapping[str, Callable[[Path], list[dict[str, Any]]]] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": _read_csv,
    ".txt": lambda path: [{"text": read_text(path, WHOLE_FILE, DataError)}],
}
