"""The bounds of shares, differences and means: against published figures, against hand-worked ones, and by property."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msa_lite.evals.verdict.bounds import (
    add_up,
    bounded,
    count_subjects,
    difference_of_shares,
    effective_rows,
    share_bound,
    unit_of_rows,
)


@pytest.mark.parametrize(("rows", "bound"), [(20, 0.103), (24, 0.088), (48, 0.046)])
def test_no_row_on_either_side_bounds_the_difference_by_the_rows(rows: int, bound: float) -> None:
    difference = difference_of_shares((0.0, rows), (0.0, rows))
    assert difference.value == 0
    assert (round(difference.low, 3), round(difference.high, 3)) == (-bound, bound)


def test_the_difference_is_that_of_agresti_and_caffo_by_hand() -> None:
    # 8 of 20 and 2 of 30: shares 9/22 and 3/32, variance 9/22·13/22/22 + 3/32·29/32/32, times 1.645
    difference = difference_of_shares((0.4, 20), (2 / 30, 30))
    half = 1.6449 * math.sqrt(9 / 22 * 13 / 22 / 22 + 3 / 32 * 29 / 32 / 32)
    assert difference.value == pytest.approx(0.4 - 2 / 30)
    middle = 9 / 22 - 3 / 32
    assert (difference.low, difference.high) == pytest.approx((middle - half, middle + half), rel=1e-4)


@given(st.integers(1, 60), st.integers(1, 60), st.data())
def test_a_difference_lies_within_its_bounds_and_turns_with_its_sides(rows: int, others: int, data: Any) -> None:
    first = data.draw(st.integers(0, rows)) / rows, float(rows)
    second = data.draw(st.integers(0, others)) / others, float(others)
    there, back = difference_of_shares(first, second), difference_of_shares(second, first)
    assert -1 <= there.low <= there.high <= 1
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low))


def test_the_upper_bound_of_a_share_is_wilsons() -> None:
    from scipy.stats import binomtest

    for hits, rows in ((0, 29), (1, 48), (7, 20), (20, 20)):
        wilson = binomtest(hits, rows, alternative="less").proportion_ci(0.95, "wilson").high
        assert share_bound(hits / rows, rows) == pytest.approx(wilson)
    assert share_bound(0.0, 0) == 1.0


def records(subjects: list[str | None]) -> list[dict[str, Any]]:
    return [
        {"index": at} if subject is None else {"index": at, "subject": subject} for at, subject in enumerate(subjects)
    ]


def test_rows_of_a_subject_are_one_unit_and_one_subject_alone_is_none() -> None:
    assert unit_of_rows(records([None, None])) == [("row", 0), ("row", 1)]
    assert unit_of_rows(records(["a", "a"])) == [("row", 0), ("row", 1)]
    of_three = [("subject", "a"), ("subject", "b"), ("subject", "a"), ("row", 3)]
    assert unit_of_rows(records(["a", "b", "a", None])) == of_three
    assert [count_subjects(records(names)) for names in ([None, None], ["a", "a"], ["a", "b", "a"])] == [None, None, 2]


def test_rows_that_are_alike_within_a_subject_count_as_one_and_others_as_many() -> None:
    units = [("subject", at // 6) for at in range(48)]
    alike = [float(at // 6 % 2) for at in range(48)]  # by subject, all or nothing
    assert effective_rows(alike, units) == pytest.approx(8, rel=1e-6)
    apart = [float(at % 2) for at in range(48)]  # within each subject as much as between them
    assert effective_rows(apart, units) == 48
    assert effective_rows([0.0] * 48, units) == 48  # nothing shows how alike they are
    assert effective_rows(alike, [("row", at) for at in range(48)]) == 48


def test_a_mean_of_independent_rows_has_students_bounds() -> None:
    from scipy.stats import t

    values = np.array([0.1, 0.4, 0.35, 0.8, 0.2])
    deviations = (values - values.mean()) / len(values)
    bound = bounded(float(values.mean()), add_up([("row", at) for at in range(5)], deviations))
    half = t.ppf(0.95, 4) * values.std(ddof=1) / math.sqrt(5)
    assert (bound.low, bound.high) == pytest.approx((values.mean() - half, values.mean() + half))
    one = bounded(0.5, {("row", 0): 0.0})
    assert (one.low, one.high) == (-0.5, 1.5)  # a single row bounds nothing


def test_rows_of_subjects_that_are_alike_widen_the_bounds() -> None:
    chance = random.Random(0)
    values = np.array([level + chance.gauss(0, 0.01) for level in (0.1, 0.9, 0.2, 0.8) for _ in range(6)])
    deviations = (values - values.mean()) / len(values)
    apart = bounded(0.5, add_up([("row", at) for at in range(24)], deviations))
    together = bounded(0.5, add_up([("subject", at // 6) for at in range(24)], deviations))
    assert together.high - together.low > 2 * (apart.high - apart.low)
    two = bounded(0.5, add_up([("row", at) for at in range(24)], deviations), {("a", 0): 0.1, ("a", 1): -0.1})
    assert two.high > apart.high  # another sample adds its own noise


def test_an_ideal_stays_below_the_margin_as_often_as_its_rows_allow() -> None:
    """Draws of two models that recite 3 % of unseen rows alike: the share of them that a margin of 10 points passes."""
    chance = random.Random(0)

    def passes(rows: int) -> float:
        draws = [[sum(chance.random() < 0.03 for _ in range(rows)) / rows for _ in range(2)] for _ in range(400)]
        return sum(difference_of_shares((own, rows), (other, rows)).high <= 0.1 for own, other in draws) / len(draws)

    assert passes(20) < 0.5  # 10.3 points without a single row on either side
    assert passes(40) > 0.6
    assert passes(100) > 0.9
