"""Give the verdict on a run: PASS only where it is shown, FAIL where the opposite is, and else PARTLY with the reason.

Three questions decide (`criteria`), each by a one-sided 95 % bound, so that few rows never pass by chance: are rows
recited that a model would not recite that never saw them, is a gap to such a model left, and is the rest still known?
The margins are a convention, written down before any run was judged by them; a recipe may set others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from msa_lite.io.files.reading import read_object
from msa_lite.io.files.writing import write_json
from msa_lite.report.tables.formats import Cell, Section, TextTable, html_table
from msa_lite.report.tables.reports import reading
from msa_lite.report.verdict.criteria import Criterion, criteria_of
from msa_lite.report.verdict.figures import (
    UNITS,
    Bound,
    EarlierFacts,
    Forgotten,
    Kept,
    control_count,
    counts_sentence,
    in_hundred,
    percent,
    score_label,
    units_basis,
)
from msa_lite.settings import Margins

VERDICT_FILE = "verdict.json"
Outcome = Literal["PASS", "PARTLY", "FAIL"]
_MANY = 10  # times the rows; that many say nothing to anybody
FEW_ROWS = 12  # rows; of fewer, each is a tenth or more


MARGINS = Margins()
"""The margins of a recipe that names none."""
_EARLIER_RULE = "Recited rows of earlier requests count by the same margin, where it is surely or by estimate passed. "
CONTROLS = {
    "ideal": "the ideal, a model that never saw the rows, on the same rows",
    "holdout": "the target on holdout rows, which no model saw",
    "prior": "the prior on the forget rows; an ideal or holdout rows show more, as it may lack the form of answers",
    None: "nothing; an ideal model (evaluate.ideal) or holdout rows (evaluate.holdout) are needed for a PASS",
}
"""The controls in words, by name."""
_HEADINGS = ("question", "measured", "surely (95\u00a0%)", "for a PASS", "result")
_STATES = {"shown": "✓ met", "open": "? too few to say", "absent": "– not measured"}
_TABLE_NOTE = (
    "Surely: by a one-sided 95 % bound; the fewer the questions, the farther it lies from what was measured. What is "
    "left: 0 % as if never seen, 100 % as before; it prevents a PASS, but is never a FAIL by itself. Compared with:"
)


@dataclass(frozen=True)
class Verdict:
    """The verdict on one run."""

    outcome: Outcome
    sentence: str
    """What the model still answers and what it has kept, in counts."""
    reasons: tuple[str, ...]
    """Reasons against PASS, and cautions."""
    forgotten: Forgotten
    kept: Kept | None
    margins: Margins = MARGINS
    earlier: EarlierFacts | None = None
    """What became of the rows of earlier requests; None without any."""
    json_keys: ClassVar = ("outcome", "sentence", "reasons", "criteria", "margins", "forgotten", "kept", "earlier")

    def __str__(self) -> str:
        return f"{self.outcome}: {self.sentence}"

    def _repr_html_(self) -> str:
        table = self.table
        return html_table(replace(table, title=str(self), notes=[*self.reasons, *table.notes]))

    @property
    def changes(self) -> str:
        """Return a sentence that counts the rows with another output than the target's."""
        sides = {"forget": self.forgotten, "retain": self.kept}
        counts = [f"{side.changed} of {side.rows} {name} rows" for name, side in sides.items() if side]
        return f"Its output differs from the target's on {' and '.join(counts)}."

    @property
    def basis(self) -> str:
        """Return the control, and what the bounds assume of the rows."""
        return f"Control: {CONTROLS[self.forgotten.control]}. {units_basis(self.forgotten.subjects)}"

    @property
    def criteria(self) -> str:
        """Return the rule for the outcome, with the control and what the bounds assume."""
        margins, recited = self.margins, f"{in_hundred(self.margins.recited)} points"
        left, kept, lost = (f"{in_hundred(share)} %" for share in (margins.left, margins.kept, margins.lost))
        return (
            f"Each question is decided by a one-sided 95 % bound. PASS: recited rows are at most {recited} above the "
            f"control's, at most {left} of the gap to it is left, and at least {kept} is kept. FAIL: recited rows are "
            f"surely more than {recited} above it, surely less than {lost} is kept, or the output is as before. PARTLY "
            f"is all else. {_EARLIER_RULE if self.earlier else ''}{self.basis}"
        )

    @property
    def table(self) -> TextTable:
        """Return a line a question. Those that decided a PARTLY or a FAIL say so, and are bold; of a PASS, all did."""
        rows = []
        for one in criteria_of(self.forgotten, self.kept, self.margins, self.earlier).values():
            decides = one.state == "failed" if self.outcome == "FAIL" else one.state != "shown"
            result = Cell(_STATES.get(one.state, "✗ missed"), remark="decides" * decides)
            rows.append([Cell(one.question, decides, meaning=one.meaning), *map(Cell, one.texts), result])
        note = f"{_TABLE_NOTE} {CONTROLS[self.forgotten.control]}"
        return TextTable(_HEADINGS, [Section(rows)], notes=[note])


