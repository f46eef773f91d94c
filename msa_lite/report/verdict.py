"""The verdict on a run, in words: PASS, PARTLY or FAIL, from what is left of the forget set and what is kept."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from msa_lite.io.files import write_json

VERDICT_FILE = "verdict.json"
Outcome = Literal["PASS", "PARTLY", "FAIL"]


def percent(share: float) -> str:
    """A share as a sentence shows it: "89 %"."""
    return f"{100 * share:.0f} %"


# The criteria. Of what could be drawn out of the forget set before, and of what the target knew of the retain set.
LEFT_PASS, LEFT_FAIL = 0.2, 0.5
KEPT_PASS, KEPT_FAIL = 0.9, 0.7
CRITERIA = (
    f"PASS: at most {percent(LEFT_PASS)} is left of what could be drawn out of the forget set, and "
    f"{percent(KEPT_PASS)} is kept of what the target knew of the retain set (or the 95 % interval over its rows "
    f"reaches that). FAIL: more than {percent(LEFT_FAIL)} is left, less than {percent(KEPT_FAIL)} is kept, or the "
    "model says the same as before. PARTLY: all else, as without rows to keep"
)
_FEW = 10  # rows of a set, of which a tenth is one row


@dataclass(frozen=True)
class Forgotten:
    """The result on the forget set."""

    said: str
    """An account of its rows, as half a sentence."""
    rows: int
    """Rows that it rests on."""
    left: float | None
    """Share that is left of what could be drawn out before, beyond what a model shows that never saw the rows; in
    [0, 1]. None where there was nothing to draw out."""
    recited: Mapping[str, int] = field(default_factory=dict)
    """Rows that are recited, by model; "holdout": rows of the holdout set that the target recites."""
    changed: int = 0
    """Rows of which the unlearned model says something else than the target."""


@dataclass(frozen=True)
class Kept:
    """The result on the retain set."""

    share: float
    """Share of what the target knew of it, ≥ 0; above 1 where the unlearned model knows more."""
    interval: tuple[float, float]
    """95 % interval of the share, paired over the rows."""
    rows: int
    """Rows that it rests on."""
    what: str = "what it answered before"
    """The whole that it is a share of, in words."""
    changed: int = 0
    """Rows of which the unlearned model says something else than the target."""


@dataclass(frozen=True)
class Verdict:
    """PASS, PARTLY or FAIL, the sentence that says what happened, and the reasons for all but a plain PASS."""

    outcome: Outcome
    sentence: str
    reasons: tuple[str, ...]
    forgotten: Forgotten
    kept: Kept | None
    criteria: str = CRITERIA

    def __str__(self) -> str:
        return f"{self.outcome}: {self.sentence}"

    @property
    def changes(self) -> str:
        """Return a sentence that counts the rows on which the unlearned model's answer differs from the target's."""
        sides = {"forget": self.forgotten, "retain": self.kept}
        counts = [f"{side.changed} of {side.rows} {name} rows" for name, side in sides.items() if side]
        return f"It says something else than the target of {' and '.join(counts)}."

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form, that of verdict.json and of the key `verdict` of `--json`."""
        return {
            "outcome": self.outcome,
            "sentence": self.sentence,
            "criteria": self.criteria,
            "reasons": list(self.reasons),
            "forgotten": asdict(self.forgotten),
            "kept": asdict(self.kept) if self.kept else None,
        }


def judge(forgotten: Forgotten, kept: Kept | None, reasons: Sequence[str] = ()) -> Verdict:
    """Return the verdict by the criteria. reasons: what else is to be told, which decides nothing."""
    failed = _failures(forgotten, kept)
    short = _shortfalls(forgotten, kept)
    outcome: Outcome = "FAIL" if failed else "PARTLY" if short else "PASS"
    retained = f"{percent(kept.share)} of {kept.what}" if kept else "not known, as no rows to keep were scored"
    sentence = f"Forgotten: {forgotten.said}. Kept: {retained}."
    return Verdict(outcome, sentence, (*failed, *short, *_cautions(forgotten, kept), *reasons), forgotten, kept)


def _failures(forgotten: Forgotten, kept: Kept | None) -> list[str]:
    """Reasons for FAIL."""
    reasons = []
    if not forgotten.changed:
        reasons.append("the unlearned model says of every forget row what the target says: nothing has changed")
    if forgotten.left is None:
        reasons.append(
            "the target shows no more of the forget rows than a model that never saw them, so there was nothing to "
            "forget: wrong prompt, wrong rows or wrong model?"
        )
    elif forgotten.left > LEFT_FAIL and forgotten.changed:
        reasons.append(f"{_left(forgotten)} is left of what could be drawn out (FAIL: more than {percent(LEFT_FAIL)})")
    if kept and kept.share < KEPT_FAIL:
        reasons.append(f"{_share(kept)} is kept (FAIL: less than {percent(KEPT_FAIL)})")
    return reasons


def _shortfalls(forgotten: Forgotten, kept: Kept | None) -> list[str]:
    """Reasons against PASS that are none for FAIL."""
    reasons = []
    if forgotten.left is not None and LEFT_PASS < forgotten.left <= LEFT_FAIL:
        reasons.append(f"{_left(forgotten)} is left of what could be drawn out (PASS: at most {percent(LEFT_PASS)})")
    if kept is None:
        reasons.append(
            "nothing says what was kept: give rows that are to stay (retain.data, or evaluate.retain to score alone)"
        )
    elif kept.share >= KEPT_FAIL and kept.interval[1] < KEPT_PASS:
        reasons.append(f"{_share(kept)} is kept (PASS: {percent(KEPT_PASS)})")
    return reasons


def _cautions(forgotten: Forgotten, kept: Kept | None) -> list[str]:
    counts = {"forget": forgotten.rows} | ({"retain": kept.rows} if kept else {})
    few = [f"{name}: {count}" for name, count in counts.items() if count < _FEW]
    return [f"it rests on few rows ({', '.join(few)})"] if few else []


def _left(forgotten: Forgotten) -> str:
    return percent(forgotten.left or 0.0)


def _share(kept: Kept) -> str:
    low, high = kept.interval
    return f"{percent(kept.share)} (95 % interval {percent(low)} to {percent(high)})"


def verdict_lines(verdict: Verdict | str) -> list[str]:
    """The verdict as Markdown paragraphs; a text is the reason why there is none."""
    if isinstance(verdict, str):
        return [f"**No verdict**: {verdict}.\n"]
    reasons = "".join(f"- {reason[0].upper()}{reason[1:]}.\n" for reason in verdict.reasons)
    return [
        f"**{verdict.outcome}**: {verdict.sentence}\n",
        *([reasons] if reasons else []),
        f"{verdict.changes} {verdict.criteria}.\n",
    ]


def write_verdict(verdict: Verdict | str, folder: Path) -> None:
    """Write verdict.json into a run's folder; for a text, why there is none."""
    value = {"outcome": None, "reason": verdict} if isinstance(verdict, str) else verdict.as_dict()
    write_json(folder / VERDICT_FILE, json.loads(json.dumps(value)))
