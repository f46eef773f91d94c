"""Show rows with the models' answers side by side: a few questions, every row to forget, the lost ones to keep."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

_WIDTH = 78
_READ = 4000  # characters of a text that may be a book
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


def examples_text(examples: Sequence[SideBySide]) -> str:
    """Return one block a question, at most 78 columns wide. Questions and answers are cut after two lines."""
    return "\n\n".join(map(example_block, examples))


def example_block(example: SideBySide) -> str:
    """Return one question with its answers in lines of at most 78 columns."""
    lines = [_cut(example.set_name, example.question), _cut("  expected", example.expected)]
    return "\n".join([*lines, *(_cut(f"  {name}", answer) for name, answer in example.answers.items())])


def _cut(name: str, text: str) -> str:
    """Return a text beside a name, in at most two lines."""
    line = clean(text.strip()[:_READ]) or "(nothing)"
    lines = textwrap.wrap(line, _WIDTH - _MARGIN - 1, max_lines=_LINES, placeholder=" …")
    return f"{name:<{_MARGIN}} " + f"\n{'':{_MARGIN + 1}}".join(lines)


_MODELS = ("target", "unlearned", "ideal")
_LABEL, _MARK = 11, 9  # columns for a line's name and its mark


Failure = Literal["recited", "wrong", "lost"]
"""The word for a model that fails on a row: on one to forget, or on one to keep."""
_STILL = {"recited": "rows are still recited", "wrong": "facts are still answered wrongly"}


@dataclass(frozen=True)
class ListedRow:
    """One row, as the models know it."""

    index: int
    """Its place in the data, from 0."""
    question: str
    """The question, or the beginning of a passage; empty for a text."""
    expected: str
    """The answer in the data; empty for a text."""
    text: str
    """The text; empty for a question."""
    answers: Mapping[str, str | None]
    """The answers by model; None where none was generated."""
    failed: Mapping[str, bool | None]
    """By model: True where it recites a row to forget (with RESTOR: answers wrongly), or does not know one to keep;
    None where it was not asked."""
    predicted: Mapping[str, float | None]
    """Of a text: the share of its tokens that each model predicts, in [0, 1]. Empty for a question."""


@dataclass(frozen=True)
class RowList:
    """All rows that were scored: to forget, to keep, and the holdout."""

    rows: Sequence[ListedRow]
    """The rows, failures of the unlearned model first, then those that it was not asked."""
    counted: Failure = "recited"
    """The word for a failure."""
    unscored: int = 0
    """More rows to forget, on which the unlearned model was not scored; they are not listed."""
    retain: Sequence[ListedRow] = ()
    """The rows to keep, those that the unlearned model does not know first. A model knows a row that passes for
    recited, by the check of the rows to forget (with RESTOR: that it answers right)."""
    holdout: Sequence[ListedRow] = ()
    """The rows that no model saw."""
    learnt: int = 0
    """The rows to keep that the verdict leaves out, because a fit or a filter used them."""
    json_keys: ClassVar = ("counted", "counts", "unscored", "rows", "lost", "known", "learnt")

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of failures of each model."""
        return {name: self.count(name) for name in self.models}

    @property
    def models(self) -> list[str]:
        """Return the names of the models that answered."""
        return [name for name in _MODELS if any(name in row.failed for row in self.rows)]

    def count(self, model: str = "unlearned") -> int:
        """Count the rows on which a model fails."""
        return sum(row.failed.get(model) is True for row in self.rows)

    @property
    def headline(self) -> str:
        """Return the count in a sentence, with those of the other models."""
        count = self.count()
        first = "" if not count else "; it comes first" if count == 1 else "; these come first"
        others = "; ".join(f"{name}: {self.count(name)}" for name in self.models if name != "unlearned")
        return f"{count} of {len(self.rows)} {_STILL[self.counted]}{first}{f' ({others})' if others else ''}."

    @property
    def lost(self) -> list[ListedRow]:
        """Return the rows to keep that the target knows and the unlearned model does not."""
        return [row for row in self.retain if row.failed.get("target") is False and row.failed.get("unlearned")]

    @property
    def known(self) -> int:
        """Count the rows to keep that the target knows, of those on which both were scored."""
        return sum(row.failed.get("target") is False and "unlearned" in row.failed for row in self.retain)

    @property
    def remarks(self) -> list[str]:
        """Return sentences on rows of which the headline says nothing."""
        unknown = sum(row.failed.get("unlearned") is None for row in self.rows)
        lines = [f"Rows that could not be scored, because they are too long or empty: {unknown}."] if unknown else []
        if self.known:
            lines.append(f"Rows to keep that it knew before and has lost: {len(self.lost)} of {self.known}.")
        if self.learnt:
            lines.append(f"A fit or filter used {self.learnt} of all {len(self.retain)}; the verdict leaves these out.")
        if self.unscored:
            lines.append(
                f"More rows to forget, not listed, because the unlearned model was not scored on them: {self.unscored}."
            )
        return lines


def sorted_rows(rows: Sequence[ListedRow]) -> list[ListedRow]:
    """Return rows with the unlearned model's failures first, then those not asked; texts by the share predicted."""

    def key(row: ListedRow) -> tuple[int, float, int]:
        order = {True: 0, None: 1, False: 2}[row.failed.get("unlearned")]
        return order, -(row.predicted.get("unlearned") or 0.0), row.index

    return sorted(rows, key=key)


def row_lines(row: ListedRow, failure: Failure = "recited") -> Iterator[tuple[str, str, str]]:
    """Yield the lines (name, mark, text) of a row; every text is one line that cannot steer a terminal."""
    if row.text:
        yield "text", "", clean(row.text)
    else:
        yield "question", "", clean(row.question)
        yield "expected", "", clean(row.expected)
    for name in _MODELS:
        if name not in row.failed:
            continue
        failed, share = row.failed[name], row.predicted.get(name)
        answer = row.answers.get(name)
        said = f"{percent_down(share)} of its tokens are predicted" if share is not None else clean(answer or "")
        missing = row.text or answer is None
        yield name, failure if failed else "", said or ("(not scored)" if missing else "(nothing)")


def clean(text: str) -> str:
    """Return a text in one line, with blanks for signs that a terminal would act on."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())


def percent_down(share: float) -> str:
    """Return a share in whole percent, rounded down: a text counts as recited from 90 % on."""
    return f"{int(100 * share + 1e-9)} %"
