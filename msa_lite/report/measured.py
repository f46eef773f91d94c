"""Hold what was measured of a forget and a retain set, as verdict, sentences and record share it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from msa_lite.report.metrics import METRICS

Unit = Literal["questions", "texts", "passages", "rows", "facts"]
"""The units of a forget set; "rows": questions and texts; "facts": questions whose answers documents corrupted."""
ControlName = Literal["ideal", "holdout", "prior"]
"""The control: the ideal on the forget rows, the target on holdout rows, or, weaker, the prior on the forget rows."""


def percent(share: float) -> str:
    """Return a share for a sentence: "89 %"."""
    return f"{100 * share + 0.0:.0f} %"


def score_label(name: str) -> str:
    """Return the name of a score for a sentence: "ROUGE-L recall", "probability"."""
    kind = METRICS.get(f"{name}_r")
    return kind.label if kind else name.replace("_", " ")


@dataclass(frozen=True)
class Bound:
    """An estimate with its bounds."""

    value: float
    low: float
    """The true value is surely not lower: the one-sided 95 % bound."""
    high: float
    """The true value is surely not higher: the one-sided 95 % bound."""


@dataclass(frozen=True)
class Forgotten:
    """The measurements of the forget set."""

    rows: int
    """Rows that were scored."""
    recited: Mapping[str, int] = field(default_factory=dict)
    """Recited rows by model, "target", "unlearned", "ideal" and "prior" as far as they were scored on these rows.
    "holdout": rows of the holdout set that the target recites. Of "facts": wrong answers."""
    control: ControlName | None = None
    """The control; None where nothing shows what a model does that never saw the rows."""
    control_rows: int = 0
    """Rows that the control was scored on."""
    excess: Bound | None = None
    """The share of recited rows above the control's, in [−1, 1]; None without a control."""
    left: Mapping[str, Bound] = field(default_factory=dict)
    """By score: (unlearned − control) / (target − control), the part of the gap that is left; 0: as the control. Scores
    by which the target does not differ from the control are left out."""
    changed: int = 0
    """Rows on which the unlearned model's output differs from the target's."""
    unit: Unit = "questions"
    """The kind of the rows."""
    subjects: int | None = None
    """Subjects that the rows are about, whose rows count together in all bounds; None: each row counts by itself."""

    @property
    def known(self) -> bool:
        """Return True if the target differs from the control, so that there is something to forget."""
        if self.left or self.control is None:
            return True
        return self.share("target") > self.control_share

    def share(self, model: str) -> float:
        """Return the share of rows that a model recites."""
        return self.recited.get(model, 0) / self.rows if self.rows else 0.0

    @property
    def control_share(self) -> float:
        """Return the share of rows that the control recites; 0 without a control."""
        return self.recited.get(self.control, 0) / self.control_rows if self.control and self.control_rows else 0.0


@dataclass(frozen=True)
class Kept:
    """The measurements of the retain set, on rows that no vector was fitted to, where there are any."""

    share: Bound
    """What is kept of what the target knew beyond the level of unseen rows: the mean over the scores, in each of which
    a gain counts as 1, so that it makes up for no loss."""
    rows: int
    """Rows that were scored."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """The same by score, as measured: above 1 for a gain, below 0 where less is known than of unseen rows."""
    recited: Mapping[str, int] = field(default_factory=dict)
    """Rows that "target" and "unlearned" answer right, or know by heart; empty where rows are not right or wrong."""
    fitted: bool = False
    """True if a vector was fitted to all of these rows, so that they show nothing of others."""
    changed: int = 0
    """Rows on which the unlearned model's output differs from the target's."""
    unit: Unit = "questions"
    """The kind of the rows."""
    subjects: int | None = None
    """As of `Forgotten`."""
