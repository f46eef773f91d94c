"""Compute the ratios of the MSA paper's tables by its rule, and find the best values of a column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """A value's ratio to the reference of its column."""

    value: float
    """1 = as good as the reference."""
    reached: bool = False
    """True where the ideal's value is reached, which is printed +100%."""

    def __str__(self) -> str:
        return "+100%" if self.reached else f"{100 * self.value:.1f}%"


def ratios(values: Sequence[float | None], ideal: float | None, higher_is_better: bool | None) -> list[Ratio | None]:
    """Return the ratios of the methods' values of one metric to the ideal's, or to the best of them; one ratio a value.

    The rule stands in the captions of the MSA paper's tables:

    1. A value that matches or exceeds the ideal's in the metric's direction is +100% (`reached`, 1.0).
    2. Otherwise, where some method reaches the ideal, the reference is the ideal; where none does, the best method.
    3. The ratio is value / reference where higher is better, reference / value where lower is, within 0…1.

    The paper leaves some cases open. Without an ideal the reference is the best method. Missing values have no ratio
    and are no reference. A negative value or reference has no ratio, nor has a division by zero (a best method at 0
    that does not reach the ideal): the quotient would mean nothing. A metric without a direction has no ratios.
    """
    known = [value for value in values if value is not None]
    if higher_is_better is None or not known:
        return [None] * len(values)
    best = max(known) if higher_is_better else min(known)
    reference = ideal if ideal is not None and _reaches(best, ideal, higher_is_better) else best

    def ratio(value: float | None) -> Ratio | None:
        if value is None:
            return None
        if ideal is not None and _reaches(value, ideal, higher_is_better):
            return Ratio(1.0, reached=True)
        part, whole = (value, reference) if higher_is_better else (reference, value)
        return Ratio(part / whole) if part >= 0 and whole > 0 else None

    return [ratio(value) for value in values]


def _reaches(value: float, ideal: float, higher_is_better: bool) -> bool:
    return value >= ideal if higher_is_better else value <= ideal


def best_values(values: Sequence[float | None], higher_is_better: bool | None, at_zero: bool = False) -> list[bool]:
    """Mark the best values, all of those that tie. Without a direction no value is the best.

    at_zero: the value nearest to 0, from either side, is the best.
    """
    known = [value for value in values if value is not None]
    if not known or (higher_is_better is None and not at_zero):
        return [False] * len(values)
    if at_zero:
        nearest = min(map(abs, known))
        return [value is not None and abs(value) == nearest for value in values]
    best = max(known) if higher_is_better else min(known)
    return [value == best for value in values]
