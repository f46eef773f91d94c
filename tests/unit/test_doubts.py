"""What is advised after a choice: by the scores, and not by the place in the grid alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from msa_lite.choose.doubts import few_rows, strength_advice
from msa_lite.choose.rules import Rank

ENOUGH, LOST = Rank(True, 1.0, 0.97, "enough"), Rank(False, -0.3, aim="gentler", note="keeps 70%, 90% wanted")


def weak(left: float) -> Rank:
    return Rank(left <= 0.5, 1.0 - left if left <= 0.5 else 0.1 - left, 1.0, "stronger", left=left)


def advice(ranks: dict[tuple[float, float], Rank | str], best: tuple[float, float]) -> list[str]:
    points: list[dict[str, Any]] = [{"alpha": alpha, "beta": beta} for alpha, beta in ranks]
    return strength_advice(points, [*ranks.values()], [*ranks].index(best))


def test_a_point_that_forgets_and_keeps_is_not_doubted_at_any_edge() -> None:
    assert advice({(0.5, 0.0): weak(0.4), (1.0, 0.0): ENOUGH}, (1.0, 0.0)) == []
    assert advice({(0.5, 0.5): ENOUGH, (1.0, 0.5): LOST}, (0.5, 0.5)) == []
    assert advice({(0.5, 0.5): ENOUGH}, (0.5, 0.5)) == []


def test_what_is_still_exposed_at_the_largest_asks_for_a_larger_one() -> None:
    (said,) = advice({(0.5, 0.0): weak(0.8), (1.0, 0.0): weak(0.4)}, (1.0, 0.0))
    assert said == "the chosen point leaves 40% of what can be extracted; an alpha larger than 1 may forget more"
    (said,) = advice({(1.0, 0.0): LOST, (1.0, 0.5): weak(0.4)}, (1.0, 0.5))  # of the same alpha another lost too much
    assert "an alpha larger than 1 may forget more" in said


def test_where_all_keeps_and_nothing_forgets_the_fit_is_named() -> None:
    (said,) = advice({(1.0, 0.0): weak(1.0), (8.0, 0.0): weak(1.0)}, (1.0, 0.0))  # of equals the gentlest was taken
    assert said.startswith("no point forgets, up to alpha 8, and all of them keep enough")
    assert "vector.epochs" in said


@pytest.mark.parametrize("beyond", [LOST, "no numbers"])
def test_where_stronger_ones_lose_too_much_neither_direction_is_advised(beyond: Rank | str) -> None:
    (said,) = advice({(0.5, 0.0): weak(0.3), (1.0, 0.0): beyond}, (0.5, 0.0))
    assert said.startswith("the chosen point leaves 30% of what can be extracted, and stronger ones lose too much")
    said, more = advice({(0.5, 0.0): LOST, (0.5, 0.5): weak(0.3), (1.0, 0.5): beyond}, (0.5, 0.5))
    assert more == "beta 0.5 is the largest tried; a larger one may keep more"


def test_what_keeps_too_little_asks_for_a_smaller_alpha_where_none_was_tried() -> None:
    (said,) = advice({(0.5, 0.0): LOST, (1.0, 0.0): "no numbers"}, (0.5, 0.0))
    assert said == "no alpha below 0.5 was tried; a smaller one may keep more"
    assert advice({(0.25, 0.0): Rank(False, -0.4, aim="gentler"), (0.5, 0.0): LOST}, (0.5, 0.0)) == []


def test_between_points_that_forget_nothing_and_points_that_lose_much_other_settings_are_advised() -> None:
    near = Rank(False, -0.05, aim="gentler", note="keeps 85%, 90% wanted", left=0.05)
    (said,) = advice({(0.25, 0.0): weak(0.9), (0.5, 0.0): near, (1.0, 0.0): LOST}, (0.5, 0.0))
    assert said.startswith("gentler points forget too little. Try vector.mode full")
    assert advice({(0.25, 0.0): weak(0.9), (0.5, 0.0): near}, (0.25, 0.0)) == [
        "the chosen point leaves 90% of what can be extracted, and stronger ones lose too much. Try vector.mode full, "
        "a prior that answers such questions better, or more retain rows"
    ]


def test_of_a_rule_that_only_orders_points_every_edge_is_named() -> None:
    assert advice({(0.5, 0.5): Rank(True, 0.1), (1.0, 1.0): Rank(True, 0.2)}, (1.0, 1.0)) == [
        "alpha 1 is the largest tried; a larger one may be better",
        "beta 1 is the largest tried; a larger one may be better",
    ]
    assert advice({(0.5, 0.0): Rank(True, 0.2), (1.0, 0.0): Rank(True, 0.1)}, (0.5, 0.0)) == [
        "alpha 0.5 is the smallest tried; a smaller one may be better"
    ]


def test_an_epoch_that_keeps_too_little_is_no_matter_of_alpha() -> None:
    (said,) = strength_advice([{"epoch": 1}, {"epoch": 2}], [LOST, "no numbers"], 0)
    assert "a lower baseline.learning_rate" in said
    assert strength_advice([{"epoch": 1}], [ENOUGH], 0) == []


def test_rows_that_both_parts_share_are_told() -> None:
    sets = {name: SimpleNamespace(items=[None] * count) for name, count in (("forget", 9), ("retain", 30))}
    asked: Any = SimpleNamespace(sets=sets, split="validation")
    assert few_rows(asked) == ["it rests on few validation rows (forget: 9); raise select.validation"]
    asked.split = "all"
    (said,) = few_rows(asked)
    assert said.startswith("there are too few rows to divide (forget: 9, retain: 30)")
