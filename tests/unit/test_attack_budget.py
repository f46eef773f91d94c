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
from msa_lite.pipeline.attack.campaign import Campaign
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


class Begun(Campaign):
    """A campaign that has records of some attacks and models on all rows: in its folder, or in another run's."""

    here: frozenset[str] = frozenset()
    elsewhere: frozenset[str] = frozenset()
    rows = 0

    def finished_folder(self, name: str, model: str) -> Path | None:
        if len(self.ground.forget) != self.rows:
            return None
        here = self.folder_of(name, model) if f"{name} {model}" in self.here else None
        return here or (ELSEWHERE if f"{name} {model}" in self.elsewhere else None)


def make_campaign(rows: int, here: Any = (), elsewhere: Any = (), **attacks: Attack) -> Campaign:
    ground = make_ground(forget=[Row(i, f"Who is {i}?", "A man.") for i in range(rows)], holdout=())
    kind = type("Begun", (Begun,), {"here": frozenset(here), "elsewhere": frozenset(elsewhere), "rows": rows})
    models = ["ideal", "target", "unlearned"]
    campaign: Campaign = kind(Path("run"), Path("run"), attacks or {"cheap": Priced()}, {}, models, ground, "ideal", {})
    return campaign


def test_fewer_rows_come_before_fewer_attacks() -> None:
    campaign = make_campaign(400, cheap=Priced(), dear=Dear()).within(3 * 11 * 120, TIMES)
    assert set(campaign.attacks) == {"cheap", "dear"}
    assert 80 < len(campaign.ground.forget) <= 120
    least = make_campaign(400, cheap=Priced(), dear=Dear()).within(70, TIMES)
    assert (set(least.attacks), len(least.ground.forget)) == ({"cheap"}, 20)
    assert "takes about" in least.left_out["dear"]


def test_records_of_another_run_are_no_beginning() -> None:
    campaign = make_campaign(400, elsewhere=["cheap ideal", "cheap target"]).within(100, TIMES)
    assert len(campaign.ground.forget) == 29, "rows are reduced, as if nothing was there"


def test_what_was_begun_here_goes_on_with_its_rows_while_something_fits() -> None:
    begun = [f"cheap {model}" for model in ("ideal", "target", "unlearned")]
    campaign = make_campaign(400, begun, cheap=Priced(), dear=Dear()).within(10, TIMES)
    assert (set(campaign.attacks), len(campaign.ground.forget)) == ({"cheap"}, 400)
    fewer = make_campaign(400, ["cheap ideal"]).within(100, TIMES)
    assert len(fewer.ground.forget) == 29, "400 rows fit nowhere"


@pytest.mark.parametrize(("rows", "least"), [(8, 8), (400, 20)])
def test_a_budget_for_nothing_names_the_rows_that_it_was_tried_on(rows: int, least: int) -> None:
    with pytest.raises(UsageError, match=f"cheap alone takes about .* on {least} rows"):
        make_campaign(rows).within(5, TIMES)


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
    lines = make_campaign(rows, sample=Sample(), membership=Membership(), relearn=Relearn()).too_few_rows
    assert {line.partition(":")[0]: int(line.split("with ")[1].split()[0]) for line in lines} == FEW_ROWS[rows]
    assert all(f"{FEWEST_ROWS} rows are needed" in line for line in lines)


def test_a_campaign_without_some_attacks_says_why() -> None:
    campaign = make_campaign(20, cheap=Priced(), dear=Dear())
    assert replace(campaign, left_out={"depth": "no ideal"}).without({"dear": "failed"}).left_out == {
        "depth": "no ideal", "dear": "failed"
    }  # fmt: skip
