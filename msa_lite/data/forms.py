"""The forms in which questions with answers are kept: which columns hold them, and how a record becomes rows.

Besides columns `question` and `answer`, whatever they are called, these are known by the names of their columns:
conversations (`messages` as OpenAI has them, `conversations` as ShareGPT has them), Alpaca's `instruction`, `input`,
`output`, and `prompt` with `completion`, texts or messages as TRL has them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msa_lite.data.sources import DataSource

Turns = list[tuple[str, str]]
RawRow = Mapping[str, Any]

_ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant", "model": "assistant", "bot": "assistant",
}  # fmt: skip


class Unreadable(ValueError):
    """Return what is wrong with a record, in words."""


@dataclass(frozen=True)
class Conversation:
    """The content of a record: turns (question, answer), the first of which may follow a system message."""

    turns: Turns
    system: str = ""
    unanswered: bool = False
    """True where a question without an answer stood at the end."""


@dataclass(frozen=True)
class Form:
    """A way to read records. columns: those that it needs."""

    columns: tuple[str, ...]
    read: Callable[[RawRow], Conversation]


def find_form(source: DataSource, found: Collection[str]) -> Form | None:
    """Return the form of a source of questions with these columns; None where they are of no form that is known."""
    if source.messages:
        return _conversations(source.messages) if source.messages in found else None
    if {source.question, source.answer} <= set(found):
        return Form((source.question, source.answer), lambda record: _pair(record, source.question, source.answer))
    if (source.question, source.answer) != ("question", "answer"):  # the recipe says where they are
        return None
    for name in ("messages", "conversations"):
        if name in found:
            return _conversations(name)
    if {"instruction", "output"} <= set(found):
        return Form(("instruction", "output"), _alpaca)
    if {"prompt", "completion"} <= set(found):
        return Form(("prompt", "completion"), _completion)
    return None


def wanted_columns(source: DataSource) -> tuple[str, ...]:
    """Return the columns that a source of questions lacks where it is of no known form."""
    return (source.messages,) if source.messages else (source.question, source.answer)


def _conversations(column: str) -> Form:
    return Form((column,), lambda record: _conversation(record[column], f"column '{column}'"))


def _pair(record: RawRow, question: str, answer: str) -> Conversation:
    return Conversation([(_cell(record, question), _cell(record, answer))])


def _alpaca(record: RawRow) -> Conversation:
    given = record.get("input")
    question = _cell(record, "instruction")
    if given is not None and str(given).strip():
        question += f"\n\n{given}"
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
    """Read messages of either kind. Raises Unreadable for what is no change of user and assistant."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise Unreadable(f"{where}: a list of messages is wanted, this is {_short(messages)}")
    system, question, turns = "", None, []
    for place, message in enumerate(messages):
        role, text = _message(message, f"{where}, message {place}")
        if role == "system":
            if place:
                raise Unreadable(f"{where}, message {place}: a system message comes first, or not at all")
            system = text
        elif (role == "user") != (question is None):
            wanted = "user" if question is None else "assistant"
            raise Unreadable(f"{where}, message {place}: a message of the {wanted} is due, this is the {role}'s")
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
    """(role, text) of a message as OpenAI or ShareGPT has it."""
    if not isinstance(message, Mapping):
        raise Unreadable(f"{where}: {_short(message)} is no message with a role and content")
    name = message.get("role") or message.get("from")
    role = _ROLES.get(str(name))
    if role is None:
        raise Unreadable(f"{where}: role {name!r} is not handled, only {', '.join(_ROLES)}")
    content = message.get("content")
    content = message.get("value") if content is None else content
    if isinstance(content, list):  # OpenAI's parts, of which texts are read
        kinds = [part.get("type") if isinstance(part, Mapping) else type(part).__name__ for part in content]
        if other := [kind for kind in kinds if kind != "text"]:
            raise Unreadable(f"{where}: content of type {other[0]!r} is not handled, only text")
        content = "".join(str(part["text"]) for part in content)
    if not isinstance(content, str) or (not content.strip() and role != "system"):
        raise Unreadable(f"{where}: its content is no text but {_short(content)}")
    return role, content if content.strip() else ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
