"""The questions that decide a verdict: each with its figure, the 95 % bound, the limit of a PASS, and how it stands."""

from __future__ import annotations

import math
from dataclasses import dataclass

from msa_lite.report.verdict.figures import Bound, EarlierFacts, Forgotten, Kept, in_hundred, score_label
from msa_lite.settings import Margins

_SILENT = ("changed", "known", "earlier")  # told only where they stand against a PASS
_KEPT = {"accuracy": "answers", "rouge_l": "wording", "extraction_strength": "completing"}
_LEFT = {"extraction_strength": "Can it still complete the data?", "probability": "Does it still find the data likely?"}


@dataclass(frozen=True)
class Criterion:
    """One question that decides."""

    question: str
    meaning: str
    """What the figure is a share of, or is beyond."""
    share: Bound | None
    """The figure; None where it could not be measured."""
    limit: float
    """The limit of a PASS: the largest share, or with `at_least` the smallest."""
    fails: float | None = None
    """The share beyond which, if surely, it is a FAIL; None where this question fails no run."""
    at_least: bool = False
    counted: int = 0
    """Of a question that is counted, not estimated, the rows that it is of."""

    @property
    def state(self) -> str:
        """Return how the figure stands beside its limits.

        "failed": surely beyond that of a FAIL; "missed": beyond that of a PASS; "open": the bound alone is beyond it;
        "absent": not measured; "shown": what a PASS wants.
        """
        if self.share is None or not math.isfinite(self.share.value + self.share.low + self.share.high):
            return "absent"
        best, worst = (self.share.low, self.share.high)[:: -1 if self.at_least else 1]
        if self.fails is not None and self._beyond(best, self.fails):
            return "failed"
        if self._beyond(self.share.value, self.limit):
            return "missed"
        return "open" if self._beyond(worst, self.limit) else "shown"

    def _beyond(self, share: float, limit: float) -> bool:
        """Check whether a share lies beyond a limit by more than the noise of sums in floats."""
        return round(limit - share if self.at_least else share - limit, 9) > 0

    @property
    def texts(self) -> tuple[str, str, str]:
        """Return the figure, its bound, which is never rounded to the better side, and the limit."""
        words, limit = "at least" if self.at_least else "at most", in_hundred(self.limit)
        if self.share is None or self.state == "absent":
            return "–", "–", f"{words} {limit} %"
        if self.counted:
            count = f"{round(self.share.value * self.counted, 1):g}"
            return f"{count} of {self.counted}", f"{words} {count}", f"{words} 1"
        bound = self._text(self.share.low if self.at_least else self.share.high, away=-1 if self.at_least else 1)
        return self._text(self.share.value), f"{words} {bound}", f"{words} {limit} %"

    def _text(self, share: float, away: int = 0) -> str:
        """Return a share in as many digits, at least one, as print it on its own side of the limit.

        away: 1 to round up, -1 to round down.
        """
        for digits in range(1, 8):
            shown = round(100 * share + away * (0.5 - 1e-6) / 10**digits, digits) + 0.0
            if self._beyond(shown / 100, self.limit) == self._beyond(share, self.limit):
                break
        return f"{shown:.{digits}f} %"


def criteria_of(
    forgotten: Forgotten, kept: Kept | None, margins: Margins, earlier: EarlierFacts | None = None
) -> dict[str, Criterion]:
    """Return the questions that decide: "recited", each score of which some may be left, and "kept".

    Only where they stand against a PASS there are also "changed" and "known" (in front: a model that says the same as
    before, a target that knew nothing), "new" (a vector learnt all rows to keep) and "earlier" (requests).
    """
    never, most, again = "beyond a model that never saw it", margins.recited, earlier and earlier.scored
    recites = "Does it still answer wrongly?" if forgotten.unit == "facts" else "Does it still recite the data?"
    rows, lead = forgotten.rows, forgotten.rows * (forgotten.share("target") - forgotten.control_share)
    criteria = {
        "changed": _count("Has its output changed?", "on what it was to forget", forgotten.changed, rows, is_fail=True),
        "known": _count("Did it know the data before?", never, rows if forgotten.known else lead, rows),
        "recited": Criterion(recites, never, forgotten.excess, most, most),
    }
    for name, gap in forgotten.left.items():
        meaning = f"what is left, by {score_label(name)}"
        criteria[name] = Criterion(_LEFT.get(name, "Is some of it left?"), meaning, gap, margins.left)
    parts = [_KEPT.get(name, score_label(name)) for name in kept.shares] if kept else ["all scores"]
    what, share = f"of what it knew, averaged over {', '.join(parts)}", kept.share if kept else None
    criteria["kept"] = Criterion("Does it still know the rest?", what, share, margins.kept, margins.lost, at_least=True)
    if kept and kept.fitted:
        criteria["new"] = _count("Was that tested on rows that nothing learnt?", "of those to keep", 0, kept.rows)
    if again and again.excess:
        criteria["earlier"] = Criterion("Does it recite earlier requests?", never, again.excess, most, most)
    return {name: c for name, c in criteria.items() if name not in _SILENT or c.state in ("failed", "missed")}


def _count(question: str, meaning: str, count: float, rows: int, is_fail: bool = False) -> Criterion:
    """Return a question that is counted, not estimated: one row is enough."""
    share, least = count / max(rows, 1), 1 / max(rows, 1)
    return Criterion(question, meaning, Bound(share, share, share), least, least if is_fail else None, True, rows)
