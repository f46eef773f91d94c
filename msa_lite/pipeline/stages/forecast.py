"""Forecast a list of stages on a machine, check that what is left of it fits, and find what would make it fit."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from msa_lite.budget.plan import Plan, Remedy, StageCost, combine_costs, disk_of, gigabytes
from msa_lite.budget.speed import Device, Machine, this_device
from msa_lite.errors import ALL_THE_SAME, MismatchError, RecipeError, StageError, with_retries
from msa_lite.io.files.writing import nearest_place
from msa_lite.io.models.devices import bytes_of_others, free_ram, host_memory
from msa_lite.io.models.waiting import check_room
from msa_lite.pipeline.stages.facts import Facts
from msa_lite.pipeline.stages.stage import Stage
from msa_lite.recipe import Recipe, load_recipe

logger = logging.getLogger(__name__)


def forecast(stages: Sequence[Stage], facts: Facts, machine: Machine, folder: Path) -> Plan:
    """Return the memory, disk and time of a list of stages. folder: that of the run, for the free space on its disk."""
    costs = [cost for stage in stages for cost in stage.cost(facts, machine)]
    rough = dict.fromkeys(f"{shape.name}: {shape.rough}" for shape in facts.shapes.values() if shape.rough)
    notes = [*facts.notes, *(f"{line}: its activations are a rough estimate" for line in rough)]
    ahead = {"download": facts.download, "models written out": facts.written_out}
    disk = disk_of(costs) | {name: size for name, size in ahead.items() if size}
    free = shutil.disk_usage(nearest_place(folder)).free
    return Plan(machine.device, combine_costs(costs), host_memory(), disk, free, notes)


def enough_processes(stages: Sequence[Stage], facts: Facts, device: Device) -> int | None:
    """Return how many GPUs share fits that do not fit on one; None where they do, or 8 are too few."""
    for count in (1, 2, 4, 8) if device.is_gpu else ():
        costs = [cost for stage in stages for cost in stage.cost(facts, Machine(device, count)) if cost.kind == "fit"]
        if max((cost.need.nbytes for cost in costs), default=0) <= device.nbytes:
            return count if count > 1 else None
    return None


def check_memory(
    left: Sequence[Stage], facts: Facts, processes: int, remedies: Callable[[Machine], Iterator[Remedy]], force: bool
) -> None:
    """Raise MismatchError where a stage cannot fit into the device's memory, or layers find no room to wait in.

    Warn where it may not fit. left: the stages that are still to be made. remedies: yields changes of the recipe by
    what they cost, for the message. force: warn in any case.
    """
    machine = Machine(_free_device(), processes)
    costs_of = [(stage, cost) for stage in left for cost in stage.cost(facts, machine) if cost.on_device]
    plan = Plan(machine.device, combine_costs(cost for _, cost in costs_of), host_memory(), {}, 0)
    if not costs_of:
        return
    if plan.fits:
        for stage, cost in costs_of if not force else ():
            _check_waiting(stage, cost)
        return
    plan = replace(plan, remedies=tuple(remedies(machine)))
    if plan.is_hopeless and not force:
        change = next((change.overrides for change in plan.remedies if change.fits), None)
        retries = {"to run what fits": change} if change else {}
        error = MismatchError(f"{plan.refusal}. `msa-lite plan` shows each stage")
        raise with_retries(error, {**retries, ALL_THE_SAME: ["--force"]})
    logger.warning("%s. The run tries it anyway", plan.refusal)


def _check_waiting(stage: Stage, cost: StageCost) -> None:
    """Raise MismatchError where the layers of a stage that stream find no room in RAM and on the disk."""
    is_fit = cost.kind == "fit" and stage.folder is not None
    folder = nearest_place(stage.folder) if is_fit and stage.folder else Path(tempfile.gettempdir())
    try:
        check_room(cost.waiting, free_ram(), folder)
    except StageError as error:
        raise MismatchError(f"{cost.name}: {error}") from error


def _free_device() -> Device:
    """Return this machine's device with the memory that other processes leave on it."""
    device = this_device()
    held = bytes_of_others() if device.is_gpu else 0
    if not held:
        return device
    name = f"{device.name}: other processes hold {gigabytes(held)} of {gigabytes(device.nbytes)}"
    return replace(device, name=name, nbytes=max(0, device.nbytes - held))


def find_remedies(
    recipe: Recipe, build: Callable[[Recipe], Sequence[Stage]], facts: Facts, machine: Machine
) -> Iterator[Remedy]:
    """Yield changes of the recipe that lower its peak, by what they cost, each with the peak that it leaves.

    build: returns the stages of a recipe.
    """

    def plan(changed: Recipe) -> Plan:
        return forecast(build(changed), facts, machine, recipe.folder)

    highest, enough = plan(recipe).peak.need.nbytes, list[set[str]]()
    for overrides, harm in _changes(recipe, machine.processes):
        if any(change <= {*overrides} for change in enough):  # some of it fits already
            continue
        try:
            changed = plan(load_recipe(recipe, overrides))
        except RecipeError:  # keys that exclude each other in this recipe
            continue
        if (peak := changed.peak.need.nbytes) < highest:
            enough += [{*overrides}] * changed.fits
            yield Remedy(tuple(overrides), harm, peak, changed.fits)


def _changes(recipe: Recipe, processes: int) -> Iterator[tuple[list[str], str]]:
    """Yield changes by harm: first those that leave the result as it is, last those that change it most.

    processes: those that share a full fit, whose optimiser cannot have 8 bits then.
    """
    spec = recipe.vector
    if spec.micro_batch_size != "auto":
        yield ["vector.micro_batch_size=auto"], "no change of the result"
    is_divided = spec.mode == "full" and processes > 1
    if not is_divided and (spec.optimizer == "adamw" or (spec.optimizer == "auto" and spec.mode != "qlora")):
        yield ["vector.optimizer=adamw_8bit"], "nearly no change of the result"
    modes = {"full": ["lora", "qlora"], "lora": ["qlora"], "qlora": []}[spec.mode]
    half = max(8, spec.max_length // 2)
    shorter, rank = [f"vector.max_length={half}"], [f"vector.lora.rank={max(1, spec.lora.rank // 4)}"]
    yield shorter, "longer rows are cut"
    for mode in modes:
        yield [f"vector.mode={mode}"], {"lora": "the vector is of low rank", "qlora": "the prior is in 4 bits"}[mode]
    if spec.mode != "full":
        yield rank, "the vector is of lower rank"
    smallest = [*([f"vector.mode={modes[-1]}"] if modes else []), *rank, *shorter]
    yield smallest, "a lower rank and shorter rows" + (", and the prior is in 4 bits" if modes else "")
    if recipe.evaluate:
        points = [
            "evaluate=null",
            "forget.alpha=1.0",
            *(["retain.beta=1.0"] if recipe.retain and not recipe.starts_at_retain else []),
        ]
        for changed in ([], *([f"vector.mode={mode}"] for mode in modes)):
            yield [*changed, *points], "nothing is scored here, so α and β are not chosen; evaluate on another machine"
        yield [*smallest, *points], "nothing is scored here, and the vector is rougher"
