"""Messages of a conversation in OpenAI's and ShareGPT's form: turns, calls of tools, and what training learnt of them.

Marks mean what they mean where models are trained: weight (OpenAI), train and train_detail (axolotl), loss (ms-swift).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from math import isfinite
from typing import Any

from msa_lite.data.records import WrittenNumber
from msa_lite.errors import FormatError, clip
from msa_lite.io.files.reading import parse_json

_ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant", "model": "assistant", "bot": "assistant", "tool": "tool", "function": "tool",
    "observation": "tool", "ipython": "tool", "function_call": "assistant",
}  # fmt: skip
_SHOWN = 60  # characters of a value to show in a message
_IGNORED = "; if the model did not read it, columns: {{ignore: [{}]}}"
_MARKS = dict.fromkeys(
    ("train", "training", "trainable", "loss", "loss_mask", "loss_scale", "loss_weight", "weight"), True
)
_MARKS |= {"mask": False, "masked": False}
"""The keys of a message that say whether training learns it, and their value where it does."""
_LEARNT_IN_PART = ("train_detail", "training_detail")
_LIKE_A_MARK = re.compile("ignor|learn|loss|mask|train|weight", re.IGNORECASE)
_REASONING = ("reasoning_content", "reasoning", "thinking")


class Unreadable(ValueError):
    """A record that is no row; the message says why."""


@dataclass(frozen=True)
class ToolUse:
    """The tools of a row, as JSON of the messages that a chat template takes; "" where there are none."""

    steps: str = ""
    """The messages between question and answer: calls of the assistant, and results."""
    call: str = ""
    """The assistant's message, where the answer itself is a call."""
    offered: str = ""
    """The functions that the conversation offers."""

    def __bool__(self) -> bool:
        return any(astuple(self))


NO_TOOLS = ToolUse()


@dataclass(frozen=True)
class Turn:
    """A question with its answer."""

    question: str
    answer: str
    """A text; for a call of tools, what is called with which arguments, as JSON."""
    tools: ToolUse = NO_TOOLS
    learnt: bool = True
    """False for an answer that training shows but does not learn."""

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the turn as later ones show it: question and answer, and the steps between them if there are any.

        A call that nothing follows is one of the steps, and the answer is empty.
        """
        steps = [*_load(self.tools.steps), *([json.loads(self.tools.call)] if self.tools.call else [])]
        answer = "" if self.tools.call else self.answer
        return (self.question, answer, _json(steps)) if steps else (self.question, answer)


@dataclass(frozen=True)
class Conversation:
    """The content of a record."""

    turns: list[Turn]
    system: str = ""
    """The system message before the first turn."""
    unanswered: bool = False
    """True when the record ends with a question, or with a tool's result, without an answer."""
    reasoning: bool = False
    """True when the assistant's messages have reasoning beside their content."""
    empty_system: bool = False
    """True when the system message of the messages has no text."""


def read_history(value: Any, column: str) -> list[Any]:
    """Return the messages of earlier turns: pairs of question and answer, objects of the two, or messages."""
    turns = parse_cell(value)
    if not turns or (isinstance(turns, str) and not turns.strip()):
        return []
    messages: list[Any] = []
    for turn in turns if isinstance(turns, list) else [turns]:
        if isinstance(turn, list | tuple) and len(turn) == 2:
            messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
        elif isinstance(turn, Mapping):
            named = "role" in turn or "from" in turn
            messages += [turn] if named else [{"role": role, "content": text} for role, text in turn.items()]
        else:
            raise Unreadable(
                f"column '{column}': expected a list of [question, answer], got {clip(repr(value), _SHOWN)}"
                f"{_IGNORED.format(column)}"
            )
    return messages


def read_messages(value: Any) -> Sequence[Any] | None:
    """Return a list of messages, or one, which may be written as JSON in a text; None for anything else.

    A text whose JSON says something else by these keys, as {"from": "Rome", "to": "Oslo"} does, is a text.
    """
    parsed = parse_cell(value)
    messages = [parsed] if isinstance(parsed, dict) else parsed
    messages = messages if isinstance(messages, list) else []
    roles = [m.get("role") or m.get("from") for m in messages if isinstance(m, dict) and m.keys() & {"role", "from"}]
    roles = [role for role in roles if str(role) in _ROLES] if isinstance(value, str) else roles
    return messages if roles else None


