"""The questions that decide a verdict: each with its figure, the 95 % bound, the limit of a PASS, and how it stands."""

from __future__ import annotations

import math
from dataclasses import dataclass

from msa_lite.report.verdict.figures import Bound, EarlierFacts, Forgotten, Kept, score_label
from msa_lite.settings import Margins

_SILENT = ("changed", "known", "earlier")  # told only where they stand against a PASS
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

    @property
    def state(self) -> str:
        """Return how the figure stands beside its limits.

        "failed": surely beyond that of a FAIL; "missed": beyond that of a PASS; "open": the bound alone is beyond it;
        "absent": not measured; "shown": what a PASS wants.
        """
        if self.share is None:
            return "absent"
        sign = -1 if self.at_least else 1
        best, worst = sorted((sign * self.share.low, sign * self.share.high))
        if self.fails is not None and best > sign * self.fails:
            return "failed"
        if sign * self.share.value > sign * self.limit:
            return "missed"
        return "open" if worst > sign * self.limit else "shown"

    @property
    def texts(self) -> tuple[str, str, str]:
        """Return the figure, its bound, which is never rounded to the better side, and the limit."""
        words, sign, side = ("at least", -1, "low") if self.at_least else ("at most", 1, "high")
        limit = f"{words} {round(100 * self.limit, 1):g} %"
        if self.share is None:
            return "–", "–", limit
        tenths = sign * math.ceil(sign * 1000 * getattr(self.share, side) - 1e-6)
        return f"{100 * self.share.value:.1f} %", f"{words} {tenths / 10:.1f} %", limit


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
    what, share = "of what it knew and was to keep", kept.share if kept else None
    criteria["kept"] = Criterion("Does it still know the rest?", what, share, margins.kept, margins.lost, at_least=True)
    if kept and kept.fitted:
        criteria["new"] = _count("Was that tested on rows that nothing learnt?", "of those to keep", 0, kept.rows)
    if again and again.excess:
        criteria["earlier"] = Criterion("Does it recite earlier requests?", never, again.excess, most, most)
    return {name: c for name, c in criteria.items() if name not in _SILENT or c.state in ("failed", "missed")}


def _count(question: str, meaning: str, count: float, rows: int, is_fail: bool = False) -> Criterion:
    """Return a question that is counted, not estimated: one row is enough."""
    share, least = count / max(rows, 1), 1 / max(rows, 1)
    return Criterion(question, meaning, Bound(share, share, share), least, least if is_fail else None, at_least=True)
