"""Search for α, β and λ of the filter point by point: bracket the right strength, then look closer.

The next points follow from the ranks so far and nothing else, so a stopped search goes on where it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msa_lite.choose.rules import Rank, highest_rank
from msa_lite.strengths import Strengths, rounded

Scored = Mapping[Strengths, Rank | str]
"""Ranks of points, or the reasons why they are broken."""
Ladder = Mapping[float, Rank | str]
"""Those of one column, by α."""

START_ALPHA = 1.0
LARGEST, SMALLEST = 8.0, 1 / 16  # alphas
SHARES = (0.0, 0.5, 1.0)  # of alpha, tried as beta
_FILTERS_AT_FIRST = 3  # λ; the next is tried where the last of these is best
# The largest ratio of neighbours between which nothing is tried: at first; at a boundary, of what a point may recite or
# lose, where scores are steep; and elsewhere.
_FIRST, _FINE, _COARSE = 2.0, 1.03, 1.25


def gentleness(point: Strengths) -> tuple[float, float, float]:
    """Return a key that is larger for the gentler of two points: less α, then less β, then less of the filter.

    Filtered vectors are in equal units: with a larger λ the same α changes forget rows as much, and weights more.
    """
    return -point.alpha, -point.beta, -point.filter


def best_point(scored: Scored) -> Strengths | None:
    """Return the point of the highest rank, of equals the gentlest; None where all are broken."""
    return highest_rank(scored, gentleness)


@dataclass(frozen=True)
class StrengthSearch:
    """A search over α, and over its columns: the values of β (0, α/2, α) and of λ.

    1. In the middle column α starts at 1. It is doubled while a point knows more of the forget set than the control,
       and halved while too much of the retain set is lost. A rule that only orders points is climbed.
    2. The other columns are tried at the best of these α, a λ only beside the best one, and the search goes on in the
       best column.
    3. The middle (by ratios) of two neighbours is tried, until neighbours are near.
    4. Where no point meets the rule, the neighbours of the nearest in its column are tried.

    A step is left out if none of its points can win. In a column, more α never forgets less and never keeps more. So
    what meets the rule lies above all points that know too much, and keeps no more than the last of these: where that
    does not exceed the best point's value, three digits each, only gentler equals are left, and of these no more than
    25 % is looked for. A best point that keeps all cannot be beaten at all. And no point of a column meets the rule if
    one of it knows too much and has lost too much already. Of columns nothing of the kind is sure: one that is worse at
    the same α, and does not know too much there, is not tried further, though it could win at another α.
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
        """Return the largest number of points that are tried."""
        if self.alphas is not None:
            return len(self._listed(self.alphas)) + 2
        return 6 + 2 * self._count_at_first

    def next_points(self, scored: Scored) -> list[Strengths]:
        """Return the points to score next, given the ranks of all before; none where the search has ended."""
        if self.alphas is not None:
            return self._more_betas(scored) if scored else self._listed(self.alphas)
        for points in self._steps(scored):
            if new := [*dict.fromkeys(point for point in points if point not in scored)]:
                return new[: max(0, self.most - len(scored))]
        return []

    def _steps(self, scored: Scored) -> Iterator[list[Strengths]]:
        """Yield the points of each step, tried or not. A step follows where the ones before have none left."""
        count = len(self._columns(START_ALPHA))
        ladders = [{p.alpha: rank for p, rank in scored.items() if self._column(p) == c} for c in range(count)]
        middle = self._count_at_first // 2
        lead = ladders[middle]
        yield self._at(middle, _bracketed(lead, _FIRST) if lead else [START_ALPHA])
        best = best_point(scored)
        rank = scored[best] if best else None
        own = self._column(best) if best else middle
        if _can_win(1.0, rank):
            columns = self._columns(best.alpha if best else min(lead))
            place = self.filters.index(columns[own].filter)
            beside = self.filters[max(0, place - 1) : place + 2]
            untried = (point for point, ladder in zip(columns, ladders, strict=True) if not ladder)
            yield [point for point in untried if point.filter in beside]
        if best is None or not isinstance(rank, Rank):
            return
        for column in sorted((c for c in range(count) if ladders[c]), key=lambda column: column != own):
            most = _most_kept(ladders[column])
            if column == own or not rank.met or (most is not None and _can_win(most, rank)):
                is_steep = column == own and (most is None or _can_win(most, rank))
                yield self._at(column, _bracketed(ladders[column], _FINE if is_steep else _COARSE))
        if not rank.met:
            yield self._at(own, _climbed(ladders[own], best.alpha, _COARSE))

    @property
    def _count_at_first(self) -> int:
        """Return the number of columns of the first λ. The search begins in the middle one."""
        return min(_FILTERS_AT_FIRST, len(self.filters)) * len(SHARES if self.betas is None else self.betas)

    def _columns(self, alpha: float) -> list[Strengths]:
        """Return the point of each column at an α: of each β and λ."""
        betas = [rounded(share * alpha) for share in SHARES] if self.betas is None else self.betas
        return [Strengths(alpha, beta, strength) for strength in self.filters for beta in betas]

    def _column_points(self, alpha: float) -> list[Strengths]:
        return [*dict.fromkeys(self._columns(alpha))]

    def _at(self, column: int, alphas: Sequence[float]) -> list[Strengths]:
        return [self._columns(alpha)[column] for alpha in alphas]

    def _column(self, point: Strengths) -> int:
        return self._columns(point.alpha).index(point)

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


