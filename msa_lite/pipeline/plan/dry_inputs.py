"""Look at the inputs of a run or training by headers alone: what is read, what is not here yet, and a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msa_lite.budget.plan import Plan
from msa_lite.budget.speed import this_device
from msa_lite.data import is_remote_data
from msa_lite.errors import MsaError
from msa_lite.io.console.progress import readable
from msa_lite.io.files.reading import read_yaml
from msa_lite.io.finished.seal import load_manifest
from msa_lite.pipeline.prepare.models import WRITTEN_OUT, names_adapter
from msa_lite.pipeline.prepare.prompt import PROMPT_FILE
from msa_lite.pipeline.prepare.questions import SETS, source_of
from msa_lite.pipeline.prepare.training import kept_file
from msa_lite.pipeline.staged.plan import plan_training
from msa_lite.pipeline.stages.costs import forecast
from msa_lite.pipeline.stages.facts import PlanInputs, find_headers, find_plan_inputs, has_history
from msa_lite.recipe import Recipe, TrainingRecipe
from msa_lite.report.provenance import RECIPE_FILE


@dataclass(frozen=True)
class Reading:
    """A model or data set that is read."""

    role: str
    """"target", "forget rows", …"""
    name: str
    """Its folder, file or repository, as the recipe names it."""
    amount: str | None = None
    """Its size, where it is known: "538 MB", "24 rows"."""

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        return {"role": self.role, "name": self.name, "amount": self.amount}


@dataclass(frozen=True)
class Look:
    """The inputs of a command, as far as they can be seen without weights."""

    recipe: Recipe | TrainingRecipe
    """The recipe, with merged models in the place of adapters that were merged before."""
    plan: Plan
    """The prediction of memory, disk and time."""
    times: Mapping[str, tuple[float, float]]
    """The shortest and the longest time by the label of a stage."""
    blockers: Sequence[str] = ()
    """What a run does first, and without which its inputs cannot be checked."""
    inputs: PlanInputs | None = None
    """The sizes of the models and the rows, of a run."""
    notes: Sequence[str] = field(default=())
    """Remarks, one line each."""


def look_at_run(recipe: Recipe, every_checkpoint: bool = False) -> Look:
    """Look at the inputs of a run. every_checkpoint: also at all checkpoints of the recipe's history.

    Raise UsageError where the sizes of no model can be read.
    """
    inputs = find_plan_inputs(recipe)
    plan = forecast(recipe, inputs, this_device())
    blockers = [f"download {readable(inputs.download)} of weights"] if inputs.download else []
    names = {"target": recipe.target, "prior": recipe.prior_checkpoint}
    blockers += [f"fetch the {role} {names.get(role, '')}".rstrip() for role in inputs.missing]
    if every_checkpoint and recipe.history:
        heads = {item.checkpoint: find_headers(item.checkpoint) for item in recipe.history.checkpoints}
        blockers += [f"fetch {name}" for name, head in heads.items() if head is None or not head.shards]
    if recipe.demo is not None and not _demo_is_made(recipe):
        blockers.append("make the models and data of the demo")
    recipe, merged = _with_merged(recipe)
    blockers += [f"merge the {role}, an adapter, into its base" for role in merged]
    if recipe.prompt.kind == "auto" and not (recipe.folder / PROMPT_FILE).is_file():
        blockers.append("find the prompt (prompt: auto)")
    return Look(recipe, plan, _run_times(recipe, plan), blockers, inputs, plan.notes)


def _demo_is_made(recipe: Recipe) -> bool:
    """Check whether the models of a demo are there, made with the recipe's own settings."""
    if not has_history(recipe):
        return False
    try:
        before = read_yaml(recipe.folder / RECIPE_FILE)
    except MsaError:
        return False
    return (before.get("demo"), before.get("seed")) == (recipe.model_dump(mode="json")["demo"], recipe.seed)


