"""Bound what a sample of rows shows: shares, their differences, and means, with rows of one subject together.

All bounds are one-sided, at 95 %. Six questions about one person are not six independent rows: where records name their
`subject`, rows with the same one count together.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from msa_lite.report.verdict.figures import Bound

Record = dict[str, Any]
Records = Mapping[str, Sequence[Record]]
"""Records of each set by its name, in the order of the items."""
Models = Mapping[str, Records]
"""Records of "target" and "unlearned", of "ideal" where there is one, and of "prior" where it was scored."""

CONFIDENCE = 0.95  # one-sided
_Z = 1.6448536269514722  # its normal quantile
_Z95 = 1.959963984540054  # two-sided

RowUnit = tuple[str, Hashable]
"""An independent unit of rows: ("row", index), or ("subject", subject) with all its rows."""
Contributions = Mapping[Hashable, float]
"""What each independent unit adds to an estimate's deviation; the sum is 0."""


def unit_of_rows(records: Sequence[Record]) -> list[RowUnit]:
    """Return the independent unit that each row belongs to: its subject, or else the row itself.

    Rows about one single subject are units of their own, since nothing shows how subjects differ.
    """
    rows: list[RowUnit] = [("row", record.get("index", at)) for at, record in enumerate(records)]
    subjects = [record.get("subject") for record in records]
    if len({subject for subject in subjects if subject is not None}) < 2:
        return rows
    return [row if subject is None else ("subject", subject) for row, subject in zip(rows, subjects, strict=True)]


def count_subjects(records: Sequence[Record]) -> int | None:
    """Return the number of units of rows that name subjects; None where each row counts by itself."""
    units = set(unit_of_rows(records))
    return len(units) if any(kind == "subject" for kind, _ in units) else None


def effective_rows(values: Sequence[float], units: Sequence[Hashable]) -> float:
    """Return the number of independent rows that say as much as these, n / (1 + (m − 1) ρ), in [1, n].

    ρ is the intraclass correlation of the values by the analysis of variance, in [0, 1], and m the mean size of a unit
    as a row sees it, Σ size² / n: Kish's design effect (Survey Sampling, 1965, §5.4).
    """
    places = {unit: place for place, unit in enumerate(dict.fromkeys(units))}
    count, groups = len(values), len(places)
    if groups in (0, 1, count):
        return float(count)
    numbers, codes = np.asarray(values, np.float64), np.array([places[unit] for unit in units])
    sizes = np.bincount(codes)
    means = np.bincount(codes, numbers) / sizes
    within = float(((numbers - means[codes]) ** 2).sum()) / (count - groups)
    between = float((sizes * (means - numbers.mean()) ** 2).sum()) / (groups - 1)
    square = float((sizes**2).sum()) / count
    spread = between + ((count - square) / (groups - 1) - 1) * within
    rho = min(1.0, max(0.0, (between - within) / spread)) if spread > 0 else 0.0
    return count / (1 + (square - 1) * rho)


def difference_of_shares(own: tuple[float, float], control: tuple[float, float]) -> Bound:
    """Return the difference of two shares, with the bounds of Agresti and Caffo (The American Statistician, 2000).

    own, control: (share, independent rows) of each, the rows at least 1. Both get a success and a failure more.
    """
    (first, rows), (second, others) = own, control
    shares = [(share * count + 1) / (count + 2) for share, count in (own, control)]
    variance = sum(s * (1 - s) / (count + 2) for s, count in zip(shares, (rows, others), strict=True))
    centre, margin = shares[0] - shares[1], _Z * math.sqrt(variance)
    return Bound(first - second, max(-1.0, centre - margin), min(1.0, centre + margin))


def share_bound(share: float, rows: float) -> float:
    """Return the upper bound of a share of so many independent rows, by Wilson (JASA, 1927); 1 without rows."""
    return _wilson(share, rows, _Z)[1]


def share_interval(share: float, rows: float) -> tuple[float, float]:
    """Return the two-sided 95 % interval of a share of so many independent rows, by Wilson; (0, 1) without rows."""
    return _wilson(share, rows, _Z95)


def _wilson(share: float, rows: float, quantile: float) -> tuple[float, float]:
    if not rows:
        return 0.0, 1.0
    square = quantile * quantile / rows
    half = quantile * math.sqrt(share * (1 - share) / rows + square / (4 * rows))
    middle = share + square / 2
    return max(0.0, (middle - half) / (1 + square)), min(1.0, (middle + half) / (1 + square))


def add_up(units: Sequence[Hashable], deviations: np.ndarray) -> dict[Hashable, float]:
    """Return the sum of the deviations of each unit."""
    sums: dict[Hashable, float] = {}
    for unit, deviation in zip(units, deviations.tolist(), strict=True):
        sums[unit] = sums.get(unit, 0.0) + deviation
    return sums


def bounded(value: float, *samples: Contributions) -> Bound:
    """Return an estimate with its bounds by the delta method, units as clusters.

    samples: the contributions of each independent sample. A sample of k units has the variance k / (k − 1) Σ c²; the
    bounds are Student's t with Satterthwaite's degrees of freedom. A single unit bounds nothing: ± 1.
    """
    from scipy.special import stdtrit  # loads in a fraction of the time of scipy.stats

    variances = []
    for sample in samples:
        if len(sample) < 2:
            return Bound(value, value - 1.0, value + 1.0)
        variances.append((len(sample) / (len(sample) - 1) * math.fsum(c * c for c in sample.values()), len(sample) - 1))
    total = math.fsum(variance for variance, _ in variances)
    if total <= 0:
        return Bound(value, value, value)
    freedom = total**2 / math.fsum(variance**2 / degrees for variance, degrees in variances)
    margin = float(stdtrit(freedom, CONFIDENCE)) * math.sqrt(total)
    return Bound(value, value - margin, value + margin)
