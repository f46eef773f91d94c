"""Conversations as text, by a tokenizer's chat template: messages, calls of tools, and where an answer begins."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msa_lite.data.messages import parse_cell
from msa_lite.io.models.devices import limited

Message = Mapping[str, Any]

# Without it, Llama 3 templates print today's date, and training and scoring would change from day to day. This is the
# day that open-unlearning pins, so that prompts are the same text.
DATE_STRING = "10 Apr 2025"
_LONGEST = 1 << 20  # characters that a chat template may add
_FUNCTION, _ARGUMENT, _RESULT = "msacall", "msavalue", "msaresult"  # words to try a template with
_MISREAD = re.compile(rf"""['\\]"?{_ARGUMENT}""")  # an object as Python writes it, or JSON within JSON
_THOUGHT = re.compile("think|thought|reason", re.IGNORECASE)


def render_chat(tokenizer: Any, messages: Sequence[Message], **options: Any) -> str:
    """Render messages as text with the tokenizer's chat template, a program by whoever made the model.

    Raise whatever the template raises, OverrunError if it runs too long, and MemoryError or ValueError if it makes far
    more text than it gets.
    """
    with limited():
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    if not isinstance(text, str) or len(text) > _LONGEST + 10 * len(
        json.dumps([*messages, *(options.get("tools") or [])])
    ):
        raise ValueError("it makes no text, or far more than it gets")
    return text


@dataclass(frozen=True)
class CallStyle:
    """The way in which a chat template takes calls of tools."""

    empty: str | None
    """The content of a message that is a call alone; some templates print None as a word."""
    as_text: bool
    """True where arguments are JSON in a text, as OpenAI has them, and False where they are an object."""
    keeps_text: bool = False
    """True where objects are shown, and a text of JSON as it is."""

    def fit(self, message: Message) -> dict[str, Any]:
        """Return a message as the template takes it."""
        if "tool_calls" not in message:
            return dict(message)
        calls = [
            {**call, "function": {**call["function"], "arguments": self._arguments(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
        content = self.empty if message["content"] is None else message["content"]
        return {**message, "content": content, "tool_calls": calls}

    def _arguments(self, arguments: Any) -> Any:
        if isinstance(arguments, str):
            return arguments if self.as_text or self.keeps_text else parse_cell(arguments)
        return json.dumps(arguments, ensure_ascii=False) if self.as_text else arguments


_STYLES = [CallStyle(empty, as_text) for as_text in (False, True) for empty in (None, "")]


def find_call_style(tokenizer: Any) -> CallStyle | None:
    """Return the way in which the chat template shows calls and their results; None if it leaves any of them out."""
    style = next((style for style in _STYLES if _shows_calls(tokenizer, style)), None)
    if style is None or style.as_text or not _shows_calls(tokenizer, replace(style, as_text=True)):
        return style
    return replace(style, keeps_text=True)


def _shows_calls(tokenizer: Any, style: CallStyle) -> bool:
    call: dict[str, Any] = {
        "type": "function",
        "id": "call00001",
        "function": {"name": _FUNCTION, "arguments": {"key": _ARGUMENT}},
    }
    question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    steps: list[Message] = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": _RESULT, "tool_call_id": call["id"], "name": _FUNCTION},
    ]
    try:
        plain, text = (
            render_chat(tokenizer, [question, *between, answer], date_string=DATE_STRING)
            for between in ([], [style.fit(step) for step in steps])
        )
    except Exception:  # whatever templates raise: this is not their way
        return False
    # Some templates show a call by its id, which holds the function's name.
    shown = _ARGUMENT in text and _RESULT in text and (_FUNCTION in text or call["id"] in text)
    return shown and text.count("None") == plain.count("None") and not _MISREAD.search(text)


def shared_length(text: Sequence[object], other: Sequence[object]) -> int:
    """Return how many characters, or ids, two texts begin with alike."""
    differs = (i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b)
    return next(differs, min(len(text), len(other)))


def has_think_block(prompt: str, start: str) -> bool:
    """Check whether a chat template puts an empty block of thoughts before answers that it does not end prompts with.

    prompt: a rendered prompt for generation. start: the rendered conversation up to where its answer begins. They
    differ in a block that is only in `start`, or that `prompt` opens for the model to fill. Other differences, such as
    the channel of gpt-oss's answers, are no thoughts.
    """
    shared = shared_length(prompt, start)
    return _THOUGHT.search(prompt[shared:]) is not None or _THOUGHT.search(start[shared:]) is not None
