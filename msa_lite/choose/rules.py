"""The rules by which the best of several candidates (strengths of vectors, epochs of a baseline) is chosen.

A rule ranks the metrics of one candidate beside those of the target, and of the ideal where there is one; the highest
rank is chosen. Pure functions of reports: nothing here runs a model.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from msa_lite.benchmarks import paper_scores
from msa_lite.choose.evidence import CONFIDENCE, Evidence, Metrics, surely_misses
from msa_lite.choose.kept import FAR, kept_share, lost_too_much, utility
from msa_lite.conditions import parse_condition
from msa_lite.errors import DataError, UsageError, join_faults, nearest
from msa_lite.report.metrics import metric_kind

FORGOTTEN = 0.05  # an exposure that is no higher counts as none
NO_EVIDENCE = Evidence()
LOWEST = 1e-6  # the least that a factor of a paper's score counts, so that the others still order what shares a zero


@dataclass(frozen=True, order=True)
class Rank:
    """The rank of a candidate; the highest is chosen, and of equals the gentlest."""

    met: bool
    """True where it meets the conditions of the rule; such a candidate is above all others."""
    value: float
    """The score that orders candidates alike in `met`; higher is better."""
    kept: float = 1.0
    """The tie-break: the share of the retain set that is left, by 0.01."""
    aim: Literal["stronger", "gentler", "enough"] | None = field(default=None, compare=False)
    """The direction of a better candidate: more forgetting, less loss, neither; None where the rule cannot tell."""
    note: str | None = field(default=None, compare=False)
    """The condition that it does not meet, and by how much."""


class Rule(Protocol):
    """What orders candidates."""

    @property
    def name(self) -> str:
        """What is printed."""

    @property
    def needs_ideal(self) -> bool:
        """Whether candidates cannot be ranked without the ideal model."""

    @property
    def judged(self) -> bool:
        """Check whether a judge has a part in one of its terms."""

    def rank(
        self,
        metrics: Metrics,
        reference: Metrics,
        ideal: Metrics | None = None,
        evidence: Evidence = NO_EVIDENCE,
    ) -> Rank:
        """The rank of a candidate by its metrics, the target's (`reference`) and the ideal's, all on the same rows.

        evidence: the prior's level and the rows' scores, where they are known. Raises DataError where the target or the
        ideal has no value that all candidates are held against.
        """

    def needs(self) -> tuple[str, ...]:
        """Metrics without any one of which candidates cannot be ranked."""

    def describe(self) -> Any:
        """What a manifest records, JSON-able."""

    def notes(self, reference: Metrics) -> list[str]:
        """What of the rule does not count beside this target."""

    def unmet(self, best: Rank) -> str:
        """What to tell of the best candidate where none meets the rule's conditions."""


@dataclass(frozen=True)
class Exposure:
    """Forget most among what keeps enough: 1 − `exposure` where nothing was `lost_too_much`, in [0, 1].

    An exposure up to 0.05 counts as forgotten, with the value 1: among such, what keeps most is best. What does not
    keep enough ranks by `kept_share` − 1 < 0, so that the gentlest is chosen where nothing keeps enough. Needs neither
    a benchmark nor the ideal.
    """

    keep: float
    name = "exposure"
    needs_ideal = False
    judged = False

    def rank(
        self,
        metrics: Metrics,
        reference: Metrics,
        ideal: Metrics | None = None,
        evidence: Evidence = NO_EVIDENCE,
    ) -> Rank:
        kept = kept_share(metrics, reference)
        if lost := lost_too_much(metrics, reference, self.keep, evidence.pairs):
            return Rank(False, kept - 1.0, aim="gentler", note=lost)
        left = exposure(metrics, reference, evidence.prior)
        if left <= FORGOTTEN:
            return Rank(True, 1.0, round(kept, 2), "enough")
        return Rank(True, 1.0 - left, round(kept, 2), "stronger")

    def needs(self) -> tuple[str, ...]:
        return ("extraction_strength",)

    def describe(self) -> Any:
        noise = {"confidence": CONFIDENCE, "far": FAR}
        return {"score": self.name, "keep": self.keep, "forgotten": FORGOTTEN, **noise}

    def notes(self, reference: Metrics) -> list[str]:
        return []

    def unmet(self, best: Rank) -> str:
        return (
            f"no candidate left {self.keep:.0%} of the target's retain scores, so the one that left most "
            f"({1 + best.value:.0%}) was taken; it {best.note}"
        )


