"""A run is a list of stages, and every verb is a loop over that list.

The lists are made by `run.msa`, `run.checks`, `baseline.trials`, `staged.training` and
`attack.campaign`. Here are the loops: execute, announce, tell what is done, forecast memory
and time, check that what is left fits, and find what would make it fit.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from msa_lite.budget.plan import Plan, Remedy, StageCost, combine_costs, disk_of, gigabytes
from msa_lite.budget.speed import Device, Machine, this_device
from msa_lite.errors import ALL_THE_SAME, MismatchError, RecipeError, StageError, at_most, with_retries
from msa_lite.io.console.progress import Progress, Step, announce
from msa_lite.io.files.writing import nearest_place
from msa_lite.io.finished.manifest import partial_folder, previous_folder
from msa_lite.io.finished.seal import entries, load_manifest, remove_ours, why_unfinished
from msa_lite.io.models.devices import bytes_of_others, free_ram, host_memory
from msa_lite.io.models.transit import check_room
from msa_lite.pipeline.stages.facts import Facts
from msa_lite.recipe import Recipe, load_recipe
from msa_lite.report.run.stages import ListedStage

logger = logging.getLogger(__name__)

Kind = Literal["make", "check", "fit", "measure", "choose", "merge", "score", "observe", "attack", "send"]
State = Literal["done", "to do", "anew"]
_MOST = 5  # reasons of a stage


@dataclass(frozen=True)
class Stage:
    """One stage of a run: the folder that it makes, all that decides its content, its cost, and the work itself."""

    name: str
    """"forget vector", "merge", "scores: unlearned"; also the key of `needs`, and its label while it runs."""
    kind: Kind
    folder: Path | None
    """The folder that it makes, complete once it exists; None where it makes none."""
    run: Callable[[Progress], Any] = lambda progress: None
    """Does the work, unless the folder was made from the same inputs. What it returns is for `execute`. Default: a
    stage that is only shown."""
    needs: Sequence[str] = ()
    """The names of the stages whose results it is made of."""
    inputs: Callable[[], Mapping[str, Any]] | None = None
    """Returns all that decides the result, as the manifest records it; called once the stages that it needs are done.
    None: that is not known."""
    cost: Callable[[Facts, Machine], Sequence[StageCost]] = lambda facts, machine: ()
    """Returns memory, disk and time, from headers and counts of rows alone. Default: small beside the others'."""
    says: str = ""
    """What it is for, in a clause that is shown while it runs; empty where its name says it."""
    temporary: str | None = None
    """The kind of its folder, where that goes once the stages that need it are done. It is made again only for one that
    is not. None: it stays."""

    def listed(self, home: Path) -> ListedStage:
        """Return it as the list in a run's folder has it."""
        folder = None if self.folder is None else Path(os.path.relpath(self.folder, home)).as_posix()
        return ListedStage(self.name, self.kind, folder)


@dataclass(frozen=True)
class StageState:
    """A stage, and what a run would do with it."""

    json_keys: ClassVar = {
        "stage": "name",
        "folder": "folder",
        "state": "state",
        "reasons": "reasons",
    }

    name: str
    """Its name: "forget vector"."""
    folder: Path | None
    """The folder that it makes, if it makes one."""
    state: State
    """done: it is there already. to do: it is not. anew: it is there, but was made of something else."""
    reasons: Sequence[str] = ()
    """The reasons why it is made anew, or how it goes on."""
    says: str = ""
    """What the stage is for, in a clause."""


@dataclass(frozen=True)
class DryRun:
    """The work of a command, looked at ahead: its stages and outputs."""

    json_keys: ClassVar = {
        "command": "command", "output": "folder", "stages": "stages", "writes": "writes", "notes": "notes",
    }  # fmt: skip

    command: str
    """The command, as "baseline npo"."""
    folder: Path
    """The folder that it writes into."""
    stages: Sequence[StageState]
    """The stages in their order."""
    notes: Sequence[str] = ()
    """Remarks, one line each."""
    files: Sequence[str] = ()
    """The files that it writes beside the folders of stages."""

    @property
    def writes(self) -> list[str]:
        """Return the folders and files that it would write."""
        folders = [str(stage.folder) for stage in self.stages if stage.state != "done" and stage.folder]
        return [*folders, *(str(self.folder / name) for name in self.files)]

    @property
    def is_done(self) -> bool:
        """Check whether no stage is left to do."""
        return all(stage.state == "done" for stage in self.stages)