def _with_merged(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """Return the recipe with models that were merged before in the place of adapters, and the adapters to merge."""
    if recipe.history is not None:
        roles = {"target": recipe.target}
    else:
        roles = {"target": recipe.target, "prior": recipe.prior_checkpoint}
    changes, missing = {}, []
    for role in (role for role in WRITTEN_OUT if role in roles and names_adapter(roles[role])):
        if load_manifest(recipe.folder / role):
            changes[role] = str(recipe.folder / role)
        else:
            missing.append(role)
    return recipe.model_copy(update=changes), missing


def _run_times(recipe: Recipe, plan: Plan) -> dict[str, tuple[float, float]]:
    """Return the times of the plan by the labels of a run's stages."""
    times: dict[str, tuple[float, float]] = {}
    models = ["target", "unlearned", *(["ideal"] if recipe.evaluate and recipe.evaluate.ideal else [])]
    before = (0.0, 0.0)
    for stage in plan.stages:
        if stage.seconds is None:
            continue
        low, high = stage.seconds
        if stage.kind == "goal":  # the first fit waits for it
            before = low, high
        elif stage.kind == "fit":
            times[f"{stage.vector} vector"] = low + before[0], high + before[1]
            before = (0.0, 0.0)
        elif stage.kind == "scores":
            times |= {f"scores: {name}": (low / len(models), high / len(models)) for name in models}
        else:
            times["choosing alpha and beta" if stage.kind == "sweep" else "merge"] = low, high
    return times


def readings(recipe: Recipe, look: Look) -> list[Reading]:
    """Return the models and data that a run reads."""
    names = {"target": recipe.target, "prior": recipe.prior_checkpoint, "tokenizer": recipe.tokenizer}
    names |= {"ideal": recipe.evaluate.ideal, "benchmark": recipe.evaluate.data} if recipe.evaluate else {}
    shapes = look.inputs.shapes if look.inputs else {}
    missing = look.inputs.missing if look.inputs else ()
    sizes = {role: readable(shape.stored) for role, shape in shapes.items() if role not in missing}
    models = [Reading(role, name, sizes.get(role)) for role, name in names.items() if name]
    sets = {"forget": recipe.forget.data, "retain": recipe.retain.data if recipe.retain else None}
    if recipe.evaluate:
        own = {name: getattr(recipe.evaluate, name) for name in SETS}
        sets |= {name if name not in sets else f"scored {name}": data for name, data in own.items()}
    sets["probe.against"] = recipe.probe.against
    counts = {name: f"{len(rows)} rows" for name, rows in (look.inputs.examples if look.inputs else {}).items()}
    rows = [Reading(f"{name} rows", data.path, counts.get(name)) for name, data in sets.items() if data]
    return [*models, *rows, *(Reading("earlier run", name) for name in recipe.earlier)]


def look_at_training(recipe: TrainingRecipe) -> Look:
    """Look at the inputs of a training. Raise UsageError where the sizes of its model cannot be read."""
    plan = plan_training(recipe, (), this_device())
    size = plan.disk.get("download", 0)
    blockers = [f"download {readable(size)} of weights"] if size else []
    for stage in recipe.stages:
        source, kept = source_of(stage.sets[0], recipe.columns), kept_file(stage, recipe.columns, recipe.folder)
        if stage.tokens is not None and is_remote_data(source) and not kept.is_file():
            blockers.append(f"download {stage.tokens} tokens of {source.path}")
    names = (stage.name.removeprefix("the training of ") for stage in plan.stages)
    times = {name: stage.seconds for name, stage in zip(names, plan.stages, strict=True) if stage.seconds}
    return Look(recipe, plan, times, blockers, notes=plan.notes)


def training_readings(recipe: TrainingRecipe) -> list[Reading]:
    """Return the model and the data that a training reads."""
    models = [Reading("model", recipe.model)] if isinstance(recipe.model, str) else []
    sets = [(number, data) for number, stage in enumerate(recipe.stages, 1) for data in stage.sets]
    return [*models, *(Reading(f"rows of stage {number}", data.path) for number, data in sets)]
