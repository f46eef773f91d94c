"""The forms of data sets with questions and answers: which columns hold them, and how a record becomes rows.

Columns `question` and `answer` may have other names. Other forms are recognised by their columns: conversations
(`messages` as in OpenAI's, `conversations` as in ShareGPT's files), Alpaca's `instruction`, `input`, `output`, and
TRL's `prompt` with `completion`, as texts or messages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msa_lite.data.sources import DataSource
from msa_lite.errors import clip

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
        kinds = [part.get("type") if isinstance(part, Mapping) else type(part).__name__ for part in content]
        if other := [kind for kind in kinds if kind != "text"]:
            raise Unreadable(f"{where}: content of type {other[0]!r} is not handled, only text")
        content = "".join(str(part["text"]) for part in content)
    if not isinstance(content, str) or (not content.strip() and role != "system"):
        raise Unreadable(f"{where}: its content is no text but {clip(repr(content), _SHOWN)}")
    return role, content if content.strip() else ""
