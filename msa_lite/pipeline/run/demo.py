"""The history of a demo as stages: what a run makes before anything else, and the check that it fits into memory."""

from __future__ import annotations

from pathlib import Path

from msa_lite.budget.needs import Need
from msa_lite.budget.plan import StageCost
from msa_lite.budget.speed import Machine
from msa_lite.demo.history import HISTORY_LABEL, REAL, HistorySettings
from msa_lite.demo.smollm2 import MADE
from msa_lite.pipeline.stages.costs import fit_cost
from msa_lite.pipeline.stages.facts import Facts, demo_rows, find_facts, has_history
from msa_lite.pipeline.stages.stage import Stage, check_memory
from msa_lite.recipe import Recipe
from msa_lite.train import FitSettings

HISTORY = "history"  # the folder of a demo's models and data
_DOWNLOAD = 30.0  # seconds of SmolLM2's download and of writing it anew; the network decides


def demo_stages(recipe: Recipe, made: bool = False) -> list[Stage]:
    """Return the models that a run makes for its demo first; nothing where there is no demo.

    made: True to name those that are made already, too.
    """
    demo = recipe.demo
    if demo is None or (has_history(recipe) and not made):
        return []
    folder, people = recipe.folder / HISTORY, demo.people
    settings = REAL if demo.model else HistorySettings()
    learnt = {"target": people["retain"] + people["forget"], "ideal": people["retain"]}
    if demo.model:
        says = "the real chat model that the first try starts from is fetched"
        first = Stage(MADE, "make", folder / "prior", cost=_real_cost, says=says)
    else:
        first = _fit_stage(folder, "prior", people["prior"], settings.prior_epochs, settings.batch_size)
    later = (
        _fit_stage(folder, name, count, settings.tuning_epochs, settings.batch_size) for name, count in learnt.items()
    )
    return [first, *later]


def _fit_stage(folder: Path, name: str, people: int, epochs: int, batch: int) -> Stage:
    def cost(facts: Facts, machine: Machine) -> list[StageCost]:
        settings = FitSettings("full", epochs=epochs, batch_size=batch, micro_batch_size=batch)
        what = f"the training of the {name} of the demo"
        return [fit_cost(what, facts.shapes[name], settings, demo_rows(people), machine)]

    says = "models of the first try learn invented people: the target more of them than prior and ideal"
    return Stage(HISTORY_LABEL.format(name), "fit", folder / name, cost=cost, says=says)


def _real_cost(facts: Facts, machine: Machine) -> list[StageCost]:
    """Return the time of fetching the prior of a real demo; memory and disk are small beside those of its fits."""
    return [StageCost("the prior of the demo", "make", Need({}), _DOWNLOAD, "from the Hub, or a package", place="host")]


def check_demo_memory(recipe: Recipe, force: bool) -> None:
    """Raise MismatchError, or warn, if a model of a demo that is not made yet does not fit into memory."""
    if stages := [stage for stage in demo_stages(recipe) if stage.kind == "fit"]:
        check_memory(stages, find_facts(recipe), 1, lambda machine: iter(()), force)
