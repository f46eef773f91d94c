"""Measure how near a model is to the ideal, and how sure a difference between two models is.

The measures and thresholds were fixed before a test row was seen; the page of results has them beside the answers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from collect import Point, Scores

FORGET = ("rouge_l_f", "probability_f", "extraction_strength", "accuracy_f")
"""Metrics on the forget set, in the order of `ROW_SCORES`."""
RETAIN = ("rouge_l_r", "probability_r", "extraction_strength_r", "accuracy_r")
"""The same on the retain set."""
MARGIN = 0.02
"""Two models whose distances differ by at most this much match."""
KEEP, LEAST = 0.9, 0.8
"""The share of the target's retain scores that a good model keeps, and the least that any may keep."""
HALF = 0.5
"""A method works if it halves the target's forget distance, and keeps `LEAST`."""
DRAWS = 2000
"""Bootstrap samples of the rows."""

MEASURES = {
    "distance": "distance ↓",
    "forget_distance": "forget distance ↓",
    "retain_distance": "retain distance ↓",
    "forget_side": "forget side → 0",
    "kept": "kept ↑",
    "model_utility": "utility (TOFU) ↑",
    "truth_ratio_f": "truth ratio (TOFU)",
    "forget_quality": "forget quality (TOFU) ↑",
}
"""Measures by name, with the heading of their columns."""


def measure(point: Point, name: str) -> float | None:
    """Return one of `MEASURES` of an unlearned model; None where a score that it needs is missing."""
    if name in ("model_utility", "truth_ratio_f", "forget_quality"):
        own = point.unlearned.values if point.unlearned else {}
        return point.tofu.get(name, own.get(name))
    if point.unlearned is None:
        return None
    if name == "kept":
        return _kept(point.unlearned, point.target) if point.target else None
    if name == "distance":
        parts = [measure(point, "forget_distance"), measure(point, "retain_distance")]
        return None if None in parts else statistics.fmean(parts)
    gaps = _gaps(point.unlearned, point.ideal, RETAIN if name == "retain_distance" else FORGET)
    if gaps is None:
        return None
    return statistics.fmean(gaps) if name == "forget_side" else statistics.fmean(map(abs, gaps))


def _kept(scores: Scores, target: Scores) -> float:
    """Return the mean share of the target's retain scores that is left, where a gain counts as 1, in [0, 1].

    Probability counts twice. This is the measure that was fixed before any score; the tool's own kept share, in its
    verdict, counts from the level of unseen rows and is stricter (`verdicts`).
    """
    weights = {"probability_r": 2, "rouge_l_r": 1, "accuracy_r": 1}
    shares = {name: (scores.values.get(name) or 0.0) / known for name in weights if (known := target.values.get(name))}
    total = sum(weights[name] for name in shares)
    return sum(weights[name] * min(1.0, share) for name, share in shares.items()) / total if total else 1.0


def reference(point: Point, model: str) -> Point:
    """Return the target or the ideal in the place of the unlearned model."""
    return Point(point.target if model == "target" else point.ideal, point.target, point.ideal)


def mean_score(scores: Scores | None, names: Sequence[str]) -> float | None:
    """Return the mean of some metrics of a model; None if one is missing."""
    values = [scores.values.get(name) for name in names] if scores else [None]
    return None if None in values else statistics.fmean(values)


def on_shared_rows(first: Point, second: Point) -> tuple[Point, Point]:
    """Return two points with scores over the rows that all of their models share; as they are without records."""
    models = [scores for point in (first, second) for scores in (point.unlearned, point.target, point.ideal) if scores]
    rows = {name: set.intersection(*({*of.rows.get(name, {})} for of in models)) for name in ("forget", "retain")}
    if not all(rows.values()):
        return first, second
    return _on_rows(first, rows), _on_rows(second, rows)


def _on_rows(point: Point, rows: Mapping[str, Iterable[str]]) -> Point:
    """Return a point whose models are scored over these rows of the two sets alone."""

    def limited(scores: Scores | None) -> Scores | None:
        if scores is None:
            return None
        chosen = {name: {row: scores.rows[name][row] for row in sorted(of)} for name, of in rows.items()}
        means = {}
        for name, metrics in (("forget", FORGET), ("retain", RETAIN)):
            columns = zip(*chosen[name].values(), strict=True)
            means |= {metric: statistics.fmean(column) for metric, column in zip(metrics, columns, strict=True)}
        return Scores({**scores.values, **means}, chosen)

    return replace(point, unlearned=limited(point.unlearned), target=limited(point.target), ideal=limited(point.ideal))


