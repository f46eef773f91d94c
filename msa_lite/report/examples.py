"""Show questions with the answers of several models side by side, for people to read."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_WIDTH = 78
_LINES = 2  # shown of each answer
_MARGIN = 12  # columns for the model's name


@dataclass(frozen=True)
class SideBySide:
    """One question with the answers of several models."""

    set_name: str
    question: str
    expected: str
    """The answer in the data."""
    answers: Mapping[str, str]
    """The generated answers by model."""

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        return asdict(self)


def examples_text(examples: Sequence[SideBySide]) -> str:
    """Return one block a question, at most 78 columns wide. Questions and answers are cut after two lines."""
    return "\n\n".join(_block(example) for example in examples)


def examples_markdown(examples: Sequence[SideBySide]) -> str:
    """Return the blocks of `examples_text` as Markdown."""
    return "Some questions side by side:\n\n" + "".join(
        f"```text\n{_block(example).replace('```', chr(39) * 3)}\n```\n\n" for example in examples
    )


def _block(example: SideBySide) -> str:
    lines = [_cut(example.set_name, example.question), _cut("  expected", example.expected)]
    return "\n".join([*lines, *(_cut(f"  {name}", answer) for name, answer in example.answers.items())])


def _cut(name: str, text: str) -> str:
    """Return a text beside a name, in at most two lines. Signs that a terminal would act on become blanks."""
    line = " ".join("".join(sign if sign.isprintable() else " " for sign in text).split()) or "(nothing)"
    lines = textwrap.wrap(line, _WIDTH - _MARGIN - 1, max_lines=_LINES, placeholder=" …")
    return f"{name:<{_MARGIN}} " + f"\n{'':{_MARGIN + 1}}".join(lines)
