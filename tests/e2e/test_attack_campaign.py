"""Which campaign against a run is settled: which rows, which results of before, and what is refused before any work."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from msa_lite.attacks.attack import Subject, Trial
from msa_lite.attacks.prompt import Prompting
from msa_lite.errors import MsaError, StageError, UsageError
from msa_lite.evals.benchmarks.benchmark import Records
from msa_lite.pipeline.attack.campaign import Campaign, open_attacks
from msa_lite.pipeline.baseline.settings import baseline_scope
from msa_lite.pipeline.prepare.run import msa_scope, prepare
from msa_lite.pipeline.run.folder import open_run
from msa_lite.pipeline.verbs.lists import find_verb
from msa_lite.recipe import load_recipe
from tests.e2e.conftest import FEW, QUICK, CallCli
from tests.support.pages import page_text


@pytest.fixture
def copy(attacked: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(attacked, tmp_path / "run"))


def planned(folder: Path, names: Sequence[str], *changes: str, method: str = "msa", **replaced: Any) -> Campaign:
    """The campaign against the run in a folder; without the checks of the command."""
    opened = open_run(folder)
    recipe = load_recipe(opened.recipe, [*FEW, *changes])
    run = prepare(recipe, msa_scope(recipe) if method == "msa" else baseline_scope(method, recipe)[0])
    return open_attacks(replace(run, **replaced), opened.result, names)


def test_results_beside_another_ideal_or_on_other_rows_are_not_kept(copy: Path) -> None:
    prior = yaml.safe_load((copy / "recipe.yaml").read_text())["prior"]
    for change in (f"evaluate.ideal={prior}", "evaluate.ideal=null", "attack.rows=3"):
        campaign = planned(copy, ["membership"], change)
        assert [*campaign.attacks] == ["membership"], change
        others = dict.fromkeys(set(QUICK) - {"membership"}, "was made with other models or rows before; make it again")
        assert campaign.left_out == others
    assert set(planned(copy, ["sample"]).attacks) == {"sample", *QUICK}


def test_all_forget_rows_are_attacked_also_those_that_the_choice_was_made_by(copy: Path) -> None:
    path = Path(yaml.safe_load((copy / "recipe.yaml").read_text())["forget"]["data"]["path"])
    campaign = planned(copy, QUICK, "attack.rows=400", "evaluate.limit=null")
    questions = [json.loads(line)["question"] for line in path.read_text().splitlines()]
    assert [row.question for row in campaign.ground.forget] == questions


def test_models_that_an_attack_cannot_be_made_on_are_told_before_any_work(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msa_lite.attacks.relearn.streams", lambda source: True)
    campaign = planned(copy, [])
    assert "relearn" not in campaign.attacks
    assert "too large for the GPU's memory to be tuned" in campaign.left_out["relearn"]
    with pytest.raises(UsageError, match=r"relearn: .*too large for the GPU's memory"):
        planned(copy, ["relearn"])


LATE: Mapping[str, tuple[list[str], str]] = {
    "no control": (["evaluate.ideal=null", "evaluate.holdout=null"], "there is no control"),
    "a set that is missing": (["evaluate.holdout=null", "attack.attacks=[membership]"], "membership: needs rows of"),
}


@pytest.mark.parametrize("method", ["msa", "grad_diff"])
@pytest.mark.parametrize("case", LATE)
def test_attacks_that_end_a_run_are_checked_before_it(case: str, method: str, finished: Path) -> None:
    changes, message = LATE[case]
    recipe = load_recipe(open_run(finished).recipe, ["attack.attacks=[prompt]", *changes])
    verb = find_verb("run" if method == "msa" else "baseline", recipe, method)
    run = prepare(recipe, verb.scope)
    with pytest.raises(MsaError, match=message):
        verb.check(run)


def fail(self: Prompting, subject: Subject, *_: Any) -> Iterator[tuple[Trial, Records]]:
    raise StageError("out of memory")
    yield


def test_an_attack_that_fails_costs_no_other_one_its_report(
    copy: Path, call_cli: CallCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(copy / "attacks/prompt")
    (copy / "attacks/report.json").unlink()
    monkeypatch.setattr(Prompting, "run", fail)
    code, _, err = call_cli("attack", copy, *FEW, "--attacks", "membership,prompt")
    assert code == 4
    assert "prompt: failed on ideal: out of memory" in err
    settings = json.loads((copy / "attacks/report.json").read_text())["settings"]
    assert [one["name"] for one in settings["attacks"]] == ["membership"]
    assert settings["left_out"] == {"prompt": "failed on ideal: out of memory"}
    assert "Not made: prompt: failed on ideal" in page_text(copy)
