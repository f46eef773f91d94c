"""A budget on attacks: fewer rows before fewer attacks, and what was begun goes on while something of it fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from msa_lite.attacks.attack import Attack, Cost, Ground
from msa_lite.attacks.membership import Membership
from msa_lite.attacks.relearn import Relearn
from msa_lite.attacks.sample import Sample
from msa_lite.budget.speed import ScoreTimes
from msa_lite.data import Row
from msa_lite.errors import UsageError
from msa_lite.pipeline.attack.plan import AttackPlan
from msa_lite.report.attacks import FEWEST_ROWS
from tests.support.memorised import make_ground

TIMES = ScoreTimes(load=0.0, token=1.0, new_token=0.0)
ELSEWHERE = Path("elsewhere")


class Priced(Sample):
    """An attack that takes so many seconds for a row and model."""

    seconds = 1.0

    def cost(self, ground: Ground) -> Cost:
        return Cost(scored=self.seconds * len(ground.forget))


class Dear(Priced):
    seconds = 10.0


class Plan(AttackPlan):
    """A plan that finds records of some attacks and models on all rows: in its own folder, or in another run's."""

    own: frozenset[str] = frozenset()
    other: frozenset[str] = frozenset()
    rows = 0

    def found(self, name: str, model: str) -> Path | None:
        if len(self.ground.forget) != self.rows:
            return None
        here = self.folder_of(name, model) if f"{name} {model}" in self.own else None
        return here or (ELSEWHERE if f"{name} {model}" in self.other else None)


def make_plan(rows: int, own: Any = (), other: Any = (), **attacks: Attack) -> AttackPlan:
    ground = make_ground(forget=[Row(i, f"Who is {i}?", "A man.") for i in range(rows)], holdout=())
    kind = type("OwnPlan", (Plan,), {"own": frozenset(own), "other": frozenset(other), "rows": rows})
    models = ["ideal", "target", "unlearned"]
    plan: AttackPlan = kind(Path("run"), Path("run"), attacks or {"cheap": Priced()}, {}, models, ground, "ideal", {})
    return plan


def test_fewer_rows_come_before_fewer_attacks() -> None:
    plan = make_plan(400, cheap=Priced(), dear=Dear()).within(3 * 11 * 120, TIMES)
    assert set(plan.attacks) == {"cheap", "dear"}
    assert 80 < len(plan.ground.forget) <= 120
    least = make_plan(400, cheap=Priced(), dear=Dear()).within(70, TIMES)
    assert (set(least.attacks), len(least.ground.forget)) == ({"cheap"}, 20)
    assert "takes about" in least.left_out["dear"]


def test_records_of_another_run_are_no_beginning() -> None:
    plan = make_plan(400, other=["cheap ideal", "cheap target"]).within(100, TIMES)
    assert len(plan.ground.forget) == 29, "rows are reduced, as if nothing was there"


def test_what_was_begun_here_goes_on_with_its_rows_while_something_fits() -> None:
    begun = [f"cheap {model}" for model in ("ideal", "target", "unlearned")]
    plan = make_plan(400, begun, cheap=Priced(), dear=Dear()).within(10, TIMES)
    assert (set(plan.attacks), len(plan.ground.forget)) == ({"cheap"}, 400)
    fewer = make_plan(400, ["cheap ideal"]).within(100, TIMES)
    assert len(fewer.ground.forget) == 29, "400 rows fit nowhere"


@pytest.mark.parametrize(("rows", "least"), [(8, 8), (400, 20)])
def test_a_budget_for_nothing_names_the_rows_that_it_was_tried_on(rows: int, least: int) -> None:
    with pytest.raises(UsageError, match=f"cheap alone takes about .* on {least} rows"):
        make_plan(rows).within(5, TIMES)


FEW_ROWS: dict[int, dict[str, int]] = {
    12: {"sample": 12, "relearn": 12},
    16: {"sample": 16, "relearn": 16},
    17: {"relearn, part": 9},
    20: {"relearn, part": 10},
    34: {},
}


@pytest.mark.parametrize("rows", FEW_ROWS)
def test_attacks_that_cannot_hold_on_so_few_rows_are_named_before_any_work(rows: int) -> None:
    """AUCs need no such number; relearning on a half of the rows scores the other half."""
    lines = make_plan(rows, sample=Sample(), membership=Membership(), relearn=Relearn()).too_few_rows
    assert {line.partition(":")[0]: int(line.split("with ")[1].split()[0]) for line in lines} == FEW_ROWS[rows]
    assert all(f"{FEWEST_ROWS} rows are needed" in line for line in lines)


def test_a_plan_without_some_attacks_says_why() -> None:
    plan = make_plan(20, cheap=Priced(), dear=Dear())
    assert replace(plan, left_out={"depth": "no ideal"}).without({"dear": "failed"}).left_out == {
        "depth": "no ideal", "dear": "failed"
    }  # fmt: skip
