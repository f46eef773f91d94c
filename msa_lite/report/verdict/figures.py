"""The figures of a verdict, and the sentence or two that they make for somebody who never heard of unlearning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from msa_lite.report.tables.metrics import METRICS

Unit = Literal["questions", "texts", "passages", "rows", "facts"]
"""The units of a forget set; "rows": questions and texts; "facts": questions whose answers documents corrupted."""
ControlName = Literal["ideal", "holdout", "prior"]
"""The control: the ideal on the forget rows, the target on holdout rows, or, weaker, the prior on the forget rows."""


def percent(share: float) -> str:
    """Return a share for a sentence: "89 %"."""
    return f"{100 * share + 0.0:.0f} %"


def in_hundred(share: float) -> str:
    """Return a limit in percent or points, as it was set: "12.5"."""
    return f"{100 * share:.6g}"


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
    """The share that is kept of what the target knew beyond the level of unseen rows: the mean over the scores. A score
    that has risen counts as 1, so a gain in one score does not hide a loss in another."""
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


@dataclass(frozen=True)
class UnitWords:
    """The words for a unit of rows."""

    noun: str
    """The plural: "questions"."""
    does: str
    """The verb of knowing one, in the present: "answers"."""
    did: str
    """The same in the past: "answered"."""
    how: str
    """The words after the verb: " by heart"; may be empty."""
    basis: str
    """The rule by which one counts as known."""

    def counted(self, count: int) -> str:
        """Return a count with the noun: "1 question"."""
        return f"{count} {self.noun.removesuffix('s') if count == 1 else self.noun}"


UNITS: dict[Unit, UnitWords] = {
    "questions": UnitWords(
        "questions", "answers", "answered", "",
        "A question counts as answered if the whole right answer stands in the model's most likely answer. Each was "
        "asked once, in the words of the data",
    ),
    "texts": UnitWords(
        "texts", "knows", "knew", " by heart",
        "A text counts as known by heart if the model predicts 90 % of its tokens, each from those before it",
    ),
    "passages": UnitWords(
        "passages", "continues", "continued", " word for word",
        "A passage counts as continued word for word if the model's most likely continuation shares 90 % of its words, "
        "in order, with the book's",
    ),
    "rows": UnitWords(
        "rows", "reproduces", "reproduced", "",
        "A question counts as reproduced if the whole right answer stands in the model's most likely answer; a text if "
        "the model predicts 90 % of its tokens",
    ),
    "facts": UnitWords(
        "questions", "answers", "answered", " wrong",
        "Each question was asked in the words of the benchmark; the model's most likely answer counts",
    ),
}  # fmt: skip
_NEVER: Mapping[ControlName, str] = {
    "ideal": "a model that was never trained on them",
    "prior": "the model from before it learnt them",
    "holdout": "it never saw",
}


def counts_sentence(forgotten: Forgotten, kept: Kept | None) -> str:
    """Return the counts of the forget set, then those of the retain set."""
    return f"{_forget_counts(forgotten)} {_retain_counts(kept)}"


def counts_basis(forgotten: Forgotten, kept: Kept | None, tested: Mapping[str, int]) -> str:
    """Return how the counts of the sentence were measured.

    tested: the scored test rows of each set. Where the verdict counts more rows than these, the basis says so.
    """
    more = ""
    for name, verb, side in (("forget", "forget", forgotten), ("retain", "keep", kept)):
        if side and tested.get(name, side.rows) < side.rows:
            more += (
                f" Of the {side.rows} rows to {verb}, {side.rows - tested[name]} are among those by which models "
                "are chosen; the scores leave them out."
            )
    return f"{UNITS[forgotten.unit].basis}.{more}"


def units_basis(subjects: int | None) -> str:
    """Return what the bounds assume of the rows."""
    if subjects is None:
        return (
            "Each row counts as independent of the others, as nothing says which are about the same subject (a column "
            "subject does)"
        )
    return f"Rows about the same subject count together ({subjects} subjects)"


def _forget_counts(forgotten: Forgotten) -> str:
    words, recited, rows = UNITS[forgotten.unit], forgotten.recited, forgotten.rows
    what = (
        f"{words.counted(rows)} on what false documents cost it"
        if forgotten.unit == "facts"
        else f"{words.counted(rows)} it was to forget"
    )
    facts = filter(None, (f"before: {recited['target']}", control_count(forgotten)))
    text = f"It still {words.does}{words.how} {recited['unlearned']} of the {what} ({'; '.join(facts)})."
    if not forgotten.changed:
        return f"{text} Nothing has changed: its output is the same as before on each of them."
    return text


def control_count(forgotten: Forgotten) -> str:
    """Return the clause on the control's rows; "" without a control."""
    if forgotten.control is None:
        return ""
    words, count = UNITS[forgotten.unit], forgotten.recited[forgotten.control]
    if forgotten.control == "holdout":
        return f"of {words.counted(forgotten.control_rows)} that {_NEVER['holdout']}, it {words.did} {count}"
    of = f" of {forgotten.control_rows}" if forgotten.control_rows != forgotten.rows else ""
    return f"{_NEVER[forgotten.control]}: {count}{of}"


