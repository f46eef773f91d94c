"""The history of a demo as stages: what a run makes before anything else, and the check that it fits into memory."""

from __future__ import annotations

from functools import partial

from msa_lite.budget.needs import Need
from msa_lite.budget.plan import StageCost
from msa_lite.demo.history import HISTORY_LABEL
from msa_lite.demo.smollm2 import MADE
from msa_lite.pipeline.prepare.models import demo_people
from msa_lite.pipeline.stages.costs import fit_cost, full_size
from msa_lite.pipeline.stages.facts import Facts, demo_rows, find_facts, has_history
from msa_lite.pipeline.stages.forecast import check_memory
from msa_lite.pipeline.stages.machine import Machine
from msa_lite.pipeline.stages.stage import Stage
from msa_lite.recipe import Demo, Recipe
from msa_lite.train import FitSettings

HISTORY = "history"  # the folder of a demo's models and data
_DOWNLOAD = (10.0, 60.0)  # seconds of SmolLM2's download and of writing it anew; the network decides


def demo_stages(recipe: Recipe) -> list[Stage]:
    """Return the models that a run makes for its demo first; nothing where they are made, or there is no demo."""
    demo = recipe.demo
    if demo is None or has_history(recipe):
        return []
    folder, people = recipe.folder / HISTORY, demo_people(demo)
    learnt = {"target": people["retain"] + people["forget"], "ideal": people["retain"]}
    if not isinstance(demo, Demo):
        first = Stage(MADE, "make", folder / "prior", cost=_real_cost)
    else:
        first = _fit_stage(recipe, "prior", people["prior"], demo.prior_epochs)
    return [first, *(_fit_stage(recipe, name, count, demo.tuning_epochs) for name, count in learnt.items())]


def _fit_stage(recipe: Recipe, name: str, people: int, epochs: int) -> Stage:
    cost = partial(_fit_cost, recipe, name, people, epochs)
    return Stage(HISTORY_LABEL.format(name), "fit", recipe.folder / HISTORY / name, cost=cost, amount=people)


def _fit_cost(recipe: Recipe, name: str, people: int, epochs: int, facts: Facts, machine: Machine) -> list[StageCost]:
    """Return the cost of training a model of the demo, in all its weights."""
    demo = recipe.demo
    assert demo is not None, "there is one"
    rows = demo_rows(people)
    settings = FitSettings(epochs=epochs, batch_size=demo.batch_size, micro_batch_size=demo.batch_size)
    size = full_size(f"the training of the {name} of the demo", rows, settings, rows.longest, machine.device)
    return [fit_cost(facts.shapes[name], size, machine)]


def _real_cost(facts: Facts, machine: Machine) -> list[StageCost]:
    """Return the time of fetching the prior of a real demo; memory and disk are small beside those of its fits."""
    return [StageCost("the prior of the demo", "make", Need({}), None, _DOWNLOAD, "from the Hub, or a package")]


def check_demo_memory(recipe: Recipe, force: bool) -> None:
    """Raise MismatchError, or warn, if a model of a demo that is not made yet does not fit into memory."""
    if stages := [stage for stage in demo_stages(recipe) if stage.kind == "fit"]:
        check_memory(stages, find_facts(recipe), 1, lambda machine: iter(()), force)
