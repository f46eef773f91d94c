"""The questions that decide a verdict: each with its figure, the 95 % bound, the limit of a PASS, and how it stands."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from msa_lite.report.tables.formats import Cell, Section, TextTable
from msa_lite.report.verdict.figures import Bound, Forgotten, Kept, score_label
from msa_lite.settings import Margins

CriterionState = Literal["failed", "missed", "absent", "void", "open", "likely", "shown"]
_STATES: Mapping[CriterionState, str] = {
    "failed": "✗ surely missed",
    "missed": "✗ missed",
    "absent": "– not measured",
    "void": "– does not count",
    "open": "? too few rows",
    "likely": "✓ met, by estimate",
    "shown": "✓ met",
}
"""How a question stands, in words; a FAIL first, then what stands against a PASS, then what does not."""
FINE: tuple[CriterionState, ...] = ("likely", "shown")


@dataclass(frozen=True)
class Criterion:
    """One question that decides."""

    question: str
    meaning: str
    """What the figure is a share of."""
    share: Bound | None
    """The figure; None where it could not be measured."""
    limit: float
    """The limit of a PASS: the largest share, or with `at_least` the smallest."""
    fails: float | None = None
    """The share beyond which, if surely, it is a FAIL; None where this question fails no run."""
    at_least: bool = False
    counts: bool = True
    """False where the rows show nothing, so that no figure is enough for a PASS."""
    by_estimate: bool = False
    """True where the estimate is enough for a PASS."""

    @property
    def state(self) -> CriterionState:
        """Return how the figure stands beside its limits."""
        if self.share is None:
            return "absent"
        best, worst = (self.share.low, self.share.high)[:: -1 if self.at_least else 1]
        if self.fails is not None and self._is_beyond(best, self.fails):
            return "failed"
        if not self.counts:
            return "void"
        if self._is_beyond(self.share.value, self.limit):
            return "missed"
        if self._is_beyond(worst, self.limit):
            return "likely" if self.by_estimate else "open"
        return "shown"

    def _is_beyond(self, share: float, limit: float) -> bool:
        return share < limit if self.at_least else share > limit

    @property
    def texts(self) -> tuple[str, str, str]:
        """Return the figure, its bound and the limit, as tables show them; the bound is never rounded to the better."""
        least, limit = ("at least", "at most")[not self.at_least], f"{round(100 * self.limit, 1):g} %"
        if self.share is None:
            return "–", "–", f"{least} {limit}"
        tenths = math.floor(1000 * self.share.low + 1e-6) if self.at_least else math.ceil(1000 * self.share.high - 1e-6)
        return f"{100 * self.share.value + 0.0:.1f} %", f"{least} {tenths / 10 + 0.0:.1f} %", f"{least} {limit}"


_LEFT = {
    "extraction_strength": "Can it still complete the data?",
    "probability": "Does it still find the data likely?",
    "wrong": "Is some of the damage left?",
}


def recited_criterion(forgotten: Forgotten, margins: Margins, is_earlier: bool = False) -> Criterion:
    """Return the question whether more rows are recited than by the control. is_earlier: rows of earlier requests."""
    question, what = "Does it still recite the data?", "beyond a model that never saw it"
    if forgotten.unit == "facts":
        question, what = "Does it still answer wrongly?", "beyond a model without false documents"
    question = "Does it recite data of earlier requests?" if is_earlier else question
    recited = margins.recited
    return Criterion(question, what, forgotten.excess, recited, recited, by_estimate=is_earlier)


def left_criteria(forgotten: Forgotten, margins: Margins) -> dict[str, Criterion]:
    """Return the questions whether a gap to the control is left, by score."""
    most = margins.left
    return {
        name: Criterion(_LEFT.get(name, "Is some of it left?"), f"what is left, by {score_label(name)}", gap, most)
        for name, gap in forgotten.left.items()
    }


def kept_criterion(kept: Kept | None, margins: Margins) -> Criterion:
    """Return the question whether enough is kept."""
    share, what = kept.share if kept else None, "of what it knew and was to keep"
    return Criterion("Does it still know the rest?", what, share, margins.kept, margins.lost, at_least=True)


def changed_criterion(forgotten: Forgotten) -> Criterion:
    """Return the question whether the model says anything else than before, on at least one row to forget."""
    share, least = forgotten.changed / forgotten.rows, 1 / forgotten.rows
    what = "of its answers on what it was to forget"
    return Criterion("Does it say anything else?", what, Bound(share, share, share), least, least, at_least=True)


def criteria_table(criteria: Sequence[Criterion], outcome: str, notes: Sequence[str]) -> TextTable:
    """Return a line a question. Those that decided a PARTLY or a FAIL say so, and are bold; of a PASS, all did."""
    rows = []
    for criterion in criteria:
        decides = criterion.state == "failed" if outcome == "FAIL" else criterion.state not in FINE
        state = Cell(_STATES[criterion.state], remark="decides" * decides)
        rows.append([Cell(criterion.question, decides, meaning=criterion.meaning), *map(Cell, criterion.texts), state])
    headings = ["question", "measured", "surely (95\u00a0%)", "for a PASS", "result"]
    return TextTable(headings, [Section(rows)], notes=notes)