@dataclass(frozen=True)
class PaperScore:
    """A validation score of the MSA paper, one of `benchmarks.paper_scores`; see `paper_score`.

    Terms that the target has no value for, as the judge's three without a judge, are left out for everybody, with
    their weights. Where a candidate has none for a term that is in, the factor is the lowest.
    """

    name: str

    @property
    def weights(self) -> Mapping[str, int]:
        """The weight of each metric: of the factor m where positive, of 1 − m where negative."""
        return paper_scores()[self.name]

    @property
    def needs_ideal(self) -> bool:
        return any(metric_kind(name).needs_ideal for name in self.needs())

    @property
    def judged(self) -> bool:
        return any(metric_kind(name).judge for name in self.weights)

    def rank(
        self,
        metrics: Metrics,
        reference: Metrics,
        ideal: Metrics | None = None,
        evidence: Evidence = NO_EVIDENCE,
    ) -> Rank:
        weights = {n: w for n, w in self.weights.items() if reference.get(n) is not None}
        if not weights:
            raise DataError(f"score {self.name}: the target has none of {', '.join(self.weights)}")
        return Rank(True, paper_score(metrics, weights, printed=self.name.endswith("-printed")))

    def needs(self) -> tuple[str, ...]:
        return tuple(name for name in self.weights if not _needs_judge(name))

    def describe(self) -> Any:
        return {"score": self.name, "weights": dict(self.weights)}

    def notes(self, reference: Metrics) -> list[str]:
        out = [name for name in self.weights if reference.get(name) is None]
        groups = {
            "there is no judge that compares with an ideal model": [name for name in out if _needs_judge(name)],
            "the target has no value for it": [name for name in out if not _needs_judge(name)],
        }
        return [f"{', '.join(names)}: left out of the score, {why}" for why, names in groups.items() if names]

    def unmet(self, best: Rank) -> str:
        raise AssertionError("a score has no conditions")


def _needs_judge(name: str) -> bool:
    return metric_kind(name).judge == "required"


def paper_score(metrics: Metrics, weights: Mapping[str, int], printed: bool = False) -> float:
    """(Π f^|w|)^(1/Σ|w|), in (0, 1], higher is better: f = m for a positive weight w, 1 − m for a negative one.

    Every factor is kept within [1e-6, 1]; a metric that is None counts as 1e-6. The paper (§Experiments) calls this a
    geometric mean but prints exp(Π / 8), 8 being the sum of the weights; that is `printed`, in (1, e^⅛], and orders
    alike. For MUSE it also prints (1 − KnowMem_r)², against its own words that this term is there to preserve what is
    known of the retain set. As in the paper, an AUC (min_k, min_k_pp) below the ideal's counts as a gain, though it is
    over-unlearning; muse-gap has 1 − |AUC − AUC of the ideal| in its place. RESTOR's score is plain accuracy.
    """
    logs = 0.0
    for name, weight in weights.items():
        value = metrics.get(name)
        factor = LOWEST if value is None else value if weight > 0 else 1.0 - value
        logs += abs(weight) * math.log(min(1.0, max(LOWEST, factor)))
    return math.exp(math.exp(logs) / 8) if printed else math.exp(logs / sum(map(abs, weights.values())))


@dataclass(frozen=True)
class Condition:
    """What a metric has to be: at least, or at most, a number, or that many times what the target or ideal has."""

    metric: str
    at_least: bool
    factor: float
    of: str | None = None

    @classmethod
    def parse(cls, metric: str, text: str) -> Condition:
        """From ">= 0.95 * target", "<= 0.4" or "<= 1.1 * ideal". Raises UsageError for anything else."""
        try:
            return cls(metric, *parse_condition(text))
        except ValueError as error:
            raise UsageError(f"subject_to.{metric}: {text!r} {error}") from None

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.factor:g}{f' * {self.of}' if self.of else ''}"

    def shortfall(
        self, metrics: Metrics, reference: Metrics, ideal: Metrics | None, evidence: Evidence = NO_EVIDENCE
    ) -> float:
        """How far a candidate is from meeting it, in parts of the bound (of 1 where that is 0); 0 where it does.

        1 where the candidate has no such metric. A billionth of the bound is forgiven, as rounding; beside the target,
        up to a tenth of it where that may be noise of the rows (`surely_misses`).
        """
        bound, value = self.factor * self._unit(reference, ideal), metrics.get(self.metric)
        if value is None:
            return 1.0
        missing = (bound - value if self.at_least else value - bound) / (abs(bound) or 1.0)
        pairs = evidence.pairs.get(self.metric, ()) if self.of == "target" else ()
        if len(pairs) > 1 and missing <= FAR and not surely_misses(pairs, self.factor, self.at_least):
            return 0.0
        return missing if missing > 1e-9 else 0.0

    def miss(self, metrics: Metrics, reference: Metrics, ideal: Metrics | None) -> str:
        """Return what a candidate has instead of what is wanted, in words."""
        value = metrics.get(self.metric)
        bound = self.factor * self._unit(reference, ideal)
        found = "is not there" if value is None else f"is {value:.3f}"
        return f"{self.metric} {found}, {'at least' if self.at_least else 'at most'} {bound:.3f} wanted"

    def _unit(self, reference: Metrics, ideal: Metrics | None) -> float:
        if self.of is None:
            return 1.0
        value = (reference if self.of == "target" else ideal or {}).get(self.metric)
        if value is None:
            raise DataError(f"subject_to.{self.metric}: '{self}' says nothing, as the {self.of} has no such metric")
        return value


