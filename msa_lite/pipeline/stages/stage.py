"""A run is a list of stages, and every verb is a loop over that list.

The lists are made by `run.msa`, `run.checks`, `baseline.trials`, `staged.training` and
`attack.campaign`. Here are the loops: execute, announce, tell what is done.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from msa_lite.budget.plan import StageCost
from msa_lite.budget.speed import Machine
from msa_lite.io.console.progress import Progress, Step, announce
from msa_lite.io.finished.manifest import partial_folder, previous_folder
from msa_lite.io.finished.seal import load_manifest, why_unfinished
from msa_lite.pipeline.stages.facts import Facts
from msa_lite.report.run.stages import ALL, Holds, ListedStage

Kind = Literal["make", "check", "fit", "measure", "choose", "merge", "score", "observe", "attack", "send"]
State = Literal["done", "to do", "anew"]
_MOST = 5  # reasons of a stage


def free(facts: Facts, machine: Machine) -> Sequence[StageCost]:
    """Return nothing: a stage whose cost is small beside the others'."""
    return ()


def nothing(progress: Progress) -> None:
    """Do nothing: a stage that is only shown."""


@dataclass(frozen=True)
class Stage:
    """One stage of a run: the folder that it makes, all that decides its content, its cost, and the work itself."""

    name: str
    """"forget vector", "merge", "scores: unlearned"; also the key of `needs`, and its label while it runs."""
    kind: Kind
    folder: Path | None
    """The folder that it makes, complete once it exists; None where it makes none."""
    run: Callable[[Progress], Any] = nothing
    """Does the work, unless the folder was made from the same inputs. What it returns is for `execute`."""
    needs: Sequence[str] = ()
    """The names of the stages whose results it is made of."""
    inputs: Callable[[], Mapping[str, Any]] | None = None
    """Returns all that decides the result, as the manifest records it; called once the stages that it needs are done.
    None: that is not known."""
    cost: Callable[[Facts, Machine], Sequence[StageCost]] = free
    """Returns memory, disk and time, from headers and counts of rows alone."""
    says: str = ""
    """What it is for, in a clause that is shown while it runs; empty where its name says it."""
    holds: Holds = ALL
    """The part of its folder that a purge removes, and why."""

    def listed(self, home: Path) -> ListedStage:
        """Return it as the list in a run's folder has it."""
        folder = None if self.folder is None else Path(os.path.relpath(self.folder, home)).as_posix()
        return ListedStage(self.name, self.kind, folder, self.says, self.holds)


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
    return {stage.name: stage.run(progress) for stage in stages}


def steps(stages: Iterable[Stage]) -> list[Step]:
    """Return the stages as steps of a progress display."""
    return [Step(stage.name, stage.says) for stage in stages]


def look_ahead(stages: Iterable[Stage]) -> list[StageState]:
    """Return what a run would do with each stage, in their order."""
    ahead: list[StageState] = []
    for stage in stages:
        pending = {earlier.name for earlier in ahead if earlier.state != "done"}
        state, reasons = _state(stage, [name for name in stage.needs if name in pending])
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
    more = [f"… and {len(reasons) - _MOST} more"] if len(reasons) > _MOST else []
    return ("anew", [*reasons[:_MOST], *more]) if reasons else ("done", [])
