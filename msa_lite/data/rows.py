"""Rows of a data set, questions with answers or texts: read in every form, kept, sampled, split and identified."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from msa_lite.data.forms import (
    BESIDE,
    LOOK_LIKE_PARTS,
    Form,
    find_form,
    needed_columns,
    read_cell,
    read_optional_cell,
    unread_parts,
)
from msa_lite.data.messages import NO_TOOLS, Conversation, ToolUse, Unreadable
from msa_lite.data.sources import RecordTable, load_table, pin_source, stream_table
from msa_lite.errors import DataError, UsageError, join_faults, nearest
from msa_lite.io.console.progress import notices
from msa_lite.io.files.reading import local_path
from msa_lite.io.files.writing import digest
from msa_lite.settings import DataSource

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


def read_subjects(source: DataSource, table: RecordTable) -> list[str]:
    """Return whom or what each record is about; "" where nothing says so. Raise DataError for cells without text."""
    for column in subject_columns(source, table.column_names):
        if not source.subject and any(isinstance(record.get(column), dict | list) for record in table):
            continue  # whatever it holds, it is no name
        subjects = _cells(source, table, partial(_subject, column))
        named = [subject for subject in subjects if subject]
        if named and (source.subject or column != "id" or len(set(named)) < len(named)):
            return subjects
    return [""] * len(table)


def _subject(column: str, record: Mapping[str, Any]) -> str:
    return read_optional_cell(record, column).strip()


_GUESSED = ("system", "tools", "history")
"""The keys of `columns` whose usual names LLaMA-Factory and others do not read unless they are named."""

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
    return parse_rows(source, load_table(source))


def parse_rows(source: DataSource, table: RecordTable) -> list[Row]:
    """Return the rows of a source's table. Raise DataError as `load_rows`."""
    columns = table.column_names
    if not columns:
        raise DataError(f"{source.path}: the data set is empty")
    form = _check_columns(source, columns)
    subjects = read_subjects(source, table)
    if form is None:
        texts = _cells(source, table, lambda record: read_cell(record, source.text))
        return [Row(i, text=text, about=about) for i, (text, about) in enumerate(zip(texts, subjects, strict=True))]
    _check_parts(source, form, table)
    conversations = _cells(source, table, form.read)
    _say_what_is_guessed(source, form, table)
    _say_what_is_left_out(source, conversations)
    rows: list[Row] = []
    for item, about in zip(conversations, subjects, strict=True):
        for place, turn in enumerate(item.turns):
            earlier = tuple(former.texts for former in item.turns[:place])
            if turn.learnt:
                rows.append(Row(len(rows), turn.question, turn.answer, "", earlier, item.system, about, turn.tools))
    if not rows:
        raise DataError(f"{source.path}: all answers are marked as not learnt; give those that the model learnt")
    return rows


def _cells(
    source: DataSource, table: RecordTable, read: Callable[[Mapping[str, Any]], AnyRow], first: int = 0
) -> list[AnyRow]:
    """Return what `read` makes of each record. Raise DataError with the places of all those that it cannot read.

    first: the number of the first row.
    """
    values, faults = [], []
    for row, (record, place) in enumerate(zip(table.records, table.places, strict=True), first):
        try:
            values.append(read(record))
        except Unreadable as error:
            faults.append(f"{place.of_row(row)}, {error}")
    if faults:
        raise DataError(join_faults(f"{source.path}: cells without text; correct them, or take the rows out:", faults))
    return values


def _check_parts(source: DataSource, form: Form, table: RecordTable) -> None:
    """Raise DataError for columns that look like a part of prompt or answer, and that are neither used nor ignored."""
    first: dict[str, str] = {}
    for row, (record, place) in enumerate(zip(table.records, table.places, strict=True)):
        for column in unread_parts(source, form, record):
            first.setdefault(column, place.of_row(row))
    if first:
        places = ", ".join(f"column {column!r} ({where})" for column, where in first.items())
        pair = f"question: {form.columns[0]}, answer: chosen"  # in LLaMA-Factory's preferences
        preferred = f" The preferred answers are {{{pair}, ignore: [rejected]}}." if "chosen" in first else ""
        raise DataError(
            f"{source.path}: not used, although the model may have learnt with it: {places}.{preferred} What it read, "
            f"name in `columns` by its meaning ({', '.join(form.beside)}), or write it into the rows. What it did not: "
            f"{{ignore: [{', '.join(first)}]}}, or --columns {','.join(f'ignore={column}' for column in first)}. Rows "
            "that it did not learn: take them out"
        )


def _say_what_is_guessed(source: DataSource, form: Form, table: RecordTable) -> None:
    """Tell of the columns beside question and answer that are shown by their usual names, not by the recipe's."""
    guessed = ((key, name) for key in _GUESSED if not getattr(source, key) for name in form.beside.get(key, ()))
    for key, name in guessed if len(form.columns) > 1 else ():
        if any(record.get(name) for record in table):
            notices.info(
                "%s: column '%s' is read as `%s`; if the model did not read it, columns: {ignore: [%s]}",
                source.path, name, key, name,
            )  # fmt: skip


