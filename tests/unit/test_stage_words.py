"""Each stage that a run shows is explained where it is shown."""

from __future__ import annotations

import pytest

from msa_lite.io.console.display import Display, Notices
from msa_lite.io.console.progress import Step
from msa_lite.pipeline.prepare.run import Context
from msa_lite.pipeline.run.demo import demo_stages
from msa_lite.pipeline.stages.words import explain_stage, explain_stages
from msa_lite.pipeline.verbs.lists import find_verb
from msa_lite.recipe import load_recipe, shipped_recipes

RUNS = [name for name in shipped_recipes() if not name.startswith(("train/", "table/"))]


@pytest.mark.parametrize("name", RUNS)
def test_every_stage_of_a_shipped_recipe_is_explained(name: str) -> None:
    recipe = load_recipe(name)
    verb = find_verb("run", recipe)
    names = [stage.name for stage in [*demo_stages(recipe), *verb.stages(Context(recipe, verb.scope))]]
    assert [stage for stage in names if not explain_stage(stage)] == []
    assert 0 < len(explain_stages(names)) <= len(names), "a line a kind of stage"


def test_a_name_that_only_begins_alike_is_not_explained() -> None:
    assert explain_stage("merge")
    assert not explain_stage("merge the target, an adapter, into its base")
    assert explain_stage("filtered forget vector, λ = 1") != explain_stage("forget vector")
    assert explain_stage("quantise: unlearned").startswith("an attack: ")


def test_a_step_says_what_it_is_for_as_it_begins(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(Notices())
    display.announce([Step("check: prior", "check", 1, "must not know the rows"), Step("other", "fit")])
    display("check: prior", 0, 2)
    display("other", 0, 2)
    first, _, last = capsys.readouterr().err.splitlines()
    assert first.endswith("check: prior: started (must not know the rows)")
    assert last.endswith("other: started")
