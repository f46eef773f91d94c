"""Plan a run or a training before it starts: the memory, disk and time of each stage, and what would make it fit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from msa_lite.budget.machine import Device, this_device
from msa_lite.budget.plan import Plan
from msa_lite.errors import UsageError
from msa_lite.merger.plan import parse_size
from msa_lite.pipeline.planning_inputs import PlanInputs, find_plan_inputs
from msa_lite.pipeline.planning_measure import measure_times
from msa_lite.pipeline.planning_run import find_remedies, forecast
from msa_lite.pipeline.planning_training import plan_training
from msa_lite.recipe import Recipe, RecipeSource, TrainingRecipe, load_any, load_recipe

_SMALLEST_GPU = 100_000_000  # bytes


def plan(
    recipe: RecipeSource,
    overrides: Iterable[str] = (),
    *,
    gpu: str | int | None = None,
    price_per_hour: float | None = None,
    measure: bool = False,
) -> Plan:
    """Predict memory, disk and time of each stage of a run or a training, from headers and configs; read no weights.

    gpu: the memory of a GPU, such as "8GB", in the place of this machine's device. price_per_hour: of that device.
    measure: load the prior and time a few steps on this machine, for times in the place of estimates. Raise UsageError
    where neither target nor prior can be found, on this machine or on the Hub.
    """
    if measure and gpu is not None:
        raise UsageError("--measure: times this machine; leave --gpu out")
    device = _device_of(gpu) if gpu is not None else this_device()
    if isinstance(load_any(recipe, overrides), TrainingRecipe):
        if measure:
            raise UsageError("--measure: times the fits of a run, not a training; leave it out")
        return plan_training(recipe, overrides, device, price_per_hour)
    loaded = load_recipe(recipe, overrides)
    inputs = find_plan_inputs(loaded)
    measured = measure_times(loaded, inputs) if measure else None
    made = forecast(loaded, inputs, device, measured=measured)
    if loaded.vector.mode == "full" and (count := _enough_processes(loaded, inputs, device)):
        launch = f"accelerate launch --num_processes {count} -m msa_lite"
        made = replace(
            made, notes=[*made.notes, f"{count} of these GPUs hold the fits in full mode together: {launch}"]
        )
    remedies = () if made.fits else tuple(find_remedies(loaded, inputs, device))
    return replace(made, remedies=remedies, price_per_hour=price_per_hour)


def _device_of(size: str | int) -> Device:
    """Return a GPU of this much memory. Raise UsageError for less than any has, such as 8 in the place of 8GB."""
    device = Device("", parse_size(size))
    if device.nbytes < _SMALLEST_GPU:
        raise UsageError(f"--gpu {size}: no GPU has so little memory; write it as 8GB")
    return device


def _enough_processes(recipe: Recipe, inputs: PlanInputs, device: Device) -> int | None:
    """Return how many GPUs share a fit in full mode that does not fit on one; None where it does, or 8 are too few."""
    for count in (1, 2, 4, 8) if device.is_gpu else ():
        fits = [stage.need.nbytes for stage in forecast(recipe, inputs, device, count).stages if stage.kind == "fit"]
        if max(fits, default=0) <= device.nbytes:
            return count if count > 1 else None
    return None
