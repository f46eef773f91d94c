"""Forms of records: columns of questions and answers, or conversations, and the columns beside them that models read.

Columns mean what they mean where models are trained: in LLaMA-Factory (system, history, tools; input goes behind the
instruction on a line of its own), axolotl, TRL (the prompt is shown, the completion learnt) and OpenAI's files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from msa_lite.data.messages import (
    Conversation,
    Unreadable,
    read_conversation,
    read_functions,
    read_history,
    read_messages,
)
from msa_lite.data.records import WrittenNumber
from msa_lite.errors import clip
from msa_lite.settings import DataSource

RawRow = Mapping[str, Any]

_SHOWN = 60  # characters of a value to show in a message
BESIDE: Mapping[str, tuple[str, ...]] = {
    "system": ("system", "system_prompt", "system_message"),
    "tools": ("tools", "functions"),
    "history": ("history",),
    "input": (),
}
"""The columns beside those of a form, by the key of `columns` that names another; the last two go with questions."""
LOOK_LIKE_PARTS = frozenset(
    f"""
    article audio audios background chat_history chat_template chat_template_kwargs choices chosen context contexts
    conversation conversation_history conversations cot ctx ctxs demonstrations developer dialog dialogue document
    documents enable_thinking few_shot image images input instructions mask messages options paragraph paragraphs
    passage passages persona preamble premise rationale reasoning reasoning_content rejected story sys_prompt
    system_instruction thinking thought thoughts video videos {" ".join(chain(*BESIDE.values()))}
    """.split()
)
"""Names, in small letters, of columns that models may have read or learnt; published benchmarks have none of them."""
_TEXTS = ("question", "instruction")
"""Columns whose texts are questions, also where they look like messages in JSON."""
_QUESTIONS = ("instruction", "prompt")
"""Such columns beside a question."""
_MARKS = dict.fromkeys(("kto_tag", "loss", "train", "training", "weight"), r"false|0(\.0*)?") | {"label": "false"}
"""Such columns where they say of a row that it was not learnt, or as a bad one (KTO in TRL and LLaMA-Factory), and the
values that say so; 0 as a label is a class."""


@dataclass(frozen=True)
class Form:
    """A way to read records."""

    columns: tuple[str, ...]
    """The columns that it needs: one of conversations, or those of questions and answers."""
    beside: Mapping[str, Sequence[str]]
    """The columns of what stands beside them, by the keys of `columns` that it takes; a record may lack them."""

    def read(self, record: RawRow) -> Conversation:
        """Read a record. Raise Unreadable where it is no conversation, or says two things of one."""
        where = f"column{'s' * (len(self.columns) - 1)} {' and '.join(map(repr, self.columns))}"
        prompt, answers = self._messages(record, where)
        history = [turn for name in self.beside.get("history", ()) for turn in read_history(record.get(name), name)]
        shown = range(len(history), len(history) + len(prompt))
        offered = _only({f"column '{name}'": read_functions(record.get(name), name) for name in self.beside["tools"]})
        place = "column 'history'" if history else where
        item = read_conversation([*history, *prompt, *answers], place, offered, shown)
        systems = {f"column '{name}'": read_optional_cell(record, name) for name in self.beside["system"]}
        return replace(item, system=_only({**systems, f"the system message of {place}": item.system}))

    def _messages(self, record: RawRow, where: str) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the messages that training shows alone, and those whose answers it learns."""
        if len(self.columns) == 1:
            value = record.get(self.columns[0])
            if (messages := read_messages(value)) is None:
                hint = "; it is Python's form: write it with json.dumps" if str(value).startswith("[{'") else ""
                raise Unreadable(f"{where}: expected a list of messages, got {clip(repr(value), _SHOWN)}{hint}")
            return (), messages
        question, answer = self.columns
        asked, reply = record.get(question), record.get(answer)
        prompt = None if isinstance(asked, str) and question in _TEXTS else read_messages(asked)
        reply = read_messages(reply) if prompt or not isinstance(reply, str) else None
        added = [text for column in self.beside["input"] if (text := read_optional_cell(record, column))]
        if prompt is None:
            # As LLaMA-Factory: an input may stand alone.
            text = read_optional_cell(record, question) if added else read_cell(record, question)
            prompt = [{"role": "user", "content": "\n".join(filter(None, [text, *added]))}]
        elif added:
            raise Unreadable(f"column '{question}': is a list of messages, so that no other text goes behind it")
        return prompt, reply or [{"role": "assistant", "content": read_cell(record, answer)}]


