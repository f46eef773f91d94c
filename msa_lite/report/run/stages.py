"""The list of a run's stages as a file in its folder: the folder of each, and what the run is to make."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from msa_lite.errors import UsageError
from msa_lite.io.files.reading import read_object
from msa_lite.io.files.writing import json_form, write_json
from msa_lite.report.tables.reports import reading

STAGES_FILE = "stages.json"


@dataclass(frozen=True)
class ListedStage:
    """A stage of a run, as the list has it."""

    name: str
    kind: str
    folder: str | None
    """From the run's folder; None where the stage makes none."""


@dataclass(frozen=True)
class StageList:
    """The stages of a run, and what its report looks for."""

    stages: tuple[ListedStage, ...]
    """Those of the latest command on the run, and former ones whose folders are still there."""
    vectors: tuple[str, ...] | None
    """The vectors to be fitted; None for a baseline, whose fits have names of their own."""
    chooses: bool
    """True if strengths, or an epoch of a baseline, are chosen by validation rows."""
    strengths: Mapping[str, float]
    """alpha, beta and the filter's λ, where the recipe gives one value of each."""
    models: tuple[str, ...]
    """The models to be scored: target, unlearned and ideal; none where nothing is scored."""
    starts_at_retain: bool
    """True if the forget vector is fitted from the retain vector."""
    data: str = ""
    """The hash of the content of all data sets together, whole; empty where it is not known."""

    @property
    def models_to_choose_by(self) -> tuple[str, ...]:
        """Return the models that have scores on validation rows."""
        return (*self.models, "prior") if self.models and self.chooses else ()


def load_stages(folder: Path) -> StageList:
    """Return the list of a run's stages. Raise UsageError for a run without it, FormatError for a broken one."""
    from pydantic import TypeAdapter

    path = folder / STAGES_FILE
    if not path.is_file():
        raise UsageError(
            f"{folder}: there is no {STAGES_FILE}, so no stage was begun, or an earlier version began it; "
            "run its recipe again"
        )
    with reading(path):
        return TypeAdapter(StageList).validate_python(read_object(path))


def write_stages(stages: StageList, folder: Path) -> None:
    """Write the list into a run's folder. Former stages whose folders are there stay in it."""
    former = load_stages(folder).stages if (folder / STAGES_FILE).is_file() else ()
    there = [stage for stage in former if stage.folder and os.path.lexists(folder / stage.folder)]
    _write(stages, there, folder)


def add_stages(stages: Iterable[ListedStage], folder: Path) -> None:
    """Add stages to the list of a run, such as attacks."""
    _write(load_stages(folder), stages, folder)


def _write(stages: StageList, others: Iterable[ListedStage], folder: Path) -> None:
    """Write the list with other stages behind its own."""
    listed = {stage.folder for stage in stages.stages}
    more = [stage for stage in others if stage.folder not in listed]
    write_json(folder / STAGES_FILE, json_form(replace(stages, stages=(*stages.stages, *more))))
