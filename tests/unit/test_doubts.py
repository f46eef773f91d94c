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


BOTH_LOSE = "gentler points know too much, stronger ones lose too much. Try vector.mode full, or more retain rows"
CASES: dict[str, tuple[dict[tuple[float, float], Rank | str], tuple[float, float], list[str]]] = {
    "enough at the largest": ({(0.5, 0.0): weak(), (1.0, 0.0): ENOUGH}, (1.0, 0.0), []),
    "enough at the smallest": ({(0.5, 0.5): ENOUGH, (1.0, 0.5): LOST}, (0.5, 0.5), []),
    "too weak at the largest": (
        {(0.5, 0.0): weak(), (1.0, 0.0): weak()}, (1.0, 0.0), ["an alpha larger than 1 may forget more"],
    ),
    "nothing forgets": (
        {(1.0, 0.0): weak(1.0), (8.0, 0.0): weak(1.0)}, (1.0, 0.0),
        ["no point forgets, up to alpha 8, and all of them keep enough"],
    ),
    **{
        f"weak, then {name}": ({(0.5, 0.0): weak(), (1.0, 0.0): beyond}, (0.5, 0.0), [BOTH_LOSE])
        for name, beyond in (("lost", LOST), ("neither", NEITHER), ("broken", "no numbers"))
    },
    "too little beta": (
        {(0.5, 0.0): LOST, (0.5, 0.5): weak(), (1.0, 0.5): LOST}, (0.5, 0.5),
        [BOTH_LOSE, "beta 0.5 is the largest tried; a larger one may keep more"],
    ),
    "lost at the smallest": (
        {(0.5, 0.0): LOST, (1.0, 0.0): "no numbers"}, (0.5, 0.0),
        ["no alpha below 0.5 was tried; a smaller one may keep more"],
    ),
    "a rule that only orders": (
        {(0.5, 0.5): Rank(True, 0.1), (1.0, 1.0): Rank(True, 0.2)}, (1.0, 1.0),
        [f"{name} 1 is the largest tried; a larger one may be better" for name in ("alpha", "beta")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_advice_goes_by_scores_and_edges(name: str) -> None:
    ranks, best, wanted = CASES[name]
    found = advice(ranks, best)
    assert len(found) == len(wanted)
    assert all(words in line for words, line in zip(wanted, found, strict=True)), found


def test_few_rows_and_rows_that_both_parts_share_are_told() -> None:
    sets = {name: SimpleNamespace(items=[None] * count) for name, count in (("forget", 9), ("retain", 30))}
    asked: Any = SimpleNamespace(sets=sets, split="validation")
    assert few_rows(asked) == ["it rests on few rows (forget: 9)"]
    asked.split = "all"
    few, shared = few_rows(asked)
    assert few == "it rests on few rows (forget: 9)"
    assert shared.startswith("there are too few retain rows to divide (30)")