@dataclass(frozen=True)
class Constrained:
    """The metric that is highest, or lowest, among what meets all conditions.

    value: the metric, negated where the lowest is best. What does not meet the conditions, or lacks the metric, ranks
    by −Σ `Condition.shortfall`, less 1 where it lacks the metric: the nearest is best.
    """

    metric: str
    highest: bool
    conditions: Sequence[Condition] = ()

    @property
    def name(self) -> str:
        return f"{'maximise' if self.highest else 'minimise'} {self.metric}"

    @property
    def needs_ideal(self) -> bool:
        return any(c.of == "ideal" for c in self.conditions) or any(metric_kind(n).needs_ideal for n in self.needs())

    @property
    def judged(self) -> bool:
        return any(metric_kind(name).judge for name in self.needs())

    def rank(
        self,
        metrics: Metrics,
        reference: Metrics,
        ideal: Metrics | None = None,
        evidence: Evidence = NO_EVIDENCE,
    ) -> Rank:
        missing = {c: c.shortfall(metrics, reference, ideal, evidence) for c in self.conditions}
        value = metrics.get(self.metric)
        notes = [condition.miss(metrics, reference, ideal) for condition, far in missing.items() if far]
        if value is None or notes:
            notes += [f"{self.metric} is not there"] * (value is None)
            return Rank(False, -sum(missing.values()) - (value is None), note="; ".join(notes))
        return Rank(True, value if self.highest else -value)

    def needs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([self.metric, *(condition.metric for condition in self.conditions)]))

    def describe(self) -> Any:
        conditions = {condition.metric: str(condition) for condition in self.conditions}
        return {"maximise" if self.highest else "minimise": self.metric, "subject_to": conditions}

    def notes(self, reference: Metrics) -> list[str]:
        return []

    def unmet(self, best: Rank) -> str:
        conditions = ", ".join(f"{condition.metric} {condition}" for condition in self.conditions)
        return (
            f"no candidate meets the conditions ({conditions}), so the nearest was taken; try others, or a finer grid"
        )


def make_rule(
    score: str | None, keep: float, maximise: str | None, minimise: str | None, subject_to: Mapping[str, str]
) -> Rule:
    """The rule of a recipe's `select`: the metric to be highest or lowest, else the score, by default exposure.

    Raises UsageError for an unknown score and for what is no condition.
    """
    if metric := maximise or minimise:
        conditions = tuple(Condition.parse(name, text) for name, text in subject_to.items())
        return Constrained(metric, maximise is not None, conditions)
    if score in (None, "exposure"):
        return Exposure(keep)
    if score not in (scores := paper_scores()):
        choices = ("exposure", *scores)
        raise UsageError(f"no score '{score}'{nearest(score, choices)}; choose from {', '.join(choices)}")
    return PaperScore(score)


def check_rule(rule: Rule, available: Collection[str], where: str) -> None:
    """Raise UsageError where a rule needs metrics that are not `available`, with what there is.

    where: what makes the metrics, to open the message with ("benchmark qa").
    """
    lacking = [f"{name}{nearest(name, available)}" for name in rule.needs() if name not in available]
    if lacking:
        raise UsageError(
            join_faults(f"{where}: it does not give what is chosen by ({rule.name}):", lacking)
            + f"\n  there are {', '.join(available)}"
        )


def broken(metrics: Metrics, reference: Metrics, vital: Collection[str] = ()) -> str | None:
    """Return why a candidate is unusable (it has lost everything that is to be kept), or None.

    Its `utility` is 0.00, or a metric of the benchmark (`Benchmark.vital`) is 0 where the target's is not.
    """
    left = utility(metrics, reference)
    if round(left, 2) == 0:
        return f"{left:.2g} is left of the target's probability_r and rouge_l_r"
    for name in vital:
        if (known := reference.get(name)) and not metrics.get(name):
            return f"{name} is 0, the target's {known:.2g}"
    return None


def exposure(metrics: Metrics, reference: Metrics, prior: Metrics | None = None) -> float:
    """How much of what the target knows of the forget set can still be drawn out, in [0, 1]; lower is better.

    The mean over ROUGE-L, accuracy and extraction strength (over extraction strength and exact memorization where no
    questions were asked) of (m − h) / (t − h), clipped to [0, 1], where m is the candidate's value on the forget set,
    t the target's, and h the level of a model that never saw these rows: the target's value on the holdout set, or
    the `prior`'s on the forget set, whichever is higher (0 without either). Going below h counts for nothing, since
    unseen data is what forgotten data should look like.
    """
    asked = any(reference.get(name) is not None for name in ("rouge_l_f", "accuracy_f"))
    names = ("rouge_l", "accuracy") if asked else ("exact_memorization",)
    shares = []
    for name in (*names, "extraction_strength"):
        key = name if name in reference else f"{name}_f"
        known = reference.get(key) or 0.0
        unseen = max(reference.get(f"{name}_h") or 0.0, (prior or {}).get(key) or 0.0)
        if known > unseen:
            shares.append(min(1.0, max(0.0, ((metrics.get(key) or 0.0) - unseen) / (known - unseen))))
    return sum(shares) / len(shares) if shares else 0.0
