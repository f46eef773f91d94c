"""Say what a command on a recipe would do: its stages, their states and what it writes. Write nothing.

Where all models are on this machine, the inputs of the run are prepared and checked as the run does it, and each
stage is compared with the manifest of its folder. Otherwise only headers are read, and no weights are downloaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from msa_lite.data import is_remote_data
from msa_lite.errors import MsaError
from msa_lite.io.console.libraries import require
from msa_lite.io.console.progress import readable
from msa_lite.io.files.reading import read_yaml
from msa_lite.io.finished.seal import load_manifest
from msa_lite.pipeline.prepare.earlier import open_earlier
from msa_lite.pipeline.prepare.models import WRITTEN_OUT, check_fit_ahead, written_out_as
from msa_lite.pipeline.prepare.prompt import PROMPT_FILE
from msa_lite.pipeline.prepare.questions import terms_left_out
from msa_lite.pipeline.prepare.run import Context, prepare
from msa_lite.pipeline.run.demo import demo_stages
from msa_lite.pipeline.run.folder import check_run_folder
from msa_lite.pipeline.run.report import check_publishing
from msa_lite.pipeline.staged.prepare import find_training_facts, kept_file, training_stages
from msa_lite.pipeline.staged.training import TRAINING_FILES, training_ahead
from msa_lite.pipeline.stages.facts import Facts, find_facts, find_headers, has_history
from msa_lite.pipeline.stages.stage import Stage, StageState, look_ahead
from msa_lite.pipeline.verbs.lists import CommandName, find_verb
from msa_lite.recipe import Recipe, RecipeSource, TrainingRecipe, load_recipe, load_training
from msa_lite.report.run.provenance import RECIPE_FILE

_LATER = "not all inputs are here yet: the command checks them before it starts"


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
    facts = find_facts(recipe)
    whole, blockers = _find_blockers(recipe, facts, every_checkpoint=command == "probe")
    made = demo_stages(recipe)
    is_early = bool(blockers or made)  # so the inputs cannot be prepared
    if is_early:
        open_earlier(recipe)
        check_fit_ahead(recipe, facts.heads)
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
    first = [StageState(blocker, None, "to do") for blocker in blockers]
    name = f"baseline {method}" if command == "baseline" else command
    reason = None if recipe.has_prior or verb.scope.is_baseline else recipe.prior_reason
    fits = command != "probe" and not verb.scope.is_baseline
    left_out = [*(recipe.lost_filter if fits else []), *(terms_left_out(recipe) if context.chooses else [])]
    notes = [*([reason] if reason else []), *left_out, *facts.notes, *([_LATER] if is_early else [])]
    return DryRun(name, verb.scope.folder, [*first, *look_ahead(stages)], notes, verb.files)


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
    first = [StageState(blocker, None, "to do") for blocker in blockers]
    return DryRun(
        "train", recipe.folder, [*first, *look_ahead(training_stages(recipe))], [*facts.notes, _LATER], TRAINING_FILES
    )


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
