"""Points around the best: which are tried next, by hand and as properties of any grid."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msa_lite.choose.candidates import Values, refined
from msa_lite.report.choice import candidate_name


def points(alphas: list[float], betas: list[float]) -> list[Values]:
    return [{"alpha": alpha, "beta": beta} for alpha, beta in product(alphas, betas)]


def pairs(found: list[Values]) -> list[tuple[Any, ...]]:
    return [tuple(point.values()) for point in found]


@pytest.mark.parametrize(
    ("alphas", "betas", "best", "wanted"),
    [
        # Inside both axes: 1 − (1 − 0.5)/2, 1, 1 + (2 − 1)/2 by 1 − 1/2, 1, 1 + (4 − 1)/2, without (1, 1) itself.
        (
            [0.5, 1, 2],
            [0, 1, 4],
            (1, 1),
            [(0.75, 0.5), (0.75, 1), (0.75, 2.5), (1, 0.5), (1, 2.5), (1.5, 0.5), (1.5, 1), (1.5, 2.5)],
        ),
        # At the end of an axis half its last step beyond: 2 + (2 − 1)/2; at 0 there is nothing below.
        ([1, 2], [0, 1], (2, 0), [(1.5, 0), (1.5, 0.5), (2, 0.5), (2.5, 0), (2.5, 0.5)]),
        # Half a step below the smallest, 0.5 − (1 − 0.5)/2, where that is not negative: 0.5 − (2 − 0.5)/2 would be.
        ([0.5, 1], [0], (0.5, 0), [(0.25, 0), (0.75, 0)]),
        ([0.5, 2], [0], (0.5, 0), [(1.25, 0)]),
        # Just 0 is no negative number.
        ([0.5, 1.5], [1], (0.5, 1), [(0, 1), (1, 1)]),
        # An axis of one value stays; without any other value there is nothing to try.
        ([1], [0.5, 1], (1, 1), [(1, 0.75), (1, 1.25)]),
        ([1], [0.5], (1, 0.5), []),
        # Decimal fractions come out as a user would write them: 0.1 + 0.2 is 0.30000000000000004.
        ([0.1, 0.3, 0.5], [0], (0.3, 0), [(0.2, 0), (0.4, 0)]),
        ([0.7, 0.8], [0], (0.8, 0), [(0.75, 0), (0.85, 0)]),
        # The order in which they were tried says nothing.
        ([2, 0.5, 1], [0], (1, 0), [(0.75, 0), (1.5, 0)]),
    ],
)
def test_half_way_to_the_neighbours(
    alphas: list[float], betas: list[float], best: tuple[float, float], wanted: list[tuple[float, float]]
) -> None:
    found = refined(points(alphas, betas), {"alpha": best[0], "beta": best[1]})
    assert pairs(found) == wanted


def test_a_second_refinement_goes_half_as_far() -> None:
    tried = points([0.5, 1, 1.5], [0])
    tried += refined(tried, {"alpha": 1, "beta": 0})  # 0.75 and 1.25
    tried += refined(tried, {"alpha": 1.25, "beta": 0})
    assert pairs(tried[5:]) == [(1.125, 0), (1.375, 0)]
    # Where the best is the same as before, its new neighbours are nearer.
    assert pairs(refined(tried, {"alpha": 1.25, "beta": 0})) == [(1.1875, 0), (1.3125, 0)]


strengths = st.one_of(
    st.floats(0, 10, allow_nan=False), st.fractions(0, 3, max_denominator=9).map(float), st.integers(0, 3).map(float)
)
axis = st.lists(strengths.map(abs), min_size=1, max_size=5, unique_by=lambda value: format(value, ".12g"))


@settings(max_examples=50)
@given(axis, axis, st.data())
def test_no_point_is_negative_or_tried_twice_and_there_are_at_most_eight(
    alphas: list[float], betas: list[float], data: st.DataObject
) -> None:
    tried = points(alphas, betas)
    for _ in range(3):
        new = refined(tried, data.draw(st.sampled_from(tried)))
        assert len(new) <= 8
        assert all(value >= 0 for point in new for value in point.values())
        tried = [*tried, *new]
        assert len({candidate_name(point) for point in tried}) == len(tried)