def row_columns(source: DataSource) -> frozenset[str]:
    """Return the columns that a row may be read from: those of the source, and those of the usual forms."""
    own = {source.question, source.answer, source.text, source.messages or "messages"}
    return frozenset(own.union(*_USUAL))


def find_form(source: DataSource, columns: Collection[str]) -> Form | None:
    """Return the form of a source of questions with these columns; None if they fit no known form."""
    present = set(columns) - set(source.ignore)
    needed = needed_columns(source)
    usual = _USUAL if needed == ("question", "answer") else ()  # else the recipe names them
    names = next((names for names in (needed, *usual) if set(names) <= present), None)
    if names is None:
        return None
    known = {**BESIDE, "input": ("input",) if names == _ALPACA else ()}
    beside = {key: [own] if (own := getattr(source, key)) else sorted(present & {*known[key]}) for key in known}
    return Form(names, {key: beside[key] for key in beside if len(names) > 1 or key in ("system", "tools")})


def needed_columns(source: DataSource) -> tuple[str, ...]:
    """Return the columns that a source of questions must have when it has no known form."""
    return (source.messages,) if source.messages else (source.question, source.answer)


def unread_parts(source: DataSource, form: Form, record: RawRow) -> list[str]:
    """Return the columns of a record that look like a part of its prompt or answer, and that hold what is not read.

    A context that the question repeats, or the messages of which question and answer were made, are read.
    """
    read = {*form.columns, *chain(*form.beside.values())}
    parts = LOOK_LIKE_PARTS.union(_QUESTIONS if len(form.columns) > 1 else ())
    others = sorted(record.keys() - read - {*source.ignore, source.subject})
    unlearnt = [column for column in others if _marks_unlearnt(column.lower(), record[column])]
    if not (cells := {column: record[column] for column in others if column.lower() in parts}):
        return unlearnt
    shown = "\n".join(map(str, _leaves([record.get(column) for column in sorted(read)])))
    lost = (
        column
        for column, cell in cells.items()
        if any(not isinstance(leaf, str) or leaf.strip() not in shown for leaf in _leaves(cell))
    )
    return sorted({*unlearnt, *lost})


def _marks_unlearnt(name: str, value: Any) -> bool:
    no = _MARKS.get(name)
    return no is not None and re.fullmatch(no, str(value).strip(), re.IGNORECASE) is not None


def _leaves(cell: Any) -> Iterator[Any]:
    """Yield the texts and numbers in a cell; of messages, also where they are JSON in a text, their contents."""
    cell = (read_messages(cell) or cell) if isinstance(cell, str) else cell
    if isinstance(cell, Mapping):
        named = cell.keys() & {"role", "from"}
        cell = [cell.get("content"), cell.get("value")] if named else [*cell.values()]
    if isinstance(cell, list | tuple):
        yield from chain.from_iterable(map(_leaves, cell))
    elif cell is not None:
        yield cell


_ALPACA = ("instruction", "output")
_USUAL = (("messages",), ("conversations",), _ALPACA, ("prompt", "completion"))
"""The columns of the forms that are known by them; the first that fits is taken."""


def _only(texts: Mapping[str, str]) -> str:
    """Return the text of several places that stand for one thing; "" where none has one. Raise Unreadable for two."""
    if len(set(filled := {place: text for place, text in texts.items() if text}.values())) > 1:
        raise Unreadable(f"{' and '.join(filter(texts.get, texts))} say different things; keep one")
    return next(iter(filled), "")


def read_cell(record: RawRow, column: str) -> str:
    """Return a cell's text as `cell_text`. Raise Unreadable for anything else, for null and for blanks."""
    return cell_text(record.get(column), f"column '{column}'")


def cell_text(value: Any, where: str, may_be_empty: bool = False) -> str:
    """Return a text, a whole number, a number of JSON as it stands in the file, or True or False, as Python writes it.

    Raise Unreadable for anything else. A float of Parquet is no text, for the file does not say how it was written.
    where: what messages name. may_be_empty: take null for "", and blanks as they are.
    """
    if isinstance(value, str | int | WrittenNumber) and (may_be_empty or str(value).strip()):
        return str(value)
    if value is None and may_be_empty:
        return ""
    if value is None or isinstance(value, str):
        raise Unreadable(f"{where}: {value!r}")
    shown = json.dumps(value) if isinstance(value, float) else clip(repr(value), _SHOWN)
    raise Unreadable(f"{where}: {shown} is no text but of type {type(value).__name__}; write it as text")


def read_optional_cell(record: RawRow, column: str) -> str:
    """Return a cell's text as `read_cell`, or "" for one that is absent or blank."""
    value = record.get(column)
    return "" if value is None or (isinstance(value, str) and not value.strip()) else read_cell(record, column)
