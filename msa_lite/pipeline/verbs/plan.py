"""Plan a run or a training before it starts: the memory, disk and time of each stage, and what would make it fit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from msa_lite.budget.plan import Plan
from msa_lite.budget.speed import Device, Machine, speed_of, this_device
from msa_lite.errors import UsageError
from msa_lite.merger.checks.memory import parse_size
from msa_lite.pipeline.prepare.earlier import open_earlier
from msa_lite.pipeline.prepare.models import check_fit_ahead
from msa_lite.pipeline.prepare.questions import terms_left_out
from msa_lite.pipeline.prepare.run import Context
from msa_lite.pipeline.run.demo import demo_stages
from msa_lite.pipeline.staged.prepare import plan_training
from msa_lite.pipeline.stages.facts import find_facts
from msa_lite.pipeline.stages.forecast import enough_processes, find_remedies, forecast
from msa_lite.pipeline.stages.stage import Stage
from msa_lite.pipeline.verbs.lists import find_verb
from msa_lite.recipe import Recipe, RecipeSource, TrainingRecipe, load_any, load_recipe

_SMALLEST_GPU = 100_000_000  # bytes


def plan(
    recipe: RecipeSource,
    overrides: Iterable[str] = (),
    *,
    gpu: str | int | None = None,
    baseline: str | None = None,
    processes: int = 1,
) -> Plan:
    """Predict memory, disk and time of each stage of a run or a training, from headers and configs.

    gpu: the memory of a GPU, such as "8GB", instead of this machine's device. baseline: the method to plan, instead of
    MSA. processes: those of a launcher, each with such a GPU; they divide full fits. Raise UsageError if neither target
    nor prior is found, on this machine or on the Hub, for a training with a baseline or several processes, and as
    `open_earlier`.
    """
    overrides, device = [*overrides], device_of(gpu) if gpu is not None else this_device()
    machine = Machine(device, processes, speed_of(device))
    if isinstance(load_any(recipe, overrides), TrainingRecipe):
        if baseline is not None or processes > 1:
            raise UsageError("--baseline and --processes: plan a run, not a training; leave them out")
        return plan_training(recipe, overrides, machine)
    loaded = load_recipe(recipe, overrides)
    open_earlier(loaded)  # the run would refuse them
    verb = find_verb("run", loaded) if baseline is None else find_verb("baseline", loaded, baseline)
    scope = verb.scope
    facts = find_facts(loaded)
    check_fit_ahead(loaded, facts.heads)

    def build(recipe: Recipe) -> list[Stage]:
        return [*demo_stages(recipe), *verb.stages(Context(recipe, scope))]

    forecasted = forecast(build(loaded), facts, machine, loaded.folder)
    notes = [*(loaded.lost_filter if baseline is None else []), *(terms_left_out(loaded) if scope.choice else [])]
    notes += [loaded.prior_reason] if not loaded.has_prior and loaded.prior_reason else []
    notes += forecasted.notes
    is_shared = loaded.vector.mode == "full" and processes == 1
    if is_shared and (count := enough_processes(build(loaded), facts, device)):
        launch = f"accelerate launch --num_processes {count} -m msa_lite"
        notes.append(f"{count} of these GPUs hold the fits in full mode together: {launch}")
    remedies = () if forecasted.fits else tuple(find_remedies(loaded, build, facts, machine))
    return replace(forecasted, notes=notes, remedies=remedies)


def device_of(size: str | int) -> Device:
    """Return a GPU of this much memory. Raise UsageError for less than any has, such as 8 in the place of 8GB."""
    device = Device("", parse_size(size))
    if device.nbytes < _SMALLEST_GPU:
        raise UsageError(f"--gpu {size}: no GPU has so little memory; write it as 8GB")
    return device
