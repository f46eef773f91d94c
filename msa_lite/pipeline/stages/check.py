"""Check before the work of a run that it fits into memory, with the same plan that `msa-lite plan` shows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from msa_lite.budget.needs import Need
from msa_lite.budget.plan import Plan, StagePlan, gigabytes
from msa_lite.budget.shape import Shape, read_shape, shape_of_config
from msa_lite.budget.speed import Device, this_device
from msa_lite.errors import FormatError, MismatchError
from msa_lite.evals.models import checkpoint_folder
from msa_lite.io.models.devices import bytes_of_others, host_memory
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.pipeline.prepare.models import demo_config
from msa_lite.pipeline.prepare.run import Run
from msa_lite.pipeline.prepare.training import TrainingRun
from msa_lite.pipeline.staged.plan import StageFacts, training_stages
from msa_lite.pipeline.stages.costs import find_remedies, forecast
from msa_lite.pipeline.stages.facts import PlanInputs, RowFacts, demo_rows, has_history
from msa_lite.recipe import Recipe

logger = logging.getLogger(__name__)


def check_memory(run: Run, fits_only: bool = False) -> None:
    """Raise MismatchError where a stage still to run cannot fit into the device's memory; warn where it may not.

    fits_only: True if nothing is scored. The refusal has the numbers, and the change of the recipe that costs least.
    With the plan's `force` it is a warning, too.
    """
    device = _free_device()
    try:
        inputs = _inputs_of(run)
    except FormatError as error:  # a config in words that we do not know
        logger.debug("the memory is not predicted: %s", error)
        return
    made = forecast(run.recipe, inputs, device, run.crew.ranks.count)
    stages = [stage for stage in made.stages if stage.on_device and not _is_done(run, stage, fits_only)]
    if run.plan.method != "msa":  # the loss of a baseline may hold more than is counted
        stages = [replace(stage, need=Need(stage.need.parts, "a baseline's loss")) for stage in stages]
    left = replace(made, stages=stages)
    if not stages or left.fits:
        return
    _refuse(replace(left, remedies=tuple(find_remedies(run.recipe, inputs, device))), run.plan.force)


def check_training_memory(run: TrainingRun, processes: int, force: bool) -> None:
    """Raise MismatchError, or warn, as `check_memory`, for a training in stages."""
    device, start = _free_device(), run.start
    try:
        if start.source is not None:
            shape = _read(start.source.folder, start.source.name)
        else:
            shape = shape_of_config(start.config.to_dict(), "the new model")
    except FormatError as error:
        logger.debug("the memory is not predicted: %s", error)
        return
    facts = []
    for stage in run.stages:
        rows, settings = RowFacts.of(stage.examples), stage.settings
        facts.append(
            StageFacts(
                stage.name,
                rows,
                rows.longest,
                settings.epochs,
                settings.batch_size,
                settings.micro_batch_size,
                settings.compute,
            )
        )
    _check_stages(shape, facts, device, processes, force)


def check_demo_memory(recipe: Recipe, force: bool) -> None:
    """Raise MismatchError, or warn, as `check_memory`, for the target of a demo that is not made yet."""
    demo = recipe.demo
    if demo is None or has_history(recipe):
        return
    rows = demo_rows(demo.retain + demo.forget)
    facts = [StageFacts("target of the demo", rows, rows.longest, demo.tuning_epochs, demo.batch_size, demo.batch_size)]
    _check_stages(shape_of_config(demo_config(demo), "the demo's model"), facts, _free_device(), 1, force)


def _check_stages(shape: Shape, facts: Sequence[StageFacts], device: Device, processes: int, force: bool) -> None:
    plan = Plan(device, training_stages(shape, facts, device, processes), host_memory(), {}, 0)
    if not plan.fits:
        _refuse(plan, force)


def _free_device() -> Device:
    """Return this machine's device with the memory that other processes leave on it."""
    device = this_device()
    others = bytes_of_others() if device.is_gpu else 0
    if not others:
        return device
    name = f"{device.name}: other processes hold {gigabytes(others)} of {gigabytes(device.nbytes)}"
    return replace(device, name=name, nbytes=max(0, device.nbytes - others))


def _inputs_of(run: Run) -> PlanInputs:
    """Return what a plan of a prepared run is made of: its models by their headers, its rows as they are learnt."""
    shapes = {name: _read(source.folder, source.name) for name, source in run.sources.items()}
    return PlanInputs(shapes, {name: RowFacts.of(examples) for name, examples in run.examples.items()})


def _read(folder: Path, name: str) -> Shape:
    return read_shape(load_checkpoint(checkpoint_folder(folder)), name)


def _is_done(run: Run, stage: StagePlan, fits_only: bool) -> bool:
    """Check whether a stage is finished, or none of this run's."""
    if stage.kind in ("sweep", "scores"):
        folder = run.folder / ("sweep" if stage.kind == "sweep" else "evaluation/unlearned")
        return fits_only or folder.exists()
    names = run.vector_names
    if run.plan.method != "msa":  # it learns the forget rows, several times perhaps, and has no goal
        names = [] if stage.vector != "forget" else list(run.plan.vectors)
    elif stage.vector is not None:
        names = [stage.vector]
    return all(run.vector_folder(name).exists() for name in names)


def _refuse(plan: Plan, force: bool) -> None:
    """Raise MismatchError for a plan that cannot fit; warn of one that may not, and of any with `force`."""
    if plan.is_hopeless and not force:
        raise MismatchError(f"{plan.refusal}. --force runs it all the same; `msa-lite plan` shows each stage")
    logger.warning("%s. It is tried all the same", plan.refusal)
