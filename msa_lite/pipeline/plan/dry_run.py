"""Say what a command on a recipe would do: its stages, what it reads and writes, how long it takes. Write nothing.

Where all models are on this machine, the inputs of the run are prepared and checked as the run does it, and each
stage is compared with the manifest of its folder. Otherwise only headers are read, and no weights are downloaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from msa_lite.budget.plan import Plan
from msa_lite.io.console.libraries import require
from msa_lite.io.console.progress import readable
from msa_lite.pipeline.baseline.run import baseline_ahead, check_baseline, plan_baseline
from msa_lite.pipeline.plan.dry_inputs import Look, Reading, look_at_run, look_at_training, readings, training_readings
from msa_lite.pipeline.plan.dry_stages import probe_ahead, rough_stages, rough_training, run_ahead, vectors_ahead
from msa_lite.pipeline.prepare.run import Run, RunPlan, prepare
from msa_lite.pipeline.run.choice import check_sweep
from msa_lite.pipeline.run.folder import check_run_folder
from msa_lite.pipeline.run.knowledge import PROBE_FOLDER
from msa_lite.pipeline.run.msa import check_run, check_vectors, msa_plan, wanted_vectors
from msa_lite.pipeline.run.probe import check_probe, probe_plan
from msa_lite.pipeline.run.report import MARKDOWN_FILE, check_publishing
from msa_lite.pipeline.staged.training import training_ahead
from msa_lite.pipeline.stages.facts import inspect_model
from msa_lite.pipeline.stages.stage import Ahead, StageInputs, look_ahead
from msa_lite.recipe import Recipe, RecipeSource, TrainingRecipe, load_recipe, load_training
from msa_lite.record.seal import KEY_FILE, RECORD_FILE
from msa_lite.report.attacks import ATTACKS_FOLDER
from msa_lite.report.page import PAGE_FILE
from msa_lite.report.provenance import RECIPE_FILE
from msa_lite.report.reports import REPORT_FILE
from msa_lite.report.verdict import VERDICT_FILE

CommandName = Literal["run", "sweep", "vector", "baseline", "probe", "train"]
_OF_RUNS = (RECIPE_FILE, VERDICT_FILE, RECORD_FILE, KEY_FILE, PAGE_FILE, MARKDOWN_FILE, REPORT_FILE)
_FILES = {
    "run": _OF_RUNS,
    "baseline": _OF_RUNS,
    "probe": (RECIPE_FILE, KEY_FILE, f"{PROBE_FOLDER}/{MARKDOWN_FILE}"),
    "sweep": (RECIPE_FILE, KEY_FILE),
    "vector": (RECIPE_FILE, KEY_FILE),
    "train": (RECIPE_FILE, "stages.json", "history.yaml"),
    "evaluate": (),
    "attack": (f"{ATTACKS_FOLDER}/{REPORT_FILE}", PAGE_FILE, MARKDOWN_FILE, REPORT_FILE, RECORD_FILE),
}


@dataclass(frozen=True)
class DryRun:
    """The work of a command, looked at ahead: its stages, inputs and outputs."""

    command: str
    """The command, as "baseline npo"."""
    folder: Path
    """The folder that it writes into."""
    stages: Sequence[Ahead]
    """The stages in their order."""
    reads: Sequence[Reading]
    """The models and data that it reads."""
    plan: Plan | None = None
    """The prediction of memory, disk and time; None where there is none."""
    notes: Sequence[str] = field(default=())
    """Remarks, one line each."""

    @property
    def files(self) -> list[str]:
        """Return the names of the files that it writes beside the folders of stages."""
        return list(_FILES[self.command.partition(" ")[0]])

    @property
    def writes(self) -> list[str]:
        """Return the folders and files that it would write."""
        folders = [str(one.folder) for one in self.stages if one.state != "done" and one.folder]
        return [*folders, *(str(self.folder / name) for name in self.files)]

    @property
    def seconds(self) -> tuple[float, float] | None:
        """Return the shortest and the longest time of what is not done; None where no time is known."""
        known = [one.seconds for one in self.stages if one.state != "done" and one.seconds]
        if not known and any(one.state != "done" for one in self.stages):
            return None
        return math.fsum(low for low, _ in known), math.fsum(high for _, high in known)

    @property
    def is_done(self) -> bool:
        """Check whether no stage is left to do."""
        return all(one.state == "done" for one in self.stages)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON-able form, for `--json`."""
        return {
            "command": self.command,
            "output": str(self.folder),
            "stages": [one.as_dict() for one in self.stages],
            "reads": [reading.as_dict() for reading in self.reads],
            "writes": self.writes,
            "seconds": list(self.seconds) if self.seconds else None,
            "disk": dict(self.plan.disk) if self.plan else None,
            "fits": self.plan.fits if self.plan else None,
            "notes": list(self.notes),
        }


