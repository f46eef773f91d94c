"""What a rule may look at besides the metrics of a candidate: the prior's level, and the scores row by row.

A metric of 16 rows is a rough thing: two answers more or less are an eighth of it. Rows that both models were asked
tell how rough, since each is held against itself.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msa_lite.evals.benchmark import Benchmark, Record
from msa_lite.evals.records import read_records
from msa_lite.evals.scoring import standard_error

Metrics = Mapping[str, float | None]
"""Values of metrics by name; None where a metric cannot be given."""
Pairs = Mapping[str, Sequence[tuple[float, float]]]
"""(the candidate's score, the target's) of every row, by metric."""

CONFIDENCE = 0.95  # of the one-sided interval beyond which a difference is no noise


@dataclass(frozen=True)
class Evidence:
    """Evidence beside the metrics of a candidate."""

    prior: Metrics = field(default_factory=dict)
    """The prior's scores on the forget rows, which it never saw; empty where it was not scored."""
    pairs: Pairs = field(default_factory=dict)
    """Scores row by row, of the metrics that are means of rows."""


def read_pairs(benchmark: type[Benchmark], folder: Path, reference: Path, metrics: Metrics) -> Pairs:
    """Return the scores that a candidate and the target (`reference`) have on the same rows, from their records.

    metrics: the target's. Left out is what is no plain mean of the rows' scores, and sets that one of the two lacks.
    """
    pairs: dict[str, Sequence[tuple[float, float]]] = {}
    for path in sorted(reference.glob("*.jsonl")):
        if not (folder / path.name).is_file():
            continue
        known = {record["index"]: record for record in read_records(path)}
        own = {record["index"]: record for record in read_records(folder / path.name)}
        shared = [index for index in known if index in own]
        for key in {key for record in known.values() for key in record}:
            scores = [(_score(own[index], key), _score(known[index], key)) for index in shared]
            found = [(one, other) for one, other in scores if one is not None and other is not None]
            for name in benchmark.mean_names(path.stem, key):
                if found and _is_mean(metrics.get(name), [other for _, other in found]):
                    pairs[name] = found
    return pairs


def _score(record: Record, key: str) -> float | None:
    value = record.get(key)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _is_mean(value: float | None, scores: Sequence[float]) -> bool:
    return value is not None and math.isclose(value, statistics.fmean(scores), rel_tol=1e-6, abs_tol=1e-9)


def surely_misses(pairs: Sequence[tuple[float, float]], factor: float, at_least: bool) -> bool:
    """Check whether rows say, beyond their noise, that a candidate is below (above) `factor` times the target.

    The differences m − factor · t of the rows are taken as drawn at random: the candidate misses where the one-sided
    95 % interval of their mean (Student's t) lies beyond 0. A single row says nothing.
    """
    if len(pairs) < 2:
        return False
    from scipy.special import stdtrit  # loads in a fraction of the time of scipy.stats

    sign = 1.0 if at_least else -1.0
    differences = [sign * (own - factor * other) for own, other in pairs]
    margin = float(stdtrit(len(differences) - 1, CONFIDENCE)) * (standard_error(differences) or 0.0)
    return statistics.fmean(differences) + margin < -1e-9
