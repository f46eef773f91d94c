"""What is advised after a choice: by the scores, and not by the place in the grid alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from msa_lite.choose.choice import few_rows, strength_advice
from msa_lite.choose.rules import Rank

ENOUGH, LOST = Rank(True, 0.97, aim="enough"), Rank(False, -0.3, 0.7, aim="gentler", note="keeps 70%, 90% wanted")
NEITHER = Rank(False, -0.1, 0.8, aim="neither", note="9 of 40 are recited; keeps 80%, 90% wanted")
REMEDIES = ["vector.mode full", "more retain rows"]


def weak(kept: float = 0.95) -> Rank:
    return Rank(False, -0.2, kept, aim="stronger", note="9 of 40 are recited")


def advice(ranks: dict[tuple[float, float], Rank | str], best: tuple[float, float]) -> list[str]:
    points: list[dict[str, Any]] = [{"alpha": alpha, "beta": beta} for alpha, beta in ranks]
    return strength_advice(points, [*ranks.values()], [*ranks].index(best), REMEDIES)


def test_a_point_that_forgets_and_keeps_is_not_doubted_at_any_edge() -> None:
    assert advice({(0.5, 0.0): weak(), (1.0, 0.0): ENOUGH}, (1.0, 0.0)) == []
    assert advice({(0.5, 0.5): ENOUGH, (1.0, 0.5): LOST}, (0.5, 0.5)) == []
    assert advice({(0.5, 0.5): ENOUGH}, (0.5, 0.5)) == []


def test_what_still_knows_too_much_at_the_largest_asks_for_a_larger_one() -> None:
    (said,) = advice({(0.5, 0.0): weak(), (1.0, 0.0): weak()}, (1.0, 0.0))
    assert "an alpha larger than 1 may forget more" in said


def test_where_all_keeps_and_nothing_forgets_the_fit_is_named() -> None:
    (said,) = advice({(1.0, 0.0): weak(1.0), (8.0, 0.0): weak(1.0)}, (1.0, 0.0))
    assert said.startswith("no point forgets, up to alpha 8, and all of them keep enough")
    assert "vector.epochs" in said


@pytest.mark.parametrize("beyond", [LOST, NEITHER, "no numbers"])
def test_where_stronger_ones_lose_too_much_remedies_are_named_and_no_direction(beyond: Rank | str) -> None:
    (said,) = advice({(0.5, 0.0): weak(), (1.0, 0.0): beyond}, (0.5, 0.0))
    assert (
        said == "gentler points know too much, stronger ones lose too much. Try vector.mode full, or more retain rows"
    )
    said, more = advice({(0.5, 0.0): LOST, (0.5, 0.5): weak(), (1.0, 0.5): beyond}, (0.5, 0.5))
    assert more == "beta 0.5 is the largest tried; a larger one may keep more"
    alone: list[dict[str, Any]] = [{"alpha": 0.5}, {"alpha": 1.0}]
    assert strength_advice(alone, [weak(), beyond], 0) == ["gentler points know too much, stronger ones lose too much"]


def test_a_nearest_point_that_neither_forgets_nor_keeps_is_told_alike() -> None:
    (said,) = advice({(0.5, 0.0): weak(), (0.7, 0.0): NEITHER, (1.0, 0.0): LOST}, (0.7, 0.0))
    assert said.startswith("gentler points know too much")


def test_what_keeps_too_little_asks_for_a_smaller_alpha_where_none_was_tried() -> None:
    (said,) = advice({(0.5, 0.0): LOST, (1.0, 0.0): "no numbers"}, (0.5, 0.0))
    assert said == "no alpha below 0.5 was tried; a smaller one may keep more"


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


def test_few_rows_and_rows_that_both_parts_share_are_told() -> None:
    sets = {name: SimpleNamespace(items=[None] * count) for name, count in (("forget", 9), ("retain", 30))}
    asked: Any = SimpleNamespace(sets=sets, split="validation")
    assert few_rows(asked) == ["it rests on few rows (forget: 9)"]
    asked.split = "all"
    few, shared = few_rows(asked)
    assert few == "it rests on few rows (forget: 9)"
    assert shared.startswith("there are too few retain rows to divide (30)")
