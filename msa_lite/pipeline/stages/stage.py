"""Tell which stages of a run are done, which are to do, and which it would make anew, and why. Nothing is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from msa_lite.io.finished.manifest import partial_folder, previous_folder
from msa_lite.io.finished.seal import load_manifest, why_unfinished

State = Literal["done", "to do", "anew"]
_MOST = 5  # reasons of a stage


@dataclass(frozen=True)
class StageInputs:
    """A stage to look at."""

    label: str
    """Its name: "forget vector"."""
    folder: Path
    """The folder that it makes."""
    inputs: Callable[[], Mapping[str, Any]] | None = None
    """Returns all that decides its result; called if the stages that it needs are done. None: that is not known."""
    needs: Sequence[str] = ()
    """The labels of the stages whose results it is made of."""


@dataclass(frozen=True)
class Ahead:
    """A stage, and what a run would do with it."""

    label: str
    """Its name: "forget vector"."""
    folder: Path | None
    """The folder that it makes, if it makes one."""
    state: State
    """done: it is there already. to do: it is not. anew: it is there, but was made of something else."""
    reasons: Sequence[str] = ()
    """The reasons why it is made anew, or how it goes on."""
    seconds: tuple[float, float] | None = None
    """The shortest and the longest time; None where it is not known."""

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        return {
            "stage": self.label,
            "folder": str(self.folder) if self.folder else None,
            "state": self.state,
            "reasons": list(self.reasons),
            "seconds": list(self.seconds) if self.seconds else None,
        }


def look_ahead(stages: Iterable[StageInputs]) -> list[Ahead]:
    """Return what a run would do with each stage, in their order."""
    ahead: list[Ahead] = []
    for stage in stages:
        pending = {one.label for one in ahead if one.state != "done"}
        needed = [label for label in stage.needs if label in pending]
        ahead.append(Ahead(stage.label, stage.folder, *_state(stage, needed)))
    return ahead


def _state(stage: StageInputs, pending: Sequence[str]) -> tuple[State, list[str]]:
    """Return the state of a stage, with its reasons. pending: the stages before it that are not done."""
    if os.path.lexists(previous_folder(stage.folder)):
        return "anew", ["a stop came while it was replaced; the run settles that first"]
    if load_manifest(stage.folder) is None:
        return "to do", ["goes on where it stopped"] if partial_folder(stage.folder).is_dir() else []
    if pending:
        return "anew", [f"made of: {', '.join(pending)}"]
    if stage.inputs is None:
        return "anew", ["unless it was made of the same"]
    reasons = why_unfinished(stage.folder, stage.inputs())
    more = [f"… and {len(reasons) - _MOST} more"] if len(reasons) > _MOST else []
    return ("anew", [*reasons[:_MOST], *more]) if reasons else ("done", [])
