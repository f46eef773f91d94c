"""What few rows can show: a candidate's place, whether target and prior know them, the bounds of shares and means."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msa_lite.choose.rules import LeastExtraction, Rank
from msa_lite.errors import DataError
from msa_lite.evals.verdict.bounds import (
    add_up,
    bounded,
    count_subjects,
    difference_of_shares,
    effective_rows,
    share_bound,
    unit_of_rows,
)
from msa_lite.evals.verdict.knowledge import find_fault, weak_sets
from msa_lite.evals.verdict.outcome import Standing, stand, yardstick_of_rows
from tests.support.records import around, known, make_forgotten, text, unknown

TARGET = {"forget": known(40), "retain": known(40)}
IDEAL = {"forget": [*known(1), *unknown(39)], "retain": known(40)}


def standing(forget: list[dict[str, Any]], retain: list[dict[str, Any]], **models: Any) -> Standing:
    models = {"target": TARGET, "ideal": IDEAL} | models | {"unlearned": {"forget": forget, "retain": retain}}
    found = stand(models, yardstick_of_rows(models))
    assert not isinstance(found, str)
    return found


def test_a_candidate_is_inside_up_to_the_controls_upper_bound() -> None:
    # One of 40 is recited by the control: at most 4 (10 %) by Wilson's bound, and the means lie a little above.
    assert standing([*known(1), *unknown(39)], known(40)).inside
    assert standing(unknown(40), known(40)).inside
    above = standing([*known(6), *unknown(34)], known(40))
    assert not above.inside
    assert "6 of 40 are recited" in above.above[0]
    likelier = standing(unknown(40, probability=0.4), known(40))
    assert [line.partition(" is ")[0] for line in likelier.above] == ["probability"]


def test_the_distance_is_that_to_control_and_target_by_hand() -> None:
    # Forget: accuracy, ROUGE-L, strength 0.5 and probability 0.5 − 0.12 from the control's .025, .025, .12 and .025;
    # retain: all as the target but probability, 0.2 lower.
    forget = [*known(20), *unknown(20)]
    found = standing(forget, known(40, 0.7))
    far = (3 * (0.5 - 0.025) + (0.5 - 0.12)) / 4
    assert found.distance == pytest.approx((far + 0.2 / 4) / 2)
    assert standing(IDEAL["forget"], known(40)).distance == 0
    assert standing(unknown(40), known(40)).distance > 0  # less than the control is no gain


def test_without_a_control_nothing_is_the_level_and_texts_have_scores_of_their_own() -> None:
    models = {"target": {"forget": known(4)}, "unlearned": {"forget": unknown(4, probability=0.0)}}
    found = stand(models, yardstick_of_rows(models))
    assert not isinstance(found, str)
    assert (found.inside, found.distance, found.kept) == (True, 0.0, 1.0)
    texts = {
        "target": {"forget": [text(1.0, 1.0, 1.0)] * 9, "holdout": [text(0.4, 0.0, 0.2)] * 9},
        "unlearned": {"forget": [text(0.8, 0.1, 0.4)] * 9},
    }
    found = stand(texts, yardstick_of_rows(texts))
    assert not isinstance(found, str)
    assert found.distance == pytest.approx((0.4 + 0.1 + 0.2) / 3 / 2)
    assert "no rows of the forget set" in str(stand({"target": {}, "unlearned": {}}, yardstick_of_rows({"target": {}})))


def rank(inside: bool, kept: float, distance: float = 0.1, **changes: Any) -> Rank:
    above = [] if inside else ["9 of 40 are recited, at most 10% wanted"]
    standing = Standing(inside, above, kept, distance, make_forgotten(**changes))
    return LeastExtraction(0.9).rank({}, {}, standing)


def test_of_points_inside_that_keep_enough_the_one_that_keeps_most_is_best_and_else_the_nearest() -> None:
    ranks = [
        rank(True, 0.97),
        rank(True, 0.9, 0.0),
        rank(False, 1.0, 0.05),  # nearer than all below, though it recites more than the control
        rank(True, 0.8, 0.06),
        rank(False, 0.7, 0.2),
    ]
    assert sorted(ranks, reverse=True) == ranks
    assert [one.met for one in ranks] == [True, True, False, False, False]
    assert [one.aim for one in ranks] == ["enough", "enough", "stronger", "gentler", "neither"]
    assert ranks[0].note is None
    assert all(word in str(ranks[4].note) for word in ("recited", "keeps 70%", "distance 0.200"))
    assert str(ranks[4].note) in LeastExtraction(0.9).unmet(ranks[4])
    with pytest.raises(DataError, match="no records"):
        LeastExtraction(0.9).rank({}, {})


@pytest.mark.parametrize(
    "changes",
    [{"excess": around(0.09)}, {"left": {"probability": around(0.19)}}, {"excess": None}],
    ids=["recited", "left", "no control"],
)
def test_what_a_pass_would_not_show_is_not_met_in_the_choice_either(changes: dict[str, Any]) -> None:
    """Choice and verdict share one definition: else the search would stop where the verdict is undecided."""
    found = rank(True, 0.97, **changes)
    assert (found.met, found.aim) == (False, "stronger")
    assert "margins of a PASS" in str(found.note)
    assert rank(True, 0.8, **changes).aim == "neither"


# Whether a target knows the forget rows and its prior does not, from handmade records.


@pytest.mark.parametrize(
    ("target", "prior", "kind"),
    [
        (known(24), unknown(24, 0.1), None),
        (known(14) + unknown(10, 0.8, 0.6), unknown(24, 0.4, 0.1), None),  # recites only some of its rows
        (unknown(24, 0.15), unknown(24, 0.1), "unknown"),  # wrong prompt
        (unknown(24), unknown(24), "unknown"),
        (known(1) + unknown(23), unknown(24), "unknown"),  # one row of many is no knowledge
        (known(2) + unknown(22, 0.38, 0.36), unknown(24, 0.28, 0.16), "unknown"),  # a system message too many
        (known(24), known(24), "seen"),
        (known(24), known(13) + unknown(11), "seen"),
        (known(24), known(11) + unknown(13), None),
        (known(1), unknown(1), None),
        ([], [], None),
    ],
)
def test_target_and_prior_are_compared_row_by_row(
    target: list[dict[str, Any]], prior: list[dict[str, Any]], kind: str | None
) -> None:
    fault = find_fault(target, prior)
    assert (fault and fault.kind) == kind
    if fault:
        assert f"of {len(target)} rows the target recites" in fault.figures


@pytest.mark.parametrize(
    ("retain", "holdout", "words"),
    [
        (known(9), unknown(9), []),
        (known(9), known(9), ["no control: the target recites 9 of 9"]),
        (known(9), known(5) + unknown(4), ["no control: the target recites 5 of 9"]),
        (known(9), known(4) + unknown(5), []),
        (unknown(9), unknown(9), ["does not know the retain rows"]),
        (unknown(9), [], ["does not know the retain rows"]),
        (known(9), [], []),
        (unknown(7), known(7), []),  # too few
    ],
)
def test_sets_that_can_show_nothing_are_told(
    retain: list[dict[str, Any]], holdout: list[dict[str, Any]], words: list[str]
) -> None:
    notes = weak_sets(known(12) + unknown(12), unknown(24), retain, holdout)
    assert len(notes) == len(words)
    assert all(word in note for word, note in zip(words, notes, strict=True))


BEGUN, BEFORE = unknown(24, 0.8, 0.1), unknown(24, 0.1)  # it has learnt how such answers begin
GUESSED = known(14) + unknown(10)


@pytest.mark.parametrize(
    ("target", "prior", "others", "kind", "figure"),
    [
        (BEGUN, BEFORE, {}, None, ""),
        (BEGUN, BEFORE, {"retain": known(24)}, "other rows", "retain rows 1.00"),
        (BEGUN, BEFORE, {"holdout": unknown(24, 0.8, 0.1)}, "other rows", "holdout rows 0.30"),
        (BEGUN, BEFORE, {"retain": known(7), "holdout": unknown(7, 0.6)}, None, ""),  # too few to compare with
        (known(24), BEFORE, {"retain": known(24), "holdout": unknown(24, 0.6)}, None, ""),
        (known(24), GUESSED, {"holdout": known(10) + unknown(14)}, None, ""),  # what can be guessed was not seen
        (known(24), GUESSED, {"holdout": unknown(24)}, "seen", ""),
    ],
)
def test_rows_to_keep_and_unseen_rows_say_what_knowing_is(
    target: list[dict[str, Any]], prior: list[dict[str, Any]], others: dict[str, Any], kind: str | None, figure: str
) -> None:
    fault = find_fault(target, prior, **others)
    assert (fault and fault.kind) == kind
    assert fault is None or figure in fault.figures


@pytest.mark.parametrize(
    ("target", "prior", "kind"), [(0.95, 0.4, None), (0.46, 0.4, None), (0.41, 0.4, "unknown"), (0.95, 0.95, "seen")]
)
def test_texts_are_compared_by_the_tokens_predicted(target: float, prior: float, kind: str | None) -> None:
    fault = find_fault([text(target)] * 3, [text(prior)] * 3)
    assert (fault and fault.kind) == kind


@pytest.mark.parametrize(("spread", "known_apart"), [(0.37, True), (0.43, False)])
def test_a_gain_counts_where_its_interval_of_95_percent_lies_above_zero(spread: float, known_apart: bool) -> None:
    # A gain of 0.2 ± spread by turns, of 16 rows: error spread · √(16/15) / 4, times 1.96. The border is a spread of
    # 0.395; at 90 % it is 0.471.
    target = [text(0.5 + (spread if i % 2 else -spread)) for i in range(16)]
    assert (find_fault(target, [text(0.3)] * 16) is None) == known_apart


# The bounds of shares, differences and means: against published figures, against hand-worked ones, and by property.


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
