"""What each command does with a recipe: its scope, its stages, what forbids it; and a look ahead at it.

A look ahead writes nothing. A dry run (`dry_run`) tells what a command would do. It prepares and checks the inputs as
the run does it, where all models are on this machine, and compares each stage with the manifest of its folder.
Otherwise, and for a plan (`plan`: what it would take), only headers are read, and no weights are downloaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from msa_lite.budget.plan import Plan
from msa_lite.budget.shape import read_shape
from msa_lite.budget.speed import Device, Machine, speed_of, this_device
from msa_lite.data import is_remote_data
from msa_lite.errors import FormatError, UsageError
from msa_lite.evals.engine.models import checkpoint_folder
from msa_lite.evals.judge.server import check_consent
from msa_lite.io.console.libraries import require
from msa_lite.io.console.progress import readable
from msa_lite.io.finished.seal import load_manifest
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.io.weights.hub import is_remote
from msa_lite.merger.checks.memory import parse_size
from msa_lite.pipeline.attack.campaign import open_attacks
from msa_lite.pipeline.baseline.entered import AS_MODEL, check_entered, entered_name, entered_scope, entered_stages
from msa_lite.pipeline.baseline.settings import Setting, baseline_scope
from msa_lite.pipeline.baseline.trials import Trials
from msa_lite.pipeline.prepare.earlier import open_earlier, removed_hashes
from msa_lite.pipeline.prepare.models import WRITTEN_OUT, check_fit_ahead, written_out_as
from msa_lite.pipeline.prepare.prompt import PROMPT_FILE
from msa_lite.pipeline.prepare.questions import terms_left_out
from msa_lite.pipeline.prepare.run import Context, Run, Scope, msa_scope, prepare
from msa_lite.pipeline.prepare.sending import going_out
from msa_lite.pipeline.run.checks import check_probe, probe_scope, probe_stages
from msa_lite.pipeline.run.demo import demo_stages
from msa_lite.pipeline.run.evidence import check_evidence
from msa_lite.pipeline.run.filtering import moments_stage
from msa_lite.pipeline.run.folder import check_run_folder
from msa_lite.pipeline.run.msa import msa_stages, sweep_stages
from msa_lite.pipeline.run.report import END_FILES, check_licence, check_publishing
from msa_lite.pipeline.run.vectors import check_fits, fit_stages
from msa_lite.pipeline.staged.prepare import MODEL, find_training_facts, kept_file, plan_training, training_stages
from msa_lite.pipeline.staged.training import TRAINING_FILES, training_ahead
from msa_lite.pipeline.stages.facts import Facts, RowFacts, find_facts, find_headers
from msa_lite.pipeline.stages.stage import (
    DryRun,
    Stage,
    StageState,
    check_memory,
    enough_processes,
    find_remedies,
    forecast,
    look_ahead,
    missing,
)
from msa_lite.recipe import Recipe, RecipeSource, TrainingRecipe, load_any, load_recipe, load_training
from msa_lite.record.seal import KEY_FILE
from msa_lite.report.run.provenance import RECIPE_FILE
from msa_lite.report.run.stages import STAGES_FILE

logger = logging.getLogger(__name__)

_LATER = "not all inputs are here yet: the command checks them before it starts"
_SMALLEST_GPU = 100_000_000  # bytes

_FILES = (RECIPE_FILE, STAGES_FILE, KEY_FILE)
_ALL_FILES = (*_FILES, *END_FILES)  # of a command that ends with a report
CommandName = Literal["run", "sweep", "vector", "moments", "baseline", "probe"]


@dataclass(frozen=True)
class Verb:
    """A command on a recipe."""

    scope: Scope
    """The part of the recipe that it does."""
    stages: Callable[[Context], list[Stage]]
    """Returns its stages: from the recipe alone, or from the prepared inputs."""
    checks: Sequence[Callable[[Run], object]] = ()
    """Raise what forbids it once the inputs are prepared."""
    settings: Sequence[Setting] = ()
    """The settings of a baseline that trains."""
    files: Sequence[str] = _FILES
    """The files that it writes beside the folders of its stages."""
    publishes: bool = False
    """True if it ends with sending the model where the recipe says."""

    def going_out(self, context: Context) -> list[str]:
        """Return what it sends to other machines, a sentence for each."""
        return going_out(context, self.files == _ALL_FILES, self.publishes)

    def check(self, run: Run) -> None:
        """Raise what forbids the command, before any work: its own checks, then the memory of its stages."""
        for check in self.checks:
            check(run)
        try:
            facts = facts_of_run(run)
        except FormatError as error:  # a config in words that we do not know
            logger.debug("the memory is not predicted: %s", error)
            return

        def build(recipe: Recipe) -> list[Stage]:
            return self.stages(Context(recipe, run.scope))

        remedies = partial(find_remedies, run.recipe, build, facts)
        check_memory(missing(build(run.recipe)), facts, run.crew.ranks.count, remedies, run.scope.force)


def find_verb(
    command: CommandName,
    recipe: Recipe,
    method: str = "msa",
    accept: bool = False,
    force: bool = False,
    model: str | None = None,
) -> Verb:
    """Return what a command does with a recipe. Raise UsageError for a recipe that it cannot be used on.

    method, model: of `baseline`. accept, force: as of `run`. Raise UsageError, too, for a judge that needs the user's
    consent.
    """
    if command in ("run", "baseline", "sweep") and recipe.evaluate:
        check_consent(recipe.evaluate.judge, accept)
    if model is not None:
        scope = replace(entered_scope(entered_name(model), recipe, model), force=force)
        return Verb(scope, entered_stages, [check_entered, _check_attacks, check_evidence], files=_ALL_FILES)
    if command == "baseline":
        scope, settings = baseline_scope(method, recipe)
        scope = replace(scope, force=force)
        if settings:
            return Verb(
                scope,
                lambda context: Trials(context, settings).stages(),
                [lambda run: Trials(Context.of(run), settings).check(), _check_attacks, check_evidence],
                settings,
                _ALL_FILES,
            )
        return Verb(scope, msa_stages, _CHECKS, files=_ALL_FILES)
    scope = replace(msa_scope(recipe), force=force)
    if command == "probe":
        if not recipe.has_prior:
            raise UsageError("prior: the recipe names none, so there is nothing to probe; name one, or a history")
        return Verb(probe_scope(recipe), probe_stages, [check_probe])
    if command == "vector":
        return Verb(scope, fit_stages, [check_fits])
    if command == "moments":
        if not recipe.can_filter:
            raise UsageError("moments need rows to keep, or holdout rows; give retain.data, or evaluate.holdout")
        return Verb(scope, lambda context: [moments_stage(context)])
    if command == "sweep":
        if not recipe.has_choice:
            raise UsageError(
                "forget.alpha, retain.beta: one point, so there is nothing to sweep; give a list of values, or auto"
            )
        return Verb(scope, sweep_stages, [check_fits])
    return Verb(scope, lambda context: msa_stages(context, accept), _CHECKS, files=_ALL_FILES, publishes=True)


def facts_of_run(run: Run) -> Facts:
    """Return what a plan of a prepared run is made of: its models by their headers, its rows as they are learnt."""
    checkpoints = {name: load_checkpoint(checkpoint_folder(source.folder)) for name, source in run.sources.items()}
    shapes = {name: read_shape(checkpoint, run.sources[name].name) for name, checkpoint in checkpoints.items()}
    rows = {name: RowFacts.of(examples) for name, examples in run.examples.items()}
    return Facts(shapes, rows)


def _check_attacks(run: Run) -> None:
    """Raise what forbids the attacks that a recipe ends its run with, before there is an unlearned model."""
    if run.recipe.attack.attacks:
        open_attacks(run, None)


_CHECKS = (check_fits, _check_attacks, check_evidence, check_licence)  # of a run from its fits to its report


def dry_run(
    recipe: RecipeSource,
    overrides: Iterable[str] = (),
    *,
    command: CommandName | Literal["train"] = "run",
    method: str = "msa",
    accept: bool = False,
    force: bool = False,
    model: str | None = None,
) -> DryRun:
    """Return what a command on a recipe would do. Nothing is written into its output.

    command: its name; "train" takes the recipe of a training. method, model: of `baseline`. accept, force: as of the
    command.

    Raise what the command raises before its work, as far as this is known without downloading weights.
    """
    require("train")
    if command == "train":
        return _dry_training(load_training(recipe, overrides), force)
    recipe = load_recipe(recipe, [*overrides, *(AS_MODEL if model else ())])
    verb = find_verb(command, recipe, method, accept, force, model)
    check_run_folder(recipe.folder, "run")
    facts = _checked_facts(recipe, verb.scope)
    whole, blockers = _find_blockers(recipe, facts, verb, every_checkpoint=command == "probe")
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
    name = f"baseline {verb.scope.method}" if command == "baseline" else command
    known = dict.fromkeys([*facts.notes, *(context.prepared.notes if context.prepared else ())])  # many are in both
    notes = [*verb.going_out(context), *_remarks(context), *known, *([_LATER] if is_early else [])]
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
    command: CommandName = "run" if baseline is None else "baseline"
    verb = find_verb(command, recipe, baseline or "msa", accept=True)
    facts = _checked_facts(recipe, verb.scope)

    def build(recipe: Recipe) -> list[Stage]:
        return [*demo_stages(recipe), *verb.stages(Context(recipe, verb.scope))]

    forecasted = forecast(build(recipe), facts, machine, recipe.folder)
    context = Context(recipe, verb.scope)
    notes = [*verb.going_out(context), *_remarks(context), *forecasted.notes]
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


def _checked_facts(recipe: Recipe, scope: Scope) -> Facts:
    """Return models and rows of a recipe. Raise what a run would raise for its earlier requests and its fits."""
    facts = find_facts(recipe, scope.sample, removed_hashes(recipe, open_earlier(recipe)))
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


def _to_get(facts: Facts, names: Mapping[str, object]) -> list[str]:
    """Return the downloads that come first. names: of the models, by role."""
    download = [f"download {readable(facts.download)} of weights"] if facts.download else []
    return [*download, *(f"fetch the {role} {names.get(role, '')}".rstrip() for role in facts.missing)]


def _find_blockers(recipe: Recipe, facts: Facts, verb: Verb, every_checkpoint: bool) -> tuple[Recipe, list[str]]:
    """Return the steps that must come before the inputs can be checked, such as downloads.

    every_checkpoint: look at all checkpoints of the recipe's history, too. The recipe comes back with models that were
    merged before in the place of adapters.
    """
    blockers = _to_get(facts, {"target": recipe.target, "prior": recipe.prior_checkpoint})
    others = [verb.scope.checkpoint] if verb.scope.checkpoint and is_remote(verb.scope.checkpoint) else []
    others += [item.checkpoint for item in recipe.history.checkpoints] if every_checkpoint and recipe.history else []
    heads = {name: find_headers(name) for name in others}
    blockers += [f"fetch {name}" for name, head in heads.items() if head is None or not head.shards]
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
    blockers = _to_get(facts, {MODEL: recipe.model})
    for stage in recipe.stages:
        source, kept = stage.sets[0].source(recipe.columns), kept_file(recipe, stage)
        if stage.tokens is not None and is_remote_data(source) and not kept.is_file():
            blockers.append(f"download {stage.tokens} tokens of {source.path}")
    if not blockers:
        return DryRun("train", recipe.folder, training_ahead(recipe, force), facts.notes, TRAINING_FILES)
    states = [*_to_do(blockers), *look_ahead(training_stages(recipe))]
    return DryRun("train", recipe.folder, states, [*facts.notes, _LATER], TRAINING_FILES)


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
