"""Plan a run or a training before it starts: the memory, disk and time of each stage, and what would make it fit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from msa_lite.budget.plan import Plan
from msa_lite.budget.speed import Device, this_device
from msa_lite.errors import UsageError
from msa_lite.merger.bounds import parse_size
from msa_lite.pipeline.prepare.earlier import open_earlier
from msa_lite.pipeline.prepare.models import check_fit_ahead
from msa_lite.pipeline.prepare.questions import terms_left_out
from msa_lite.pipeline.prepare.run import Context
from msa_lite.pipeline.run.demo import demo_stages
from msa_lite.pipeline.staged.plan import plan_training
from msa_lite.pipeline.stages.facts import find_facts
from msa_lite.pipeline.stages.forecast import enough_processes, find_remedies, forecast, try_to_measure
from msa_lite.pipeline.stages.machine import Machine
from msa_lite.pipeline.stages.measure import measure_run, why_run_unmeasured
from msa_lite.pipeline.stages.stage import Stage
from msa_lite.pipeline.verbs.lists import find_verb
from msa_lite.recipe import Recipe, RecipeSource, TrainingRecipe, load_any, load_recipe
from msa_lite.recipe.remarks import lost_filter

_SMALLEST_GPU = 100_000_000  # bytes


def plan(
    recipe: RecipeSource,
    overrides: Iterable[str] = (),
    *,
    gpu: str | int | None = None,
    price_per_hour: float | None = None,
    measure: bool | None = None,
    baseline: str | None = None,
    processes: int = 1,
) -> Plan:
    """Predict memory, disk and time of each stage of a run or a training, from headers and configs.

    gpu: the memory of a GPU, such as "8GB", instead of this machine's device. price_per_hour: of that device. measure:
    load the model and time a few steps on this machine, instead of estimating times; None: if the model is here and
    that takes no more than about 5 seconds. baseline: the method to plan, instead of MSA. processes: those of a
    launcher, each with such a GPU; they divide full fits. Raise UsageError if neither target nor prior is found, on
    this machine or on the Hub, for a training with a baseline or several processes, and as `open_earlier`.
    """
    if measure and gpu is not None:
        raise UsageError("--measure: times this machine; leave --gpu out")
    device = device_of(gpu) if gpu is not None else this_device()
    measure = False if gpu is not None else measure
    if isinstance(load_any(recipe, overrides), TrainingRecipe):
        if baseline is not None or processes > 1:
            raise UsageError("--baseline and --processes: plan a run, not a training; leave them out")
        return plan_training(recipe, overrides, device, price_per_hour, measure)
    loaded = load_recipe(recipe, overrides)
    open_earlier(loaded)  # the run would refuse them
    verb = find_verb("run", loaded) if baseline is None else find_verb("baseline", loaded, baseline)
    scope = verb.scope
    facts = find_facts(loaded, scope.choice)
    check_fit_ahead(loaded, facts.heads)

    def build(recipe: Recipe) -> list[Stage]:
        return [*demo_stages(recipe), *verb.stages(Context(recipe, scope))]

    measured, reason = measure_run(loaded, facts, brief=False) if measure else None, ""
    if measure is None and not (reason := why_run_unmeasured(loaded, facts)):
        measured, reason = try_to_measure(partial(measure_run, loaded, facts))
    machine = Machine(device, processes, measured)
    forecasted = forecast(build(loaded), facts, machine, loaded.folder, reason)
    if not loaded.has_prior and (choice := loaded.prior_reason):
        forecasted = replace(forecasted, notes=[choice, *forecasted.notes])
    first = [*(lost_filter(loaded) if baseline is None else []), *(terms_left_out(loaded) if scope.choice else [])]
    forecasted = replace(forecasted, notes=[*first, *forecasted.notes])
    is_shared = loaded.vector.mode == "full" and processes == 1
    if is_shared and (count := enough_processes(build(loaded), facts, device)):
        launch = f"accelerate launch --num_processes {count} -m msa_lite"
        note = f"{count} of these GPUs hold the fits in full mode together: {launch}"
        forecasted = replace(forecasted, notes=[*forecasted.notes, note])
    remedies = () if forecasted.fits else tuple(find_remedies(loaded, build, facts, machine))
    return replace(forecasted, remedies=remedies, price_per_hour=price_per_hour)


def device_of(size: str | int) -> Device:
    """Return a GPU of this much memory. Raise UsageError for less than any has, such as 8 in the place of 8GB."""
    device = Device("", parse_size(size))
    if device.nbytes < _SMALLEST_GPU:
        raise UsageError(f"--gpu {size}: no GPU has so little memory; write it as 8GB")
    return device
