"""Gather evidence for a rule: metrics and scores row by row; say why a candidate is unusable."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import harmonic_mean

from msa_lite.evals.benchmark import Benchmark, Record
from msa_lite.evals.bounds import CONFIDENCE
from msa_lite.evals.outcome import Standing
from msa_lite.evals.records import read_records
from msa_lite.evals.scoring import standard_error

Metrics = Mapping[str, float | None]
"""Values of metrics by name; None where a metric cannot be given."""
Pairs = Mapping[str, Sequence[tuple[float, float]]]
"""(the candidate's score, the target's) of every row, by metric."""

FAR = 0.10  # a metric that falls short of a condition by more than this misses it, however noisy the rows


@dataclass(frozen=True)
class Evidence:
    """Evidence beside the metrics of a candidate and the target, all on the same rows."""

    ideal: Metrics | None = None
    """The ideal's scores; None without an ideal."""
    standing: Standing | None = None
    """The place beside control and target, by the records of all; None where a rule does not look at it."""
    pairs: Pairs = field(default_factory=dict)
    """Scores row by row, of the metrics that are means of rows."""


def read_pairs(benchmark: type[Benchmark], folder: Path, target_folder: Path, target: Metrics) -> Pairs:
    """Return the scores that a candidate and the target have on the same rows, from the records in their folders.

    target: the target's metrics. A metric that is no plain mean of its rows' scores is left out, and so is a set that
    one of the two models lacks.
    """
    pairs: dict[str, Sequence[tuple[float, float]]] = {}
    for path in sorted(target_folder.glob("*.jsonl")):
        if not (folder / path.name).is_file():
            continue
        before = {record["index"]: record for record in read_records(path)}
        after = {record["index"]: record for record in read_records(folder / path.name)}
        shared = [index for index in before if index in after]
        for key in {key for record in before.values() for key in record}:
            scores = [(_score(after[index], key), _score(before[index], key)) for index in shared]
            numbers = [(one, other) for one, other in scores if one is not None and other is not None]
            for name in benchmark.mean_names(path.stem, key):
                if numbers and _is_mean(target.get(name), [other for _, other in numbers]):
                    pairs[name] = numbers
    return pairs


def _score(record: Record, key: str) -> float | None:
    value = record.get(key)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _is_mean(value: float | None, scores: Sequence[float]) -> bool:
    return value is not None and math.isclose(value, statistics.fmean(scores), rel_tol=1e-6, abs_tol=1e-9)


def surely_misses(pairs: Sequence[tuple[float, float]], factor: float, at_least: bool) -> bool:
    """Check whether a candidate is below (above) `factor` times the target by more than the noise of the rows.

    The differences m − factor · t of the rows are treated as a random sample. The candidate misses if the one-sided
    95 % interval of their mean (Student's t) lies beyond 0. A single row tells nothing.
    """
    if len(pairs) < 2:
        return False
    from scipy.special import stdtrit  # loads in a fraction of the time of scipy.stats

    sign = 1.0 if at_least else -1.0
    differences = [sign * (own - factor * other) for own, other in pairs]
    margin = float(stdtrit(len(differences) - 1, CONFIDENCE)) * (standard_error(differences) or 0.0)
    return statistics.fmean(differences) + margin < -1e-9


def why_broken(metrics: Metrics, target: Metrics, vital: Collection[str] = ()) -> str | None:
    """Return why a candidate is unusable (it lost all retain performance), or None.

    Unusable means: the harmonic mean of its shares of the target's probability and ROUGE-L on the retain set rounds to
    0.00, or a metric that the benchmark calls `vital` is 0 and the target's is not.
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