def read_conversation(messages: Sequence[Any], where: str, functions: str, shown: range) -> Conversation:
    """Read messages of any kind. Raise Unreadable unless user and assistant take turns, calls of tools between them.

    functions: those that the conversation offers, as JSON. shown: the places of messages that are not learnt.
    """
    system: str | None = None
    question, turns = None, []
    spoken: list[dict[str, Any]] = []
    learnt = True
    for place, message in enumerate(messages):
        at = f"{where}, message {place}"
        spoke = _message(message, at)
        role, marked = spoke["role"], _mark(message, at)
        if marked and role != "assistant":
            raise Unreadable(f"{at}: is marked as learnt, but we learn answers alone; take the mark off if it was not")
        if role == "system":
            if place:
                raise Unreadable(f"{at}: a system message comes first, or not at all")
            system = spoke["content"]
        elif role not in (expected := _expected(question, spoken)):
            raise Unreadable(f"{at}: expected a message of the {' or '.join(expected)}, got one of the {role}")
        elif role == "user":
            if question is not None:
                turns.append(_turn(question, spoken, functions, learnt))
            question, spoken = spoke["content"], []
        else:
            spoken.append(spoke)
            learnt = marked is not False and place not in shown if role == "assistant" else learnt
    result = bool(spoken) and spoken[-1]["role"] == "tool"
    while spoken and spoken[-1]["role"] == "tool":
        spoken.pop()
    if spoken:
        assert question is not None
        turns.append(_turn(question, spoken, functions, learnt))
    if not turns:
        raise Unreadable(f"{where}: no message of the assistant, so there is nothing to learn")
    reasons = any(isinstance(item, Mapping) and any(map(item.get, _REASONING)) for item in messages)
    return Conversation(turns, system or "", result or not spoken, reasons, system == "")


