"""Forms of records: columns of questions and answers, or conversations, with tool calls or without."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass
from math import isfinite
from typing import Any

from msa_lite.data.records import WrittenNumber
from msa_lite.errors import FormatError, clip
from msa_lite.io.files.reading import parse_json
from msa_lite.settings import DataSource

RawRow = Mapping[str, Any]

_ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant", "model": "assistant", "bot": "assistant", "tool": "tool", "function": "tool",
    "observation": "tool", "ipython": "tool", "function_call": "assistant",
}  # fmt: skip
_SHOWN = 60  # characters of a value to show in a message
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
    """False for an answer of weight 0, which OpenAI's training shows but does not learn."""

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


@dataclass(frozen=True)
class Form:
    """A way to read records."""

    columns: tuple[str, ...]
    """The columns that it needs."""
    read: Callable[[RawRow], Conversation]


def row_columns(source: DataSource) -> frozenset[str]:
    """Return the columns that a row may be read from: those of the source, and those of the usual forms."""
    own = {source.question, source.answer, source.text, source.messages or "messages"}
    return frozenset(own.union(*_USUAL))


def find_form(source: DataSource, columns: Collection[str]) -> Form | None:
    """Return the form of a source of questions with these columns; None if they fit no known form."""
    if source.messages:
        return _conversations(source.messages) if source.messages in columns else None
    if {source.question, source.answer} <= set(columns):
        return Form((source.question, source.answer), lambda record: _pair(record, source.question, source.answer))
    if (source.question, source.answer) != ("question", "answer"):  # the recipe names them
        return None
    return next((make(*names) for names, make in _USUAL.items() if set(names) <= set(columns)), None)


def needed_columns(source: DataSource) -> tuple[str, ...]:
    """Return the columns that a source of questions must have when it has no known form."""
    return (source.messages,) if source.messages else (source.question, source.answer)


def _conversations(column: str) -> Form:
    return Form((column,), lambda record: _conversation(record.get(column), f"column '{column}'", record.get("tools")))


def _pair(record: RawRow, question: str, answer: str) -> Conversation:
    return Conversation([Turn(read_cell(record, question), read_cell(record, answer))])


def _alpaca(record: RawRow) -> Conversation:
    question, context = read_cell(record, "instruction"), record.get("input")
    if context is not None and (not isinstance(context, str) or context.strip()):
        question += f"\n\n{read_cell(record, 'input')}"
    return Conversation([Turn(question, read_cell(record, "output"))])


def _completion(record: RawRow) -> Conversation:
    prompt, completion = _messages(record.get("prompt")), _messages(record.get("completion"))
    if prompt is not None and completion is not None:
        return _conversation([*prompt, *completion], "columns 'prompt' and 'completion'", record.get("tools"))
    return _pair(record, "prompt", "completion")


_USUAL: Mapping[tuple[str, ...], Callable[..., Form]] = {
    ("messages",): _conversations,
    ("conversations",): _conversations,
    ("instruction", "output"): lambda *names: Form(names, _alpaca),
    ("prompt", "completion"): lambda *names: Form(names, _completion),
}
"""The forms that are known by their columns; the first that fits is taken."""


def read_cell(record: RawRow, column: str) -> str:
    """Return a cell's text: a text, a whole number, true or false, or a number of JSON as it stands in the file.

    Raise Unreadable for anything else. A float of Parquet is no text, for the file does not say how it was written.
    """
    value = record.get(column)
    if isinstance(value, str | int | WrittenNumber) and str(value).strip():
        return str(value)
    if value is None or isinstance(value, str):
        raise Unreadable(f"column '{column}': {value!r}")
    shown = json.dumps(value) if isinstance(value, float) else clip(repr(value), _SHOWN)
    raise Unreadable(f"column '{column}': {shown} is no text but of type {type(value).__name__}; write it as text")