def works(point: Point) -> bool | None:
    """Check whether a method halves the target's forget distance and keeps enough; None if that cannot be told."""
    own, before = measure(point, "forget_distance"), measure(reference(point, "target"), "forget_distance")
    kept = measure(point, "kept")
    if own is None or before is None or kept is None:
        return None
    return own <= HALF * before and kept >= LEAST


def _gaps(scores: Scores | None, ideal: Scores | None, names: Sequence[str]) -> list[float] | None:
    """Return model − ideal for each metric; None if one is missing."""
    if scores is None or ideal is None:
        return None
    pairs = [(scores.values.get(name), ideal.values.get(name)) for name in names]
    return None if any(None in pair for pair in pairs) else [own - other for own, other in pairs]


@dataclass(frozen=True)
class Difference:
    """How much larger a measure is for one method than for another, paired by seed."""

    label: str
    by_seed: Mapping[int, float]
    low: float | None = None
    """The lower end of the 95 % interval; None where there is none."""
    high: float | None = None
    """The upper end."""
    source: str = ""
    """What the interval is over: "seeds" or "rows"."""

    @property
    def mean(self) -> float | None:
        """Return the mean over seeds; None without any."""
        return statistics.fmean(self.by_seed.values()) if self.by_seed else None

    @property
    def is_sure(self) -> bool:
        """Check whether the first is larger in every seed, and the interval excludes 0."""
        return bool(self.by_seed) and min(self.by_seed.values()) > 0 and self.low is not None and self.low > 0

    def turned(self) -> Difference:
        """Return the difference the other way round."""
        ends = (None, None) if self.low is None or self.high is None else (-self.high, -self.low)
        return Difference(self.label, {seed: -value for seed, value in self.by_seed.items()}, *ends, self.source)


def paired(label: str, first: Mapping[int, Point], second: Mapping[int, Point], name: str = "distance") -> Difference:
    """Return measure(first) − measure(second) with a 95 % interval.

    With two seeds or more it is the t-interval of the differences over seeds; with one, and for the measure distance,
    the bootstrap interval over that seed's rows.
    """
    differences = {}
    for seed in sorted(first.keys() & second.keys()):
        pair = measure(first[seed], name), measure(second[seed], name)
        if None not in pair:
            differences[seed] = pair[0] - pair[1]
    if len(differences) > 1:
        from scipy.special import stdtrit

        values = list(differences.values())
        half = float(stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / math.sqrt(len(values))
        centre = statistics.fmean(values)
        return Difference(label, differences, centre - half, centre + half, "seeds")
    if len(differences) == 1 and name == "distance":
        seed = next(iter(differences))
        if ends := _bootstrap(first[seed], second[seed], differences[seed]):
            return Difference(label, differences, *ends, "rows")
    return Difference(label, differences)


def _bootstrap(first: Point, second: Point, centre: float) -> tuple[float, float] | None:
    """Return the ends of the 95 % interval of the difference of distances, ± 1.96 times its error over resampled rows.

    Not percentiles: noise pushes every distance up, a small one most, so that they would not lie around the difference.
    """
    total = np.zeros(DRAWS)
    draw = np.random.default_rng(0)
    for name in ("forget", "retain"):
        models = (first.unlearned, first.ideal, second.unlearned, second.ideal)
        sets = [scores.rows.get(name, {}) if scores else {} for scores in models]
        shared = sorted(set.intersection(*(set(rows) for rows in sets)))
        if len(shared) < 2:
            return None
        one, its_ideal, other, other_ideal = (np.array([rows[row] for row in shared]) for rows in sets)
        shares = draw.multinomial(len(shared), [1 / len(shared)] * len(shared), size=DRAWS) / len(shared)
        far = [np.abs(shares @ (a - b)).mean(axis=1) for a, b in ((one, its_ideal), (other, other_ideal))]
        total += (far[0] - far[1]) / 2
    half = 1.96 * float(np.std(total, ddof=1))
    return centre - half, centre + half