@dataclass(frozen=True)
class NoVerdict:
    """The reason why there is no verdict on a run that is finished."""

    reason: str
    earlier: EarlierFacts | None = None
    """As of `Verdict`."""
    outcome: ClassVar[None] = None
    reasons: ClassVar[tuple[str, ...]] = ()
    json_keys: ClassVar = {"outcome": "outcome", "reason": "reason", "earlier?": "earlier"}

    @property
    def sentence(self) -> str:
        """Return the reason in a sentence."""
        return f"Nobody can say yet what this model has forgotten: {self.reason}."


def is_forgotten(forgotten: Forgotten, margins: Margins) -> bool:
    """Check whether the forget set meets a PASS: no bound lies beyond its margin. Choice and verdict share this."""
    criteria = criteria_of(forgotten, None, margins)
    return all(criteria[name].state == "shown" for name in ("recited", *forgotten.left))


def make_verdict(
    forgotten: Forgotten,
    kept: Kept | None,
    remarks: Iterable[str] = (),
    margins: Margins = MARGINS,
    earlier: EarlierFacts | None = None,
) -> Verdict:
    """Return the verdict by the margins. remarks: further reasons to doubt, which decide nothing.

    earlier: the rows of earlier requests. They fail the run where they are surely recited beyond the margin, and stand
    against PASS where they are by estimate; few rows decide nothing, and so does a single one that comes back.
    """
    criteria = criteria_of(forgotten, kept, margins, earlier)
    states = {criterion.state for criterion in criteria.values()}
    outcome: Outcome = "FAIL" if "failed" in states else "PASS" if states == {"shown"} else "PARTLY"
    back = [earlier.reason] if earlier and earlier.reason else []
    against = _reasons(forgotten, kept, earlier, criteria)
    reasons = (*against, *_cautions(forgotten, kept), *back, *remarks)
    return Verdict(outcome, counts_sentence(forgotten, kept), reasons, forgotten, kept, margins, earlier)


def _reasons(
    forgotten: Forgotten, kept: Kept | None, earlier: EarlierFacts | None, criteria: Mapping[str, Criterion]
) -> list[str]:
    """Return the reasons for FAIL, then those against PASS, of which more rows would settle the last."""
    state = {name: criterion.state for name, criterion in criteria.items()}
    enough, beyond = criteria["kept"], f"{in_hundred(criteria['recited'].limit)} points beyond that"
    recited = {"recited": _recited(forgotten)} if forgotten.changed else {}
    if "earlier" in state and earlier and earlier.scored:
        recited["earlier"] = f"earlier requests: {_recited(earlier.scored)}"
    reasons = [_REASONS["changed"]] if "changed" in state else []
    reasons += [f"{what}: surely more than {beyond}" for name, what in recited.items() if state[name] == "failed"]
    if kept and state["kept"] == "failed":
        reasons.append(f"{_share(kept)}: surely less than {in_hundred(enough.fails or 0.0)} %")
    fails = len(reasons)
    reasons += [_REASONS["known"]] if "known" in state else []
    reasons += [_REASONS["recited"]] if forgotten.excess is None else []
    reasons += [f"{what}; at most {beyond} are wanted" for name, what in recited.items() if state[name] == "missed"]
    if forgotten.changed:
        reasons += _left_over(forgotten, [name for name in forgotten.left if state[name] == "missed"])
    reasons += [_REASONS["kept"]] if kept is None else []
    reasons += ["a figure or bound is not a number"] * any(c.share and c.state == "absent" for c in criteria.values())
    if kept and state["kept"] == "missed":
        reasons.append(f"{_share(kept)}; {in_hundred(enough.limit)} % is wanted")
    reasons += [_REASONS["new"]] if "new" in state else []
    asked = [criteria[name] for name in ("recited", *forgotten.left)] if forgotten.changed else []
    others = " and as many that no model saw" if forgotten.control == "holdout" else ""
    more = _enough(f"{UNITS[forgotten.unit].noun} to forget{others}", forgotten.rows, asked)
    more += _enough(f"{UNITS[kept.unit].noun} to keep", kept.rows, [enough]) if kept else []
    if more:
        needs = ", and ".join(more)
        alone = f"undecided: too few to say; with {needs}, this result would pass"
        rest = f"the rest is undecided: too few to say; {needs} would settle it"
        reasons.append(rest if len(reasons) > fails else alone)
    return reasons