def dry_run(
    recipe: RecipeSource,
    overrides: Iterable[str] = (),
    *,
    command: CommandName = "run",
    method: str = "msa",
    which: str = "all",
    force: bool = False,
) -> DryRun:
    """Return what a command on a recipe would do. Nothing is written into its output.

    command: its name; "train" takes the recipe of a training. method: the method of `baseline`. which: the vector of
    `vector`. force: as of the command.

    Raise what the command raises before its work, as far as that can be told without downloading weights.
    """
    require("train")
    if command == "train":
        return _dry_training(load_training(recipe, overrides), force)
    recipe = load_recipe(recipe, overrides)
    plan, settings = plan_baseline(method, recipe) if command == "baseline" else (_plan(command, recipe), ())
    plan = replace(plan, force=force)
    check_run_folder(recipe.folder, "run")
    if command == "sweep":
        check_sweep(recipe)
    look = look_at_run(recipe, every_checkpoint=command == "probe")
    name = f"baseline {method}" if command == "baseline" else command
    made = DryRun(name, plan.folder, (), readings(recipe, look), look.plan, _notes(look))
    if look.blockers:
        stages = rough_stages(command, recipe, plan, which, settings)
        first = [Ahead(blocker, None, "to do") for blocker in look.blockers]
        return _timed(replace(made, stages=[*first, *stages]), look)
    assert isinstance(look.recipe, Recipe), "of a run"
    run = prepare(look.recipe, plan)
    if command == "run":
        check_publishing(recipe)
    _check(command, run, settings)
    if command == "probe":
        ahead = probe_ahead(run)
    elif command == "vector":
        ahead = vectors_ahead(run, wanted_vectors(run, which))
    elif settings:
        ahead = baseline_ahead(run, settings)
    else:
        ahead = run_ahead(run, command)
    if command == "run" and recipe.publish.repo:
        ahead = [*ahead, Ahead(f"send to {recipe.publish.repo}", None, "to do")]
    return _timed(replace(made, stages=ahead), look)


def dry_evaluation(model: str, out: str, sets: Mapping[str, str], ideal: str | None, recipe: Recipe | None) -> DryRun:
    """Return what `evaluate` would do. Nothing is written, and no weights are downloaded.

    sets: the names of the data by role, as "forget rows". recipe: one whose questions are asked; it gives the time.
    Raise UsageError for a model that is not there.
    """
    require("train")
    facts, folder = inspect_model(model), Path(out)
    size = sum(entry.nbytes for entry in facts.checkpoint.tensors.values())
    reads = [Reading("model", model, readable(size)), *([Reading("ideal", ideal)] if ideal else [])]
    reads += [Reading(role, name) for role, name in sets.items()]
    stages = look_ahead(
        [StageInputs("scores", folder), *([StageInputs("scores: ideal", folder / "ideal")] if ideal else [])]
    )
    made = DryRun("evaluate", folder, stages, reads)
    if recipe is None:
        return made
    look = look_at_run(recipe)
    times = {"scores": look.times.get("scores: unlearned"), "scores: ideal": look.times.get("scores: unlearned")}
    return replace(made, stages=[replace(one, seconds=times[one.label]) for one in stages], notes=look.plan.notes)


def _dry_training(recipe: TrainingRecipe, force: bool) -> DryRun:
    """Return what `train` would do."""
    check_run_folder(recipe.folder, "training")
    look = look_at_training(recipe)
    ahead = rough_training(recipe) if look.blockers else training_ahead(recipe, force)
    first = [Ahead(blocker, None, "to do") for blocker in look.blockers]
    made = DryRun("train", recipe.folder, [*first, *ahead], training_readings(recipe), look.plan, _notes(look))
    return _timed(made, look)


def _notes(look: Look) -> list[str]:
    """Return the notes of a look, with one on inputs that are not there yet."""
    later = ["not all inputs are here yet: the command checks them before it starts"] if look.blockers else []
    return [*look.notes, *later]


def _plan(command: CommandName, recipe: Recipe) -> RunPlan:
    return probe_plan(recipe) if command == "probe" else msa_plan(recipe)


def _check(command: CommandName, run: Run, settings: Sequence[Any]) -> None:
    """Raise what a command raises about a prepared run before its work."""
    if command == "probe":
        check_probe(run)
    elif settings:
        check_baseline(run, settings)
    elif command == "vector":
        check_vectors(run)
    else:
        check_run(run)


def _timed(made: DryRun, look: Look) -> DryRun:
    """Return the dry run with the times of the plan's stages."""
    if look.plan is None or made.command.startswith(("baseline", "probe")):
        return made
    times: Mapping[str, tuple[float, float]] = look.times
    return replace(made, stages=[replace(one, seconds=times.get(one.label)) for one in made.stages])
