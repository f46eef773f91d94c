"""Rank candidates (strengths of vectors, epochs of a baseline) by a rule; the highest rank is chosen.

A rule ranks the scores of one candidate beside the target's. Rules are pure functions: nothing here runs a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import harmonic_mean
from typing import Any, Literal, TypeVar

from msa_lite.catalogue import paper_scores
from msa_lite.errors import DataError, UsageError, join_faults, nearest
from msa_lite.evals.verdict.outcome import Standing
from msa_lite.report.run.choice import EXTRACTION, LEAVES_OUT
from msa_lite.report.tables.metrics import metric_kind
from msa_lite.report.verdict.verdict import MARGINS, is_forgotten
from msa_lite.settings import Margins

Metrics = Mapping[str, float | None]
"""Values of metrics by name; None where a metric cannot be given."""
_Key = TypeVar("_Key")
Aim = Literal["stronger", "gentler", "enough", "neither"]
_NOT_SHOWN = "its bounds reach beyond the margins of a PASS"
LOWEST = 1e-6  # the smallest factor of a paper's score, so that the other factors still order candidates with a zero


@dataclass(frozen=True, order=True)
class Rank:
    """The rank of a candidate; the highest is chosen, and of equals the gentlest."""

    met: bool
    """True if it meets the conditions of the rule; such a candidate is above all others."""
    value: float
    """The score that orders candidates alike in `met`; higher is better."""
    kept: float = 1.0
    """The tie-break: the share of the retain set that is kept."""
    aim: Aim | None = field(default=None, compare=False)
    """The direction of a better candidate: stronger, to forget more; gentler, to lose less; enough: it does both;
    neither: it does not forget and loses too much, so there is none. None if the rule cannot tell."""
    note: str | None = field(default=None, compare=False)
    """The conditions that it does not meet, and by how much."""


def highest_rank(ranks: Mapping[_Key, Rank | str], gentleness: Callable[[_Key], Any] = lambda key: 0) -> _Key | None:
    """Return the key of the highest rank, of equals the gentlest, then the first; None where all are broken.

    gentleness: returns what is larger for the gentler of two candidates.
    """
    whole = {key: rank for key, rank in ranks.items() if isinstance(rank, Rank)}
    return max(whole, key=lambda key: (whole[key], gentleness(key)), default=None)


@dataclass(frozen=True)
class LeastExtraction:
    """Stay inside the control's bounds and keep most; where no candidate does, be the nearest.

    A candidate meets the rule on three conditions. It recites and knows no more of the forget set than a model may that
    never saw it (`Standing.inside`). This is shown as a PASS wants it (`is_forgotten`). It keeps enough of the retain
    set. Its value is then what it keeps, in [0, 1]. All others rank by their distance, with the value −distance in
    [−1, 0]. The distance is a mean: of the forget scores to the control's, and of the retain scores to the target's
    own. The rule needs neither a published benchmark nor an ideal.
    """

    keep: float
    """The share that has to stay of what the target knows of the retain set."""
    margins: Margins = MARGINS
    """The margins of a PASS."""
    name = EXTRACTION
    needs = ("extraction_strength",)
    needs_ideal = judged = False

    def rank(self, metrics: Metrics, target: Metrics, standing: Standing | None = None) -> Rank:
        """Rank a candidate by its place beside control and target, by the records of all on the same rows.

        Raise DataError where there is none.
        """
        if standing is None:
            raise DataError(f"score {self.name}: there are no records of the forget set to compare by")
        lost, shown = standing.kept < self.keep - 1e-9, is_forgotten(standing.forgotten, self.margins)
        if standing.inside and shown and not lost:
            return Rank(True, round(standing.kept, 3), aim="enough")
        notes = list(standing.above) or ([] if shown else [_NOT_SHOWN])
        notes += [*([f"keeps {standing.kept:.0%}, {self.keep:.0%} wanted"] if lost else [])]
        notes.append(f"distance {standing.distance:.3f}")
        aim: Aim = "stronger" if not lost else "gentler" if standing.inside and shown else "neither"
        return Rank(False, -standing.distance, standing.kept, aim, "; ".join(notes))

    def describe(self) -> Any:
        """Return what a manifest records, JSON-able."""
        margins = {"recited": self.margins.recited, "left": self.margins.left}
        return {"score": self.name, "keep": self.keep, "inside": "bounds of the control", **margins, "else": "parity"}

    def notes(self, target: Metrics, unjudged: str = "") -> list[str]:
        """Return nothing: no term is left out."""
        return []

    def unmet(self, best: Rank) -> str:
        """Say what was chosen, and why, if no candidate meets the conditions."""
        return (
            f"no candidate is shown to forget like a model that never saw the rows and to keep {self.keep:.0%} of the "
            f"rest, so the nearest was chosen: {best.note}"
        )


@dataclass(frozen=True)
class PaperScore:
    """Rank by a validation score of the MSA paper, one of `benchmarks.paper_scores`; see `paper_score`.

    A term that the target has no value for, such as the judge's three without a judge, is left out for every candidate,
    with its weight. If a single candidate has no value for a term, its factor is the lowest.
    """

    score: str

    @property
    def name(self) -> str:
        return self.score

    @property
    def weights(self) -> Mapping[str, int]:
        """Return the weight of each metric: of the factor m where positive, of 1 − m where negative."""
        return paper_scores()[self.score]

    def rank(self, metrics: Metrics, target: Metrics, standing: Standing | None = None) -> Rank:
        """Rank a candidate by its metrics beside the target's. Raise DataError where the target has none of them."""
        weights = {name: weight for name, weight in self.weights.items() if target.get(name) is not None}
        if not weights:
            raise DataError(f"score {self.name}: the target has none of {', '.join(self.weights)}")
        return Rank(True, paper_score(metrics, weights, printed=self.score.endswith("-printed")))

    @property
    def needs(self) -> tuple[str, ...]:
        """Return the metrics without which candidates cannot be ranked."""
        return tuple(name for name in self.weights if not _needs_judge(name))

    @property
    def needs_ideal(self) -> bool:
        """Check whether candidates can only be ranked beside the ideal."""
        return any(metric_kind(name).needs_ideal for name in self.needs)

    @property
    def judged(self) -> bool:
        """Check whether a judge has a part in one of its terms."""
        return any(metric_kind(name).judge for name in self.weights)

    def describe(self) -> Any:
        """Return what a manifest records, JSON-able."""
        return {"score": self.score, "weights": dict(self.weights)}

    def notes(self, target: Metrics, unjudged: str = "") -> list[str]:
        """Say which terms do not count beside this target. unjudged: why there are no judged ones."""
        missing = [name for name in self.weights if target.get(name) is None]
        groups = {
            unjudged or "no judge compares with an ideal model": [name for name in missing if _needs_judge(name)],
            "the target has no value for it": [name for name in missing if not _needs_judge(name)],
        }
        return [self.left_out(names, why) for why, names in groups.items() if names]

    def left_out(self, names: Sequence[str], why: str) -> str:
        """Say that terms do not count in the score, and how much of it they are."""
        total = sum(map(abs, self.weights.values()))
        lost = sum(abs(self.weights[name]) for name in names)
        return (
            f"{LEAVES_OUT} {', '.join(names)} ({len(names)} of the {len(self.weights)} terms of the paper's score, "
            f"{lost} of its {total} weights): {why}"
        )

    @property
    def judged_terms(self) -> tuple[str, ...]:
        """Return the terms that only a judge has a value for."""
        return tuple(filter(_needs_judge, self.weights))


