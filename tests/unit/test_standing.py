"""The place of a candidate beside control and target, and the rule that chooses by it, from handmade records."""

from __future__ import annotations

from typing import Any

import pytest

from msa_lite.choose.rules import LeastExtraction, Rank
from msa_lite.errors import DataError
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
