"""Refine a grid of strengths around the best point."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

from msa_lite.choose.candidates import Values
from msa_lite.report.choosing import candidate_name
from msa_lite.strengths import rounded


def refined(tried: Sequence[Values], best: Values) -> list[Values]:
    """Return the points half-way between the best and its neighbours in every direction, without those tried.

    Along an axis with several values these are best − (best − next below) / 2, best itself and best + (next above −
    best) / 2, never below 0. At an end of the axis they lie half a step beyond it. Two axes give at most eight points.
    """
    axes = {}
    for key, value in best.items():
        values = sorted({float(point[key]) for point in tried})
        at = values.index(float(value))
        steps = [high - low for low, high in pairwise(values)]
        if not steps:
            axes[key] = [float(value)]
            continue
        below, above = steps[max(0, at - 1)], steps[min(at, len(steps) - 1)]
        around = (rounded(values[at] - below / 2), values[at], rounded(values[at] + above / 2))
        axes[key] = [number for number in around if number >= 0]
    points = [dict(zip(axes, numbers, strict=True)) for numbers in product(*axes.values())]
    known = {candidate_name(point) for point in tried}  # of equal names are those that differ in the last digits alone
    return [point for name, point in {candidate_name(point): point for point in points}.items() if name not in known]