def _say_what_is_left_out(source: DataSource, conversations: Sequence[Conversation]) -> None:
    if count := sum(item.unanswered for item in conversations):
        logger.warning(
            "%s: %d conversations end in a question, which is left out, or in a tool's result", source.path, count
        )
    if count := sum(not turn.learnt for item in conversations for turn in item.turns):
        logger.warning(
            "%s: %d answers were not learnt (by their marks, or as part of a prompt), so they are shown before later "
            "ones, but are no rows",
            source.path,
            count,
        )
    if count := sum(item.empty_system and not item.system for item in conversations):
        logger.warning(
            "%s: %d conversations begin with an empty system message, which is left out; if the model learnt with it, "
            "set prompt.system to ''",
            source.path,
            count,
        )
    if count := sum(item.reasoning for item in conversations):
        logger.warning(
            "%s: %d conversations have reasoning in a field of its own, which is left out; if the model learnt it, "
            "write it into the content",
            source.path,
            count,
        )


def stream_texts(source: DataSource) -> Iterator[str]:
    """Yield the texts of a source in its order, reading as it goes. Raise as `load_rows`, on reaching the fault."""
    row = -1
    for row, (place, record) in enumerate(stream_table(source)):
        if row == 0:
            _check_columns(source, list(record))
        yield from _cells(source, RecordTable([record], [place]), lambda record: read_cell(record, source.text), row)
    if row < 0:
        raise DataError(f"{source.path}: the data set is empty")


def kept_texts(source: DataSource, file: Path) -> Iterator[str]:
    """Yield the texts of a source in its order. Each text that is read is kept as a line of `file`.

    A later call reads these lines first. The first line names source and revision; for another source or revision the
    file is begun anew. A source without a revision takes the file's. Raise as `stream_texts`.
    """
    head = kept_head(file)
    end, count = 0, 0
    if head is not None and head == _head(source, source.revision or head["revision"]):
        with open(file, "rb") as stream:
            end = len(stream.readline())
            for line in stream:
                if not line.endswith(b"\n"):  # a kill interrupted the writing
                    break
                if (text := json.loads(line)) is None:
                    return
                end, count = end + len(line), count + 1
                yield text
        source = replace(source, revision=head["revision"])
    else:
        source = pin_source(source)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(_head(source, source.revision)) + "\n", "utf-8")
        end = file.stat().st_size
    with open(file, "r+b") as stream:
        stream.truncate(end)
        stream.seek(end)
        for text in islice(stream_texts(source), count, None):
            stream.write(json.dumps(text).encode() + b"\n")
            yield text
        stream.write(b"null\n")  # there are no more


def kept_head(file: Path) -> dict[str, Any] | None:
    """Return the first line of a file of kept texts, with the source and its revision; None if there is none."""
    try:
        with open(file, encoding="utf-8") as stream:
            head = json.loads(stream.readline())
    except (OSError, ValueError):
        return None
    return head if isinstance(head, dict) and "revision" in head else None


def _head(source: DataSource, revision: str | None) -> dict[str, Any]:
    read = ("path", "format", "name", "split", "question", "answer", "text")  # no others, so that files of before go on
    fields = {key: getattr(source, key) for key in read}
    return fields | {"revision": revision}


def _check_columns(source: DataSource, columns: Sequence[str]) -> Form | None:
    """Return the form of a source of questions, None for texts. Raise DataError for missing columns."""
    columns = [column for column in columns if column not in source.ignore]
    form = find_form(source, columns) if source.format == "qa" else None
    needed = form.columns if form else needed_columns(source) if source.format == "qa" else (source.text,)
    named = {key: getattr(source, key) for key in (*(BESIDE if source.format == "qa" else ()), "subject")}
    if form and (lost := [key for key in BESIDE if named[key] and key not in form.beside]):
        raise DataError(
            f"{source.path}: columns.{lost[0]}: rows are read from {form.columns[0]!r}, which holds whole "
            "conversations; leave it out, or name question and answer"
        )
    missing = [column for column in (*needed, *filter(None, named.values())) if column not in columns]
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
    names = [name for name in columns if name == "chosen" or name.lower() not in LOOK_LIKE_PARTS] or list(columns)
    keys = keys if len(names) >= len(keys) else ["messages"]
    likely = ("instruction", "prompt", "query", "question", "answers", "chosen", "output", "response")
    names.sort(key=lambda name: name not in likely)
    pairs = [f"{key}: {name}" for key, name in zip(keys, names, strict=False)]
    return f"{{{', '.join(pairs + ['ignore: [rejected]'] * ('rejected' in columns))}}}"


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

    name: a file of `READERS`, or a folder. Raise UsageError or DataError as `load_rows`.
    """
    source = replace(source, path=name, name=None, split=None, revision=None, subject=None)
    path = local_path(name)
    if not path.exists():
        raise UsageError(f"{path}: no such file")
    table = load_table(source)
    columns = table.column_names
    forms = [source, DataSource(name, ignore=source.ignore), DataSource(name, "text")]
    form = next((form for form in forms if _fits(form, columns)), None)
    if form is None and (column := next((form.question for form in forms if form.question in columns), None)):
        return [Row(row.index, question=row.text) for row in parse_rows(DataSource(name, "text", text=column), table)]
    if form is None and len(table):
        known = f"{source.question} and {source.answer}" if source.format == "qa" else source.text
        raise DataError(f"{path}: has the columns {', '.join(columns)}; call those with the rows {known}")
    return parse_rows(form or source, table)


def _fits(source: DataSource, columns: Collection[str]) -> bool:
    return find_form(source, columns) is not None if source.format == "qa" else source.text in columns
