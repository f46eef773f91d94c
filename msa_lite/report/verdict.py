"""Give the verdict on a run, PASS, PARTLY or FAIL, by what is left of the forget set and kept of the retain set."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from msa_lite.io.files import write_json

VERDICT_FILE = "verdict.json"
Outcome = Literal["PASS", "PARTLY", "FAIL"]
Unit = Literal["questions", "texts", "passages", "rows", "facts"]
"""The units of a forget set; "rows": questions and texts; "facts": questions whose answers documents corrupted."""


def percent(share: float) -> str:
    """Return a share for a sentence: "89 %"."""
    return f"{100 * share:.0f} %"


# Shares of what could be extracted of the forget set before, and of what the target knew of the retain set.
LEFT_PASS, LEFT_FAIL = 0.2, 0.5
KEPT_PASS, KEPT_FAIL = 0.9, 0.7
CRITERIA = (
    f"PASS: at most {percent(LEFT_PASS)} is left of what could be extracted of the forget set, and "
    f"{percent(KEPT_PASS)} is kept of what the target knew of the retain set (or the 95 % interval over its rows "
    f"reaches that). FAIL: more than {percent(LEFT_FAIL)} is left, less than {percent(KEPT_FAIL)} is kept, or the "
    "model's output is the same as before. PARTLY: everything else, also without rows to keep"
)
FEW_ROWS = 10  # rows; of fewer, one row is more than a tenth


@dataclass(frozen=True)
class Forgotten:
    """The result on the forget set."""

    said: str
    """A summary of its rows: half a sentence."""
    rows: int
    """Rows that were scored."""
    left: float | None
    """Share that is left of what could be extracted before, in [0, 1]. What a model shows that never saw the rows does
    not count. None where there was nothing to extract."""
    recited: Mapping[str, int] = field(default_factory=dict)
    """Recited rows by model, the prior among them if it was scored on the same rows. "holdout": rows of the holdout set
    that the target recites."""
    changed: int = 0
    """Rows on which the unlearned model's output differs from the target's."""
    unit: Unit = "questions"
    """The kind of the rows."""
    gone: int | None = None
    """Rows that the target recites and the unlearned model does not; None where rows are not recited or not."""
    unseen_rows: int = 0
    """Rows of the holdout set that "holdout" counts among."""
    right: Mapping[str, float] = field(default_factory=dict)
    """Share of right answers by model, where the verdict weighs that in the place of recited rows."""


@dataclass(frozen=True)
class Kept:
    """The result on the retain set."""

    share: float
    """Share that is kept of what the target knew, ≥ 0; above 1 where the unlearned model knows more."""
    interval: tuple[float, float]
    """95 % confidence interval of the share, paired over the rows."""
    rows: int
    """Rows that were scored."""
    what: str = "what it answered before"
    """The whole that `share` is a share of, in words."""
    changed: int = 0
    """Rows on which the unlearned model's output differs from the target's."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on one run."""

    outcome: Outcome
    sentence: str
    """A sentence that says what was forgotten and what was kept."""
    reasons: tuple[str, ...]
    """Reasons against PASS, and cautions."""
    forgotten: Forgotten
    kept: Kept | None
    criteria: str = CRITERIA

    def __str__(self) -> str:
        return f"{self.outcome}: {self.sentence}"

    @property
    def changes(self) -> str:
        """Return a sentence that counts the rows with another output than the target's."""
        return _changes(asdict(self.forgotten), asdict(self.kept) if self.kept else None)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON-able form, that of verdict.json and of the key `verdict` of `--json`."""
        return {
            "outcome": self.outcome,
            "sentence": self.sentence,
            "criteria": self.criteria,
            "reasons": list(self.reasons),
            "forgotten": asdict(self.forgotten),
            "kept": asdict(self.kept) if self.kept else None,
        }


def make_verdict(forgotten: Forgotten, kept: Kept | None, reasons: Sequence[str] = ()) -> Verdict:
    """Return the verdict by the criteria. reasons: further remarks, which decide nothing."""
    failed = _failures(forgotten, kept)
    short = _shortfalls(forgotten, kept)
    outcome: Outcome = "FAIL" if failed else "PARTLY" if short else "PASS"
    retained = f"{percent(kept.share)} of {kept.what}" if kept else "unknown, since no rows to keep were scored"
    sentence = f"Forgotten: {forgotten.said}. Kept: {retained}."
    return Verdict(outcome, sentence, (*failed, *short, *_cautions(forgotten, kept), *reasons), forgotten, kept)


def _failures(forgotten: Forgotten, kept: Kept | None) -> list[str]:
    """Return the reasons for FAIL."""
    reasons = []
    if not forgotten.changed:
        reasons.append("the unlearned model's output is the target's on every forget row: nothing has changed")
    if forgotten.left is None:
        reasons.append(
            "the target knows no more of the forget rows than a model that never saw them, so there was nothing to "
            "forget; check the prompt, the rows and the model"
        )
    elif forgotten.left > LEFT_FAIL and forgotten.changed:
        reasons.append(f"{_left(forgotten)} is left of what could be extracted (FAIL: more than {percent(LEFT_FAIL)})")
    if kept and kept.share < KEPT_FAIL:
        reasons.append(f"{_share(kept)} is kept (FAIL: less than {percent(KEPT_FAIL)})")
    return reasons


def _shortfalls(forgotten: Forgotten, kept: Kept | None) -> list[str]:
    """Return the reasons against PASS that are no reasons for FAIL."""
    reasons = []
    if forgotten.left is not None and LEFT_PASS < forgotten.left <= LEFT_FAIL:
        reasons.append(f"{_left(forgotten)} is left of what could be extracted (PASS: at most {percent(LEFT_PASS)})")
    if kept is None:
        reasons.append(
            "no rows show what was kept: give rows to keep (retain.data, or evaluate.retain only to score them)"
        )
    elif kept.share >= KEPT_FAIL and kept.interval[1] < KEPT_PASS:
        reasons.append(f"{_share(kept)} is kept (PASS: {percent(KEPT_PASS)})")
    return reasons


def _cautions(forgotten: Forgotten, kept: Kept | None) -> list[str]:
    """Return the reasons why the verdict is uncertain."""
    counts = {"forget": forgotten.rows} | ({"retain": kept.rows} if kept else {})
    few = [f"{name}: {count}" for name, count in counts.items() if count < FEW_ROWS]
    return [f"the verdict rests on few rows ({', '.join(few)})"] if few else []


def _left(forgotten: Forgotten) -> str:
    return percent(forgotten.left or 0.0)


def _share(kept: Kept) -> str:
    low, high = kept.interval
    return f"{percent(kept.share)} (95 % interval {percent(low)} to {percent(high)})"


def verdict_lines(verdict: Mapping[str, Any]) -> list[str]:
    """Return the content of verdict.json as Markdown: the verdict, its reasons (may be empty), what it counts."""
    if verdict["outcome"] is None:
        return [f"**No verdict**: {verdict['reason']}.\n"]
    reasons = "".join(f"- {reason[0].upper()}{reason[1:]}.\n" for reason in verdict["reasons"] if reason)
    return [
        f"**{verdict['outcome']}**: {verdict['sentence']}\n",
        reasons,
        f"{_changes(verdict['forgotten'], verdict['kept'])} {verdict['criteria']}.\n",
    ]


def _changes(forgotten: Mapping[str, Any], kept: Mapping[str, Any] | None) -> str:
    sides = {"forget": forgotten, "retain": kept}
    counts = [f"{side['changed']} of {side['rows']} {name} rows" for name, side in sides.items() if side]
    return f"Its output differs from the target's on {' and '.join(counts)}."


def write_verdict(verdict: Verdict | str, folder: Path) -> None:
    """Write verdict.json into a run's folder. A text stands for no verdict and is the reason."""
    value = {"outcome": None, "reason": verdict} if isinstance(verdict, str) else verdict.as_dict()
    write_json(folder / VERDICT_FILE, json.loads(json.dumps(value)))
