"""Questions with the answers of several models side by side, for people to look at."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_WIDTH = 78
_LINES = 2  # of an answer that are shown
_MARGIN = 12  # columns for the model's name


@dataclass(frozen=True)
class SideBySide:
    """One question, the answer that the data gives, and what each model says, by its name."""

    set_name: str
    question: str
    expected: str
    answers: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)


def examples_text(examples: Sequence[SideBySide]) -> str:
    """Blocks of at most 78 columns, one a question; answers are cut after two lines."""
    return "\n\n".join(_block(example) for example in examples)


def examples_markdown(examples: Sequence[SideBySide]) -> str:
    """The same for a report."""
    return "Some questions side by side:\n\n" + "".join(
        f"```text\n{_block(example).replace('```', chr(39) * 3)}\n```\n\n" for example in examples
    )


def _block(example: SideBySide) -> str:
    lines = [_cut(example.set_name, example.question), _cut("  expected", example.expected)]
    return "\n".join([*lines, *(_cut(f"  {name}", answer) for name, answer in example.answers.items())])


def _cut(name: str, text: str) -> str:
    """A text beside a name, in at most two lines; signs that a terminal would act on are blanks."""
    shown = " ".join("".join(sign if sign.isprintable() else " " for sign in text).split()) or "(nothing)"
    lines = textwrap.wrap(shown, _WIDTH - _MARGIN - 1, max_lines=_LINES, placeholder=" …")
    return f"{name:<{_MARGIN}} " + f"\n{'':{_MARGIN + 1}}".join(lines)
