"""Search for α and β (and λ of the filter) point by point: bracket the right strength, then look closer.

The next points follow from the ranks so far and nothing else, so a stopped search goes on where it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msa_lite.choose.rules import Rank, highest_rank
from msa_lite.strengths import Strengths, rounded

Scored = Mapping[Strengths, Rank | str]
"""Ranks of points, or the reasons why they are broken."""

START_ALPHA = 1.0
LARGEST, SMALLEST = 8.0, 1 / 16  # alphas
SHARES = (0.0, 0.5, 1.0)  # of alpha, tried as beta
# The largest ratio of neighbours between which nothing is tried: at a boundary, of what a point may recite or lose, and
# elsewhere; and at the end, with the points that are left. Scores are steep at a boundary, and the best point lies just
# beyond it.
_FINE, _COARSE, _LAST = 1.1, 1.25, 1.03


def gentleness(point: Strengths) -> tuple[float, float, float]:
    """Return a key that is larger for the gentler of two points: less α, then less β, then more of the filter."""
    return -point.alpha, -point.beta, point.filter


def best_point(scored: Scored) -> Strengths | None:
    """Return the point of the highest rank, of equals the gentlest; None where all are broken."""
    return highest_rank(scored, gentleness)


@dataclass(frozen=True)
class StrengthSearch:
    """A search over α, β or both.

    From α = 1, α is doubled while a point knows more of the forget set than the control, and halved while too much of
    the retain set is lost. Then the middle (by ratios) of two neighbours is tried, until neighbours are near. β is 0,
    α/2 or α. The search goes on with the best of these at α = 1, and tries the others again where it ends, as β may let
    a stronger α keep enough. A rule that only orders points is climbed.
    """

    alphas: tuple[float, ...] | None = None
    """The values to try; None: searched."""
    betas: tuple[float, ...] | None = None
    """The same for β; a single 0 without a retain set."""
    filters: tuple[float, ...] = (0.0,)
    """The strengths λ of the filter."""

    def describe(self) -> dict[str, Any]:
        """Return the settings that decide the points, for a manifest."""
        return {
            "alpha": "auto" if self.alphas is None else [*self.alphas],
            "beta": "auto" if self.betas is None else [*self.betas],
            **({"filter": [*self.filters]} if any(self.filters) else {}),
        }

    @property
    def most(self) -> int:
        """Return the largest number of points that are tried where α is searched."""
        return 6 + 2 * len(self._columns(START_ALPHA))

    def next_points(self, scored: Scored) -> list[Strengths]:
        """Return the points to score next, given the ranks of all before; none where the search has ended."""
        if self.alphas is not None:
            return self._more_betas(scored) if scored else self._listed(self.alphas)
        if not scored:
            return self._column_points(START_ALPHA)
        for points in (self._more(scored), self._gentler(scored), self._nearer(scored)):
            if new := [*dict.fromkeys(point for point in points if point not in scored)]:
                return new[: max(0, self.most - len(scored))]
        return []

    def _columns(self, alpha: float) -> list[Strengths]:
        """Return the point of each column at an α: of each β and λ."""
        betas = [rounded(share * alpha) for share in SHARES] if self.betas is None else self.betas
        return [Strengths(alpha, beta, strength) for strength in self.filters for beta in betas]

    def _column_points(self, alpha: float) -> list[Strengths]:
        return [*dict.fromkeys(self._columns(alpha))]

    def _listed(self, alphas: Sequence[float]) -> list[Strengths]:
        return [point for alpha in alphas for point in self._column_points(alpha)]

    def _more_betas(self, scored: Scored) -> list[Strengths]:
        """Look closer around the best β once, where the α are given."""
        best = best_point(scored)
        if best is None or len(scored) > len(self._listed(self.alphas or ())):
            return []
        near = [best.beta - best.alpha / 4, best.beta + best.alpha / 4]
        points = [Strengths(best.alpha, rounded(beta), best.filter) for beta in near if beta > 0]
        return [point for point in points if point not in scored]

    def _more(self, scored: Scored) -> list[Strengths]:
        best = _guide(scored)
        column = self._column(best) if best else len(self._columns(START_ALPHA)) // 2
        ladder = {point.alpha: rank for point, rank in scored.items() if self._column(point) == column}
        alphas, key = _steps(ladder, best.alpha if best else None)
        if alphas:
            return [self._columns(alpha)[column] for alpha in alphas]
        return self._column_points(key) if best else []

    def _gentler(self, scored: Scored) -> list[Strengths]:
        """Return a point between the best and the next one below that forgets too little: it may keep a little more."""
        best = best_point(scored)
        rank = scored[best] if best else None
        if best is None or not isinstance(rank, Rank) or rank.aim != "enough":
            return []
        column = self._column(best)
        weak = [point.alpha for point in scored if self._column(point) == column and point.alpha < best.alpha]
        return [self._columns(a)[column] for a in _between(max(weak), best.alpha, _LAST)] if weak else []

    def _nearer(self, scored: Scored) -> list[Strengths]:
        """Return points around the best where no point meets the rule, so that the nearest one is taken.

        Where its column is done, the other β of the same α may be nearer.
        """
        best = best_point(scored)
        rank = scored[best] if best else None
        if best is None or not isinstance(rank, Rank) or rank.met:
            return []
        column = self._column(best)
        tried = sorted(point.alpha for point in scored if self._column(point) == column)
        lower = [alpha for alpha in tried if alpha < best.alpha]
        down = _between(lower[-1], best.alpha, _COARSE) if lower and not _is_weak(rank) else []
        alphas = down + (_doubled(best.alpha) if best.alpha == tried[-1] else _further(best.alpha, tried))
        return [self._columns(alpha)[column] for alpha in alphas] or self._column_points(best.alpha)

    def _column(self, point: Strengths) -> int:
        return self._columns(point.alpha).index(point)


def _guide(scored: Scored) -> Strengths | None:
    """Return the point from which the search goes on; None where all are broken.

    It is the best one that meets the rule; else the best of those that keep enough, since a stronger α may forget what
    they know; else the best.
    """
    weak = {point: rank for point, rank in scored.items() if _is_weak(rank)}
    met = any(isinstance(rank, Rank) and rank.met for rank in scored.values())
    return best_point(scored if met or not weak else weak)


def _steps(ladder: Mapping[float, Rank | str], best: float | None) -> tuple[list[float], float]:
    """Return (the next α of a column, none where it is settled; the α at which other β may do better).

    ladder: ranks by α. best: the α of the best point, None where all are broken.
    """
    tried = sorted(ladder)
    rank = ladder[best] if best is not None else None
    if best is None or not isinstance(rank, Rank):
        return _halved(tried[0]), tried[0]
    if rank.aim == "gentler":
        weak = [alpha for alpha in tried if alpha < best and _is_weak(ladder[alpha])]
        return _between(weak[-1], best, _FINE) + _further(best, tried) if weak else _halved(tried[0]), best
    if rank.aim == "stronger":
        weak = [alpha for alpha in tried if alpha >= best and _is_weak(ladder[alpha])]
        above = [alpha for alpha in tried if alpha > best and not _is_weak(ladder[alpha])]
        if not above:
            return _doubled(tried[-1]), best
        if _is_hopeless(ladder[above[0]]):
            return [], above[0]
        low = max(alpha for alpha in weak if alpha < above[0])
        return _between(low, above[0], _FINE), above[0]
    lower = [alpha for alpha in tried if alpha < best]
    if rank.aim == "enough":
        return _between(lower[-1], best, _FINE) if lower else _halved(best), best
    down = _between(lower[-1], best, _COARSE) if lower else _halved(best)
    outward = ([] if lower else down) + (_doubled(best) if best == tried[-1] else [])
    return outward or down + _further(best, tried), best


def _further(best: float, tried: Sequence[float]) -> list[float]:
    """Return the middle between the best α and the next larger one that was tried."""
    upper = [alpha for alpha in tried if alpha > best]
    return _between(best, upper[0], _COARSE) if upper else []


def _is_weak(rank: Rank | str) -> bool:
    return isinstance(rank, Rank) and rank.aim == "stronger"


def _is_hopeless(rank: Rank | str) -> bool:
    """Check whether nothing gentler can meet the rule either: a point that knows too much, though it lost too much."""
    return isinstance(rank, Rank) and rank.aim == "neither"


def _halved(alpha: float) -> list[float]:
    return [max(alpha / 2, SMALLEST)] if alpha > SMALLEST else []


def _doubled(alpha: float) -> list[float]:
    return [min(alpha * 2, LARGEST)] if alpha < LARGEST else []


def _between(low: float, high: float, near: float) -> list[float]:
    """Return the geometric mean in as few digits as tell it from both, two or three, unless the two are near."""
    middles = [float(f"{math.sqrt(low * high):.{digits}g}") for digits in (2, 3)]
    middle = next((middle for middle in middles if low < middle < high), None)
    return [middle] if middle is not None and high / low > near else []