def _messages(value: Any) -> Sequence[Any] | None:
    """Return a list of messages, which may be written as JSON in a text; None for anything else."""
    messages = _parsed(value)
    if isinstance(value, str) and not (isinstance(messages, list) and all(isinstance(m, dict) for m in messages)):
        return None
    return messages if isinstance(messages, list) and messages else None


def _conversation(value: Any, where: str, offered: Any = None) -> Conversation:
    """Read messages of any kind. Raise Unreadable unless user and assistant take turns, calls of tools between them."""
    messages = _messages(value)
    if messages is None:
        hint = "; it is Python's form: write it with json.dumps" if str(value).lstrip().startswith("[{'") else ""
        raise Unreadable(f"{where}: expected a list of messages, got {clip(repr(value), _SHOWN)}{hint}")
    system, question, turns = "", None, []
    spoken: list[dict[str, Any]] = []
    learnt = True
    functions = _functions(offered, where)
    for place, message in enumerate(messages):
        at = f"{where}, message {place}"
        spoke = _message(message, at)
        role = spoke["role"]
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
            learnt = message.get("weight") != 0 if role == "assistant" else learnt
    result = bool(spoken) and spoken[-1]["role"] == "tool"
    while spoken and spoken[-1]["role"] == "tool":
        spoken.pop()
    if spoken:
        assert question is not None
        turns.append(_turn(question, spoken, functions, learnt))
    if not turns:
        raise Unreadable(f"{where}: no message of the assistant, so there is nothing to learn")
    reasons = any(isinstance(item, Mapping) and any(map(item.get, _REASONING)) for item in messages)
    return Conversation(turns, system, result or not spoken, reasons)


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
    calls = [call["function"] for call in last["tool_calls"]]
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


def _text(content: Any, role: str, where: str) -> str:
    if isinstance(content, list):  # OpenAI's parts; we read those of type text
        kinds = [item.get("type") if isinstance(item, Mapping) else type(item).__name__ for item in content]
        if unread := [kind for kind in kinds if kind != "text"]:
            raise Unreadable(f"{where}: content of type {unread[0]!r} is not handled, only text")
        if any(not isinstance(item.get("text"), str) for item in content):
            raise Unreadable(f"{where}: a part of its content has no text")
        content = "".join(item["text"] for item in content)
    if not isinstance(content, str) or (not content.strip() and role not in ("system", "tool")):
        raise Unreadable(f"{where}: its content is no text but {clip(repr(content), _SHOWN)}")
    return content if content.strip() else ""


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return calls in OpenAI's form, with arguments as objects. A table gives every object all keys, some of them null.

    calls: a list of calls, or one call of a function, also written as JSON.
    """
    calls = _parsed(calls)
    read = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise Unreadable(f"{where}: {clip(repr(call), _SHOWN)} is no call with the name of a function")
        arguments = _without_nulls(_parsed(function.get("arguments") or {}))
        identity = {"id": call["id"]} if call.get("id") else {}
        read.append({**identity, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return read


def _functions(offered: Any, where: str) -> str:
    """Return the functions that a record offers in its column 'tools', as JSON; "" for none."""
    functions = _without_nulls(_parsed(offered))
    if not functions:
        return ""
    if not isinstance(functions, list) or not all(isinstance(item, Mapping) for item in functions):
        raise Unreadable(f"{where}: column 'tools': expected a list of functions, got {clip(repr(offered), _SHOWN)}")
    return _json([item if "function" in item else {"type": "function", "function": item} for item in functions])


def _parsed(value: Any) -> Any:
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


def _without_nulls(value: Any) -> Any:
    """Return a value of JSON without keys that hold null. Raise Unreadable for NaN and Infinity."""
    if isinstance(value, float) and not isfinite(value):
        raise Unreadable(f"{json.dumps(value)} in a tool or its arguments, which JSON does not have; take it out")
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _load(text: str) -> list[dict[str, Any]]:
    return list(json.loads(text)) if text else []