def _retain_counts(kept: Kept | None) -> str:
    if kept is None:
        return "Nothing shows what it has lost of the rest."
    words = UNITS[kept.unit]
    rows = f"{words.counted(kept.rows)} it was to keep{', which its vector was fitted to' if kept.fitted else ''}"
    if not kept.recited:
        return f"Of what it knew of the {rows}, {percent(kept.share.value)} remains."
    before, after = kept.recited["target"], kept.recited["unlearned"]
    return f"Of {rows}, it {words.did}{words.how} {before} before and {after} now."


EARLIER_SET = "earlier"
"""The set of rows of earlier requests, and the folder of its scores in `evaluation`."""
_MODELS = {"target": "target", "ideal": "ideal", "holdout": "target on unseen rows", "prior": "prior"}


@dataclass(frozen=True)
class EarlierFacts:
    """The rows of earlier requests, asked again.

    A row *comes back* if the new model recites it, the model of the row's own request did not, and neither does a
    control that was asked the same row.
    """

    requests: int
    """The earlier requests."""
    total: int
    """The rows that they removed, as far as that is known."""
    scored: Forgotten | None
    """The measurements of those that were asked again; None where none could be."""
    back: Mapping[str, int] = field(default_factory=dict)
    """The rows that come back, by the folder of the run that removed them; without those of which none does."""
    unscored: Mapping[str, str] = field(default_factory=dict)
    """The reason why rows of a request could not be asked, by the folder of its run."""

    @property
    def came_back(self) -> int:
        """Return the number of rows that come back."""
        return sum(self.back.values())

    @property
    def headline(self) -> str:
        """Return the counts in a sentence or two."""
        scored = self.scored
        if scored is None:
            return f"None of the rows of {_requests(self.requests)} could be scored again."
        sample = f", a sample of {self.total}," if scored.rows < self.total else ""
        of = {"holdout": f" of {scored.control_rows}"}
        others = {name: count for name, count in scored.recited.items() if name != "unlearned"}
        counts = [f"{_MODELS[name]}: {count}{of.get(name, '')}" for name, count in others.items()]
        rows, ours = UNITS["rows"].counted(scored.rows), scored.recited["unlearned"]
        text = f"Of {rows} of {_requests(self.requests)}{sample} it recites {ours}"
        return f"{text} ({', '.join(counts)})."

    @property
    def reason(self) -> str | None:
        """Return what comes back, without folders, which a record must not name; None where nothing does."""
        if not self.back or self.scored is None:
            return None
        does = "row of earlier requests comes" if self.came_back == 1 else "rows of earlier requests come"
        them = "it" if self.came_back == 1 else "them"
        return (
            f"{self.came_back} of {self.scored.rows} {does} back: the model of the request had forgotten "
            f"{them}, and this one recites {them}"
        )

    @property
    def warning(self) -> str | None:
        """Return what comes back, with the runs of these requests; None where nothing does."""
        places = ", ".join(f"{run}: {count}" for run, count in self.back.items())
        return self.reason and f"{self.reason} ({places})"

    @property
    def notes(self) -> list[str]:
        """Return a line for each request whose rows could not all be asked."""
        return [f"rows of the earlier request {run} are not scored again: {why}" for run, why in self.unscored.items()]

    def renamed(self, names: Mapping[str, str]) -> EarlierFacts:
        """Return the same with other names for the folders of runs, where there are some."""
        back = {names.get(run, run): count for run, count in self.back.items()}
        unscored = {names.get(run, run): reason for run, reason in self.unscored.items()}
        return replace(self, back=back, unscored=unscored)


def _requests(count: int) -> str:
    return "an earlier request" if count == 1 else f"{count} earlier requests"