def _expected(question: str | None, spoken: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the roles of which one speaks next."""
    if question is None:
        return ("user",)
    if not spoken:
        return ("assistant",)
    if spoken[-1]["role"] == "tool":
        return ("assistant", "tool")
    return ("user", "tool", "assistant") if "tool_calls" in spoken[-1] else ("user", "tool")


def _turn(question: str, spoken: Sequence[dict[str, Any]], offered: str, learnt: bool) -> Turn:
    """Make a turn of what follows a question: steps, and the assistant's last message."""
    *steps, last = spoken
    written = _json(steps) if steps else ""
    if "tool_calls" not in last:
        return Turn(question, last["content"], ToolUse(written, "", offered), learnt)
    functions = [call["function"] for call in last["tool_calls"]]
    calls = [function | {"arguments": parse_cell(function["arguments"])} for function in functions]
    answer = "\n".join(filter(None, [last["content"], _json(calls[0] if len(calls) == 1 else calls)]))
    return Turn(question, answer, ToolUse(written, _json(last), offered), learnt)


def _message(message: Any, where: str) -> dict[str, Any]:
    """Read a message in OpenAI's or ShareGPT's form: role and content, and what templates need of calls and results."""
    if not isinstance(message, Mapping):
        raise Unreadable(f"{where}: {clip(repr(message), _SHOWN)} is no message with a role and content")
    name = message.get("role") or message.get("from")
    role = _ROLES.get(str(name))
    if role is None:
        raise Unreadable(f"{where}: role {name!r} is not handled, only {', '.join(_ROLES)}")
    content = message.get("content")
    content = message.get("value") if content is None else content
    calls = message.get("tool_calls") or message.get("function_call") or (content if name == "function_call" else None)
    if role == "assistant" and calls:
        content = None if name == "function_call" else content
        text = None if content is None or content == "" else _text(content, role, where)
        return {"role": role, "content": text, "tool_calls": _calls(calls, where)}
    kept = {key: message[key] for key in ("tool_call_id", "name") if role == "tool" and message.get(key)}
    return {"role": role, "content": _text(content, role, where), **kept}


def _mark(message: Mapping[str, Any], where: str) -> bool | None:
    """Return whether a message says that training learns it; None if it says nothing. Raise Unreadable for riddles."""
    marks = {}
    for key, learns in _MARKS.items():
        value = message.get(key)
        # 1 in a mask means hidden for some and shown for others.
        if value is not None and (value not in (0, 1) or not (learns or isinstance(value, bool))):
            expected = f"expected true or false{', or 1 or 0' * learns}"
            raise Unreadable(f"{where}: '{key}' is {clip(repr(value), _SHOWN)}; {expected}")
        if value is not None:
            marks[key] = bool(value) == learns
    if part := next((key for key in _LEARNT_IN_PART if message.get(key)), None):
        raise Unreadable(f"{where}: '{part}' marks parts of an answer, which is learnt whole or not; use 'train'")
    others = (key for key in message.keys() - _MARKS if _LIKE_A_MARK.search(key))
    if unknown := next((key for key in others if isinstance(message[key], bool | int | float)), None):
        raise Unreadable(f"{where}: '{unknown}' may mark what is learnt, but is not known; use 'train', or take it out")
    if len(set(marks.values())) > 1:
        raise Unreadable(f"{where}: {' and '.join(map(repr, marks))} contradict each other")
    return next(iter(marks.values()), None)


def _text(content: Any, role: str, where: str) -> str:
    if isinstance(content, list):  # parts of OpenAI, or of LLaMA-Factory ("value"); we read those of type text
        kinds = [item.get("type") if isinstance(item, Mapping) else type(item).__name__ for item in content]
        if unread := [kind for kind in kinds if kind != "text"]:
            raise Unreadable(f"{where}: content of type {unread[0]!r} is not handled, only text")
        texts = [item.get("text", item.get("value")) for item in content]
        if not all(isinstance(text, str) for text in texts):
            raise Unreadable(f"{where}: a part of its content has no text")
        content = "".join(texts)
    if not isinstance(content, str) or (not content.strip() and role not in ("system", "tool")):
        raise Unreadable(f"{where}: its content is no text but {clip(repr(content), _SHOWN)}")
    return content if content.strip() else ""


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return calls in OpenAI's form, with arguments as objects, or as a text of JSON, which stays as it is.

    A table gives every object all keys, some of them null; these are left out.
    calls: a list of calls, or one call of a function, also written as JSON.
    """
    calls = parse_cell(calls)
    read = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise Unreadable(f"{where}: {clip(repr(call), _SHOWN)} is no call with the name of a function")
        arguments = function.get("arguments") or {}
        objects = _without_nulls(parse_cell(arguments), where)
        arguments = arguments if isinstance(arguments, str) else objects
        identity = {"id": call["id"]} if call.get("id") else {}
        read.append({**identity, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return read


def read_functions(offered: Any, column: str) -> str:
    """Return the functions that a record offers in a column, as JSON; "" for none."""
    functions = _without_nulls(parse_cell(offered), f"column '{column}'")
    if not functions:
        return ""
    if not isinstance(functions, list) or not all(isinstance(item, Mapping) for item in functions):
        shown = clip(repr(offered), _SHOWN)
        raise Unreadable(f"column '{column}': expected a list of functions, got {shown}{_IGNORED.format(column)}")
    return _json([item if "function" in item else {"type": "function", "function": item} for item in functions])


def parse_cell(value: Any) -> Any:
    """Return a value that may be written as JSON in a text; a text that is no JSON stays as it is."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value, "")
    except FormatError:
        return value


def _json(value: Any) -> str:
    """Return JSON with keys in their order, in which chat templates write them."""
    return json.dumps(value, ensure_ascii=False)


def _without_nulls(value: Any, where: str) -> Any:
    """Return a value of JSON without keys that hold null, with numbers as Python reads them, which templates print.

    Raise Unreadable for NaN, Infinity and whole numbers that are too long for Python.
    """
    try:
        value = json.loads(value.text) if isinstance(value, WrittenNumber) else value
    except ValueError as error:
        raise Unreadable(f"{where}: a number of {len(value.text)} digits in a tool; write it as text") from error
    if isinstance(value, float) and not isfinite(value):
        raise Unreadable(f"{where}: {json.dumps(value)} in a tool or its arguments; take it out, or write it as text")
    if isinstance(value, Mapping):
        return {key: _without_nulls(item, where) for key, item in value.items() if item is not None}
    return [_without_nulls(item, where) for item in value] if isinstance(value, list) else value


def _load(text: str) -> list[dict[str, Any]]:
    return list(json.loads(text)) if text else []
