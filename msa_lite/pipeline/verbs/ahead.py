"""Look ahead at a command on a recipe: what it would do (`dry_run`), and what it would take (`plan`). Write nothing.

A dry run prepares and checks the inputs as the run does it, where all models are on this machine, and compares each
stage with the manifest of its folder. Otherwise, and for a plan, only headers are read, and no weights are downloaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from msa_lite.budget.plan import Plan
from msa_lite.budget.speed import Device, Machine, speed_of, this_device
from msa_lite.data import is_remote_data
from msa_lite.errors import MsaError, UsageError
from msa_lite.io.console.libraries import require
from msa_lite.io.console.progress import readable
from msa_lite.io.files.reading import read_yaml
from msa_lite.io.finished.seal import load_manifest
from msa_lite.merger.checks.memory import parse_size
from msa_lite.pipeline.prepare.earlier import open_earlier
from msa_lite.pipeline.prepare.models import WRITTEN_OUT, check_fit_ahead, written_out_as
from msa_lite.pipeline.prepare.prompt import PROMPT_FILE
from msa_lite.pipeline.prepare.questions import terms_left_out
from msa_lite.pipeline.prepare.run import Context, prepare
from msa_lite.pipeline.run.demo import demo_stages
from msa_lite.pipeline.run.folder import check_run_folder
from msa_lite.pipeline.run.report import check_publishing
from msa_lite.pipeline.staged.prepare import find_training_facts, kept_file, plan_training, training_stages
from msa_lite.pipeline.staged.training import TRAINING_FILES, training_ahead
from msa_lite.pipeline.stages.facts import Facts, find_facts, find_headers, has_history
from msa_lite.pipeline.stages.forecast import enough_processes, find_remedies, forecast
from msa_lite.pipeline.stages.stage import DryRun, Stage, StageState, look_ahead
from msa_lite.pipeline.verbs.lists import CommandName, find_verb
from msa_lite.recipe import Recipe, RecipeSource, TrainingRecipe, load_any, load_recipe, load_training
from msa_lite.report.run.provenance import RECIPE_FILE

_LATER = "not all inputs are here yet: the command checks them before it starts"
_SMALLEST_GPU = 100_000_000  # bytes


def dry_run(
    recipe: RecipeSource,
    overrides: Iterable[str] = (),
    *,
    command: CommandName | Literal["train"] = "run",
    method: str = "msa",
    force: bool = False,
) -> DryRun:
    """Return what a command on a recipe would do. Nothing is written into its output.

    command: its name; "train" takes the recipe of a training. method: the method of `baseline`. force: as of
    the command.

    Raise what the command raises before its work, as far as this is known without downloading weights.
    """
    require("train")
    if command == "train":
        return _dry_training(load_training(recipe, overrides), force)
    recipe = load_recipe(recipe, overrides)
    verb = find_verb(command, recipe, method, force=force)
    check_run_folder(recipe.folder, "run")
    facts = _checked_facts(recipe)
    whole, blockers = _find_blockers(recipe, facts, every_checkpoint=command == "probe")
    made = demo_stages(recipe)
    is_early = bool(blockers or made)  # so the inputs cannot be prepared
    if is_early:
        context = Context(recipe, verb.scope)
    else:
        context = Context.of(prepare(whole, verb.scope))
        if verb.publishes:
            check_publishing(recipe)
        verb.check(context.run)
    stages = [*made, *verb.stages(context)]
    if is_early:  # their inputs cannot be computed yet
        stages = [replace(stage, inputs=None) for stage in stages]
    if verb.publishes and recipe.publish.repo:
        stages = [*stages, Stage(f"send to {recipe.publish.repo}", "send", None)]
    states = [*_to_do(blockers), *look_ahead(stages)]
    name = f"baseline {method}" if command == "baseline" else command
    notes = [*_remarks(context), *facts.notes, *([_LATER] if is_early else [])]
    return DryRun(name, verb.scope.folder, states, notes, verb.files)


def plan(
    recipe: RecipeSource,
    overrides: Iterable[str] = (),
    *,
    gpu: str | int | None = None,
    baseline: str | None = None,
    processes: int = 1,
) -> Plan:
    """Predict memory, disk and time of each stage of a run or a training, from headers and configs.

    gpu: the memory of a GPU, such as "8GB", instead of this machine's device. baseline: the method to plan, instead of
    MSA. processes: those of a launcher, each with such a GPU; they divide full fits. Raise UsageError if neither target
    nor prior is found, on this machine or on the Hub, for a training with a baseline or several processes, and as
    `open_earlier`.
    """
    overrides, device = [*overrides], this_device() if gpu is None else _gpu_of(gpu)
    machine = Machine(device, processes, speed_of(device))
    if isinstance(load_any(recipe, overrides), TrainingRecipe):
        if baseline is not None or processes > 1:
            raise UsageError("--baseline and --processes: plan a run, not a training; leave them out")
        return plan_training(recipe, overrides, machine)
    recipe = load_recipe(recipe, overrides)
    verb = find_verb("run", recipe) if baseline is None else find_verb("baseline", recipe, baseline)
    facts = _checked_facts(recipe)

    def build(recipe: Recipe) -> list[Stage]:
        return [*demo_stages(recipe), *verb.stages(Context(recipe, verb.scope))]

    forecasted = forecast(build(recipe), facts, machine, recipe.folder)
    notes = [*_remarks(Context(recipe, verb.scope)), *forecasted.notes]
    is_shared = recipe.vector.mode == "full" and processes == 1
    if is_shared and (count := enough_processes(build(recipe), facts, device)):
        launch = f"accelerate launch --num_processes {count} -m msa_lite"
        notes.append(f"{count} of these GPUs hold the fits in full mode together: {launch}")
    remedies = () if forecasted.fits else tuple(find_remedies(recipe, build, facts, machine))
    return replace(forecasted, notes=notes, remedies=remedies)


def _gpu_of(size: str | int) -> Device:
    """Return a GPU of this much memory. Raise UsageError for less than any has, such as 8 in the place of 8GB."""
    device = Device("", parse_size(size))
    if device.nbytes < _SMALLEST_GPU:
        raise UsageError(f"--gpu {size}: no GPU has so little memory; write it as 8GB")
    return device


def _checked_facts(recipe: Recipe) -> Facts:
    """Return models and rows of a recipe. Raise what a run would raise for its earlier requests and its fits."""
    open_earlier(recipe)
    facts = find_facts(recipe)
    check_fit_ahead(recipe, facts.heads)
    return facts


def _remarks(context: Context) -> list[str]:
    """Return what a command says of its recipe at the start: a missing prior or filter, and terms without a judge."""
    recipe, remarks = context.recipe, terms_left_out(context.recipe) if context.chooses else []
    if context.scope.is_baseline or not context.scope.vectors:
        return remarks
    reason = [] if recipe.has_prior or not recipe.prior_reason else [recipe.prior_reason]
    return [*reason, *recipe.lost_filter, *remarks]


def _to_do(blockers: Iterable[str]) -> list[StageState]:
    return [StageState(blocker, None, "to do") for blocker in blockers]


def _find_blockers(recipe: Recipe, facts: Facts, every_checkpoint: bool) -> tuple[Recipe, list[str]]:
    """Return the steps that must come before the inputs can be checked, such as downloads.

    every_checkpoint: look at all checkpoints of the recipe's history, too. The recipe comes back with models that were
    merged before in the place of adapters.
    """
    blockers = [f"download {readable(facts.download)} of weights"] if facts.download else []
    names = {"target": recipe.target, "prior": recipe.prior_checkpoint}
    blockers += [f"fetch the {role} {names.get(role, '')}".rstrip() for role in facts.missing]
    if every_checkpoint and recipe.history:
        heads = {item.checkpoint: find_headers(item.checkpoint) for item in recipe.history.checkpoints}
        blockers += [f"fetch {name}" for name, head in heads.items() if head is None or not head.shards]
    if recipe.demo is not None and not _demo_is_made(recipe) and has_history(recipe):
        blockers.append("make the models and data of the demo anew")
    recipe, ahead = _with_written_out(recipe)
    for role, kind in ahead.items():
        is_adapter = kind == "an adapter"
        blockers.append(f"{'merge' if is_adapter else 'dequantise'} the {role}, {kind}{', into its base' * is_adapter}")
    if recipe.prompt.kind == "auto" and not (recipe.folder / PROMPT_FILE).is_file():
        blockers.append("find the prompt (prompt: auto)")
    return recipe, blockers


def _dry_training(recipe: TrainingRecipe, force: bool) -> DryRun:
    """Return what `train` would do."""
    check_run_folder(recipe.folder, "training")
    facts = find_training_facts(recipe)
    blockers = [f"download {readable(facts.download)} of weights"] if facts.download else []
    blockers += [f"fetch the {role} {recipe.model}" for role in facts.missing]
    for stage in recipe.stages:
        source, kept = stage.sets[0].source(recipe.columns), kept_file(recipe, stage)
        if stage.tokens is not None and is_remote_data(source) and not kept.is_file():
            blockers.append(f"download {stage.tokens} tokens of {source.path}")
    if not blockers:
        return DryRun("train", recipe.folder, training_ahead(recipe, force), facts.notes, TRAINING_FILES)
    states = [*_to_do(blockers), *look_ahead(training_stages(recipe))]
    return DryRun("train", recipe.folder, states, [*facts.notes, _LATER], TRAINING_FILES)


def _demo_is_made(recipe: Recipe) -> bool:
    """Check whether the models of a demo are there, made with the recipe's own settings."""
    if not has_history(recipe):
        return False
    try:
        former = read_yaml(recipe.folder / RECIPE_FILE)
    except MsaError:
        return False
    return (former.get("demo"), former.get("seed")) == (recipe.model_dump(mode="json")["demo"], recipe.seed)


def _with_written_out(recipe: Recipe) -> tuple[Recipe, dict[str, str]]:
    """Return the recipe with the models that are written out already, and by role the kind of those still to write."""
    roles = {"target": recipe.target} | ({"prior": recipe.prior} if recipe.prior else {})
    changes, missing = {}, {}
    for role in (role for role in WRITTEN_OUT if role in roles):
        kind = written_out_as(roles[role])
        if kind and load_manifest(recipe.folder / role):
            changes[role] = str(recipe.folder / role)
        elif kind:
            missing[role] = kind
    return recipe.model_copy(update=changes), missing