Rule = LeastExtraction | PaperScore


def _needs_judge(name: str) -> bool:
    return metric_kind(name).judge == "required"


def paper_score(metrics: Metrics, weights: Mapping[str, int], printed: bool = False) -> float:
    """Return (Π f^|w|)^(1/Σ|w|), in (0, 1], higher is better: f = m for a positive weight w, 1 − m for a negative one.

    Every factor is kept within [1e-6, 1]; a metric that is None counts as 1e-6. The paper (§Experiments) calls this a
    geometric mean but prints exp(Π / 8), 8 being the sum of the weights; that is `printed`, in (1, e^⅛], and orders
    alike. For MUSE it also prints (1 − KnowMem_r)², against its own words that this term preserves knowledge of the
    retain set. As in the paper, an AUC (min_k, min_k_pp) below the ideal's counts as a gain, though it is
    over-unlearning; muse-gap has 1 − |AUC − AUC of the ideal| instead. RESTOR's score is plain accuracy.
    """
    logs = 0.0
    for name, weight in weights.items():
        value = metrics.get(name)
        factor = LOWEST if value is None else value if weight > 0 else 1.0 - value
        logs += abs(weight) * math.log(min(1.0, max(LOWEST, factor)))
    return math.exp(math.exp(logs) / 8) if printed else math.exp(logs / sum(map(abs, weights.values())))


def make_rule(score: str | None, keep: float, margins: Margins = MARGINS) -> Rule:
    """Make the rule of a recipe's `select`, by default extraction. Raise UsageError for an unknown score."""
    if score in (None, LeastExtraction.name):
        return LeastExtraction(keep, margins)
    if score not in (scores := paper_scores()):
        choices = (LeastExtraction.name, *scores)
        raise UsageError(f"no score '{score}'{nearest(score, choices)}; choose from {', '.join(choices)}")
    return PaperScore(score)


def check_rule(rule: Rule, available: Collection[str], where: str) -> None:
    """Raise UsageError if a rule needs metrics that are not `available`.

    where: what measures the metrics, to open the message with ("benchmark qa").
    """
    lacking = [f"{name}{nearest(name, available)}" for name in rule.needs if name not in available]
    if lacking:
        raise UsageError(
            join_faults(f"{where}: does not measure what the choice needs ({rule.name}):", lacking)
            + f"\n  there are {', '.join(available)}"
        )


def why_broken(metrics: Metrics, target: Metrics, vital: Collection[str] = ()) -> str | None:
    """Return why a candidate is unusable (it lost all retain performance), or None.

    It is unusable if it keeps nothing of the target's probability and ROUGE-L on the retain set: the harmonic mean of
    the two shares rounds to 0.00. It is also unusable if a metric that the benchmark calls `vital` is 0 and the
    target's is not.
    """
    known = {name: value for name in ("probability_r", "rouge_l_r") if (value := target.get(name))}
    shares = [(metrics.get(name) or 0.0) / value for name, value in known.items()]
    left = harmonic_mean(shares) if shares else 1.0
    if round(left, 2) == 0:
        return f"{left:.2g} is left of the target's probability_r and rouge_l_r"
    for name in vital:
        if (value := target.get(name)) and not metrics.get(name):
            return f"{name} is 0, the target's {value:.2g}"
    return None