def _bracketed(ladder: Ladder, near: float) -> list[float]:
    """Return the α of a column to try next; none once the gentlest that does not know too much is known to a ratio.

    A rule that only orders points is climbed.
    """
    tried = sorted(ladder)
    best = highest_rank(ladder, lambda alpha: -alpha)
    rank = ladder[best] if best is not None else None
    if best is not None and isinstance(rank, Rank) and rank.aim is None:
        return _climbed(ladder, best, max(near, _COARSE))
    high = next((alpha for alpha in tried if not _is_weak(ladder[alpha])), None)
    if high is None:
        return _larger(tried[-1])
    if isinstance(end := ladder[high], Rank) and end.aim == "neither":
        return []
    weak = [alpha for alpha in tried if alpha < high]
    return _between(weak[-1], high, near) if weak else _smaller(high)


def _climbed(ladder: Ladder, best: float, near: float) -> list[float]:
    """Return the next α around the best one of a column: beyond its ends, else on the side of the better neighbour."""
    lower, upper = ([alpha for alpha in sorted(ladder) if side * alpha > side * best] for side in (-1, 1))
    step = max(near, math.sqrt(2))
    if ends := ([] if lower else _smaller(best, step)) + ([] if upper else _larger(best, step)):
        return ends
    neighbours = [*lower[-1:], *upper[:1]]
    better = highest_rank({alpha: ladder[alpha] for alpha in neighbours})
    sides = sorted(neighbours, key=lambda alpha: alpha != better)
    middles = (_between(min(alpha, best), max(alpha, best), near) for alpha in sides)
    return next((middle for middle in middles if middle), [])


def _most_kept(ladder: Ladder) -> float | None:
    """Return the share that a point of a column can keep at most if it meets the rule, None where nothing is known."""
    weak = [rank.kept for rank in ladder.values() if isinstance(rank, Rank) and _is_weak(rank)]
    return min(weak, default=None)


def _can_win(kept: float, best: Rank | str | None) -> bool:
    """Check whether a point that meets the rule and keeps such a share would rank above the best so far."""
    return not (isinstance(best, Rank) and best.met and best.aim) or round(kept, 3) > best.value


def _is_weak(rank: Rank | str) -> bool:
    return isinstance(rank, Rank) and rank.aim == "stronger"


def _smaller(alpha: float, step: float = 2.0) -> list[float]:
    return [max(float(f"{alpha / step:.2g}"), SMALLEST)] if alpha > SMALLEST else []


def _larger(alpha: float, step: float = 2.0) -> list[float]:
    return [min(float(f"{alpha * step:.2g}"), LARGEST)] if alpha < LARGEST else []


def _between(low: float, high: float, near: float) -> list[float]:
    """Return the geometric mean in as few digits as tell it from both, two or three, unless the two are near."""
    middles = [float(f"{math.sqrt(low * high):.{digits}g}") for digits in (2, 3)]
    middle = next((middle for middle in middles if low < middle < high), None)
    return [middle] if middle is not None and high / low > near else []