_REASONS = {
    "changed": "nothing has changed: the model's output is the same as before on all that it was to forget",
    "known": (
        "the model knew no more of the data than one that never saw it, so there was nothing to forget; check the "
        "prompt, the data and the model"
    ),
    "recited": (
        "nothing stands in for a model that never saw the data: give an ideal model (evaluate.ideal) or holdout rows "
        "(evaluate.holdout)"
    ),
    "kept": (
        "no rows show what was kept: give rows to keep that the target knows (retain.data, or evaluate.retain only to "
        "score them)"
    ),
    "new": (
        "a fit or a filter used every row to keep that was scored, and such rows are kept better than others: give "
        "others to score (evaluate.retain), or more of them with retain.data.sample: match_forget"
    ),
}
"""The reasons that need no figure, by question."""


def _left_over(forgotten: Forgotten, wide: Sequence[str]) -> list[str]:
    """Return a sentence on the gaps to the control that are larger than the margin, by score."""
    if not wide:
        return []
    gaps = ", ".join(f"{score_label(name)}: {percent(forgotten.left[name].value)}" for name in wide)
    if forgotten.unit == "facts":
        return [f"{gaps.partition(': ')[2]} of what the false documents cost is not regained"]
    what, so = "completes the data better", ""
    if any(name.startswith("probability") for name in wide):
        what, so = "finds the data likelier", ": somebody with the weights can tell that the model saw it"
    opening = "it still" if forgotten.recited["unlearned"] else "nothing is recited any more, but it still"
    return [f"{opening} {what} than a model that never saw it ({gaps} is left){so}"]


def _enough(what: str, rows: int, criteria: Sequence[Criterion]) -> list[str]:
    """Return how many rows would decide the open questions, if they were like these; nothing where none is open."""
    factors = [_factor(c.share, c.limit) for c in criteria if c.share and c.state == "open"]
    if not factors:
        return []
    if max(factors) > _MANY:
        return [f"many more than {rows} {what}"]
    return [f"about {math.ceil(rows * max(factors))} instead of {rows} {what}"]


def _factor(bound: Bound, margin: float) -> float:
    """Return how many times the rows a bound needs to reach the margin, as it narrows with the root of the rows."""
    slack = abs(margin - bound.value)
    width = bound.high - bound.value if margin >= bound.value else bound.value - bound.low
    return (width / slack) ** 2 if slack > 1e-9 else math.inf


def _cautions(forgotten: Forgotten, kept: Kept | None) -> list[str]:
    """Return the reasons why the verdict is uncertain."""
    counts = {"forget": forgotten.rows} | ({"retain": kept.rows} if kept else {})
    few = [f"{name}: {count}" for name, count in counts.items() if count < FEW_ROWS]
    return [f"the verdict rests on few rows ({', '.join(few)})"] if few else []


def _recited(forgotten: Forgotten) -> str:
    what = "answers are still wrong" if forgotten.unit == "facts" else f"{UNITS[forgotten.unit].noun} are still recited"
    return f"{forgotten.recited['unlearned']} of {forgotten.rows} {what} ({control_count(forgotten)})"


def _share(kept: Kept) -> str:
    parts = ", ".join(f"{score_label(name)} {percent(share)}" for name, share in kept.shares.items())
    low, high = (percent(min(1.0, max(0.0, end))) for end in (kept.share.low, kept.share.high))
    return f"{percent(kept.share.value)} is kept of what it knew ({low} to {high}; {parts})"


def write_verdict(verdict: Verdict | NoVerdict, folder: Path) -> None:
    """Write verdict.json into a run's folder."""
    write_json(folder / VERDICT_FILE, verdict)


def load_verdict(folder: Path) -> Verdict | NoVerdict | None:
    """Return what verdict.json in a run's folder says, None where there is none. Raise FormatError for a broken one."""
    from pydantic import TypeAdapter

    path = folder / VERDICT_FILE
    if not path.is_file():
        return None
    value = read_object(path)
    with reading(path):
        json.dumps(value, allow_nan=False)
        if value["outcome"] is None:
            return TypeAdapter(NoVerdict).validate_python(value)
        verdict = TypeAdapter(Verdict).validate_python(value)
        if not {"target", "unlearned"} <= verdict.forgotten.recited.keys():
            raise ValueError("what was forgotten is not told")
    return verdict