def unique(stages: Iterable[Stage]) -> list[Stage]:
    """Return the stages, each name once: where two parts of a run want the same scores, the first makes them."""
    named: dict[str, Stage] = {}
    for stage in stages:
        named.setdefault(stage.name, stage)
    return list(named.values())


def execute(stages: Sequence[Stage], progress: Progress, later: Sequence[Step] = ()) -> dict[str, Any]:
    """Do the stages in their order; return what each gave back, by its name.

    Each does only what is missing or was made from other inputs. An error leaves what is finished in place. later:
    what follows them in the same count.
    """
    announce(progress, [*steps(stages), *later])
    results: dict[str, Any] = {}
    for stage in stages:
        if not _is_spent(stage, stages):
            results[stage.name] = stage.run(progress)
        for other in (other for other in stages if other.temporary and stage in _users(other, stages)[-1:]):
            assert other.folder is not None, "it goes"
            is_own = (load_manifest(other.folder) or {"kind": other.temporary})["kind"] == other.temporary
            if is_own and not remove_ours(other.folder) and entries(other.folder):  # without a manifest, none is ours
                logger.warning("%s: holds files that are not as msa-lite wrote them, so they stay", other.folder)
    return results


def _users(stage: Stage, stages: Iterable[Stage]) -> list[Stage]:
    """Return the stages that need this one."""
    return [other for other in stages if stage.name in other.needs]


def missing(stages: Sequence[Stage]) -> list[Stage]:
    """Return the stages whose folders are not there; a temporary one only if one that needs it is missing, too."""
    gone = [stage for stage in stages if stage.folder and not stage.folder.exists()]
    used = [stage for stage in gone if stage.temporary and _users(stage, stages)]
    return [stage for stage in gone if stage not in used or any(user in gone for user in _users(stage, stages))]


def _is_spent(stage: Stage, stages: Sequence[Stage]) -> bool:
    """Check whether a stage is temporary, and all that need it are done."""
    users = _users(stage, stages) if stage.temporary else []
    if not users or missing(users):
        return False
    wanted = {user.name for user in users}
    for other in reversed(stages):
        wanted |= {*other.needs} if other.name in wanted else set()
    chain = [other for other in stages if other.name in wanted and other is not stage]
    states = {ahead.name: ahead.state for ahead in look_ahead(chain)}
    return all(states[user.name] == "done" for user in users)


def steps(stages: Iterable[Stage]) -> list[Step]:
    """Return the stages as steps of a progress display."""
    return [Step(stage.name, stage.says) for stage in stages]


def look_ahead(stages: Sequence[Stage]) -> list[StageState]:
    """Return what a run would do with each stage, in their order."""
    ahead: list[StageState] = []
    for stage in stages:
        pending = {earlier.name for earlier in ahead if earlier.state != "done"}
        state, reasons = _state(stage, [name for name in stage.needs if name in pending])
        if state != "done" and _is_spent(stage, stages):
            state, reasons = "done", []
        ahead.append(StageState(stage.name, stage.folder, state, reasons, stage.says))
    return ahead


def _state(stage: Stage, pending: Sequence[str]) -> tuple[State, list[str]]:
    """Return the state of a stage, with its reasons. pending: the stages that it needs and that are not done."""
    if stage.folder is None:
        return "to do", []
    if os.path.lexists(previous_folder(stage.folder)):
        return "anew", ["the last run stopped while replacing it; this run first restores a whole one"]
    if load_manifest(stage.folder) is None:
        return "to do", ["goes on where it stopped"] if partial_folder(stage.folder).is_dir() else []
    if pending:
        return "anew", [f"made of: {', '.join(pending)}"]
    if stage.inputs is None:
        return "anew", ["its inputs are not known yet; kept if they are the same"]
    reasons = why_unfinished(stage.folder, stage.inputs())
    return ("anew", at_most(reasons, _MOST)) if reasons else ("done", [])


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
