"""Enter another method's result: a finished checkpoint gets the scores, evidence and verdict of a run; nothing is made.

Models, rows and questions are those of the recipe's own run. `model/` holds the checkpoint's weights as further names
of the same files where the disk allows it, so that nothing is copied, and their hashes: whoever reads a file that has
changed since is told.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from msa_lite.baselines.methods import METHODS, TASK_VECTOR
from msa_lite.data import Row
from msa_lite.errors import UsageError
from msa_lite.io.console.progress import Progress
from msa_lite.io.files.addresses import model_name
from msa_lite.io.files.reading import local_path
from msa_lite.io.files.writing import check_space, digest
from msa_lite.io.finished.manifest import is_finished, recover, stage_folder
from msa_lite.io.finished.seal import load_manifest
from msa_lite.io.weights.checkpoint import INDEX_FILE, load_checkpoint
from msa_lite.io.weights.companions import copied_files, copy_into
from msa_lite.io.weights.hub import copy_tokenizer, has_tokenizer
from msa_lite.merger import Merged
from msa_lite.merger.checks.interference import measure_model
from msa_lite.merger.fidelity import Change, fidelity_report, total
from msa_lite.pipeline.prepare.lengths import is_filtered
from msa_lite.pipeline.prepare.run import Context, Run, Scope, msa_scope
from msa_lite.pipeline.run.checks import check_stages
from msa_lite.pipeline.run.evidence import evidence_stages
from msa_lite.pipeline.run.folder import BASELINES
from msa_lite.pipeline.run.scores import score_stage, score_stages
from msa_lite.pipeline.stages.stage import Stage, unique
from msa_lite.recipe import Recipe
from msa_lite.report.page.card import read_target_card

logger = logging.getLogger(__name__)

_COMMON = re.compile(r"(checkpoint|step|epoch)?[-_]?\d*|(final[-_]?)?(model|checkpoint|merged|output)|unlearned|final")
AS_MODEL = ("merge.as=model",)
"""The change of a recipe that enters a result: what was made is a whole model."""
# Names of our own methods' folders, and of the models that `compare` has in rows of their own.
_OWN = {"msa", "target", "prior", "ideal", TASK_VECTOR, *METHODS, *(f"{name}-prior" for name in METHODS)}


def entered_name(checkpoint: str) -> str:
    """Return the name of another method by that of its checkpoint: of the folder, or of the repository.

    A name that many have, such as model or checkpoint-500, has its parent's before it. Raise UsageError without one.
    """
    if not checkpoint:
        raise UsageError("--model: an empty name; give the folder of a checkpoint, or repo[@revision]")
    path = local_path(model_name(checkpoint))
    names = path.resolve().parts if path.is_dir() else path.as_posix().partition("@")[0].split("/")
    is_common = _COMMON.fullmatch(names[-1].lower()) is not None
    name = re.sub(r"[^\w.-]+", "-", "-".join(names[-2:] if is_common else names[-1:]), flags=re.ASCII).strip("-.")
    name = re.sub(r"\.(?=partial$|previous$)", "-", name) or "model"  # what msa-lite calls an unfinished folder
    return f"{name}-checkpoint" if name.lower() in _OWN else name


def entered_scope(name: str, recipe: Recipe, checkpoint: str | None = None) -> Scope:
    """Return the scope of the run of another method: that of the recipe's own run, in which nothing is fitted.

    checkpoint: the method's result; None once the run has it. Raise UsageError for a recipe with earlier requests.
    """
    if recipe.earlier:
        raise UsageError("earlier: another method's result is compared on one request; give earlier=[]")
    folder = recipe.folder / BASELINES / name
    scope = replace(msa_scope(recipe), method=name, folder=folder, vectors=(), is_baseline=True)
    return replace(scope, checkpoint=checkpoint)


def check_entered(run: Run) -> None:
    """Raise UsageError where the run's folder holds the result of another checkpoint of the same name.

    Raise MismatchError for a checkpoint that holds NaN or infinities.
    """
    there = (load_manifest(run.folder / "model") or {}).get("sources", {}).get("checkpoint")
    if there is not None and there != _place(run):
        raise UsageError(
            f"{run.folder}: holds the result of {there}, which has the same name as {_place(run)}; rename one of the "
            f"two folders, or remove {run.folder}"
        )
    if not is_finished(run.folder / "model", _inputs(run)):
        _changes(run.sources["target"].folder, run.sources["checkpoint"].folder, digest(_inputs(run)))


@cache  # the check of a run reads both models, and so does its first stage
def _changes(target: Path, model: Path, inputs: str) -> dict[str, Change]:
    """Return the changes of a checkpoint against the target, by tensor. inputs: a hash of the content of both."""
    return measure_model(load_checkpoint(target), load_checkpoint(model), f"checkpoint {model}:")


def entered_stages(context: Context) -> list[Stage]:
    """Return the stages of a run of MSA, without its fits, its choice and its merge."""
    checks = check_stages(context, accept=True)
    enter = Stage(
        "merge",
        "merge",
        context.scope.folder / "model",
        partial(_enter, context),
        inputs=lambda: _inputs(context.run),
        says="the checkpoint of another method is taken as it is; nothing is merged",
    )
    names = ["ideal"] * context.has_ideal + ["unlearned"] if context.chooses else []
    validation = [score_stage(context, name, "validation", ["merge"] * (name == "unlearned")) for name in names]

    def describe() -> Mapping[str, Any]:
        return context.scope.describe(context.recipe, {})

    return unique([*checks, enter, *validation, *score_stages(context, describe), *evidence_stages(context)])


def rows_perhaps_learnt(run: Run) -> Sequence[Row]:
    """Return the rows to keep that MSA may learn or filter by: nobody knows whether the other method has learnt them.

    So the verdict on both counts the same rows.
    """
    return [*run.rows.get("retain", ()), *(run.spared if is_filtered(run.recipe, samples=True) else ())]


def _place(run: Run) -> str:
    """Return where the checkpoint lies: its full path, or its repository with the commit."""
    source = run.sources["checkpoint"]
    return str(source.folder.resolve()) if source.is_folder else source.pinned()


def _inputs(run: Run) -> dict[str, Any]:
    return {name: run.sources[name].identity() for name in ("target", "checkpoint")}


def _enter(context: Context, progress: Progress) -> Merged:
    """Put the checkpoint into the run's folder, with the figures of its change against the target."""
    run, out = context.run, context.scope.folder / "model"
    recover(out)
    if is_finished(out, _inputs(run)) and (manifest := load_manifest(out)):
        return Merged.recorded(out, manifest)
    target, source = run.sources["target"], run.sources["checkpoint"]
    model, changes = load_checkpoint(source.folder), _changes(target.folder, source.folder, digest(_inputs(run)))
    whole = total(changes.values())
    notes = () if changes else ("every weight is the target's own: nothing was unlearned",)
    if notes:
        logger.warning("checkpoint %s: %s", source.name, *notes)
    merged = Merged(
        out, len(changes), whole.weights, whole.changed, None, whole.relative_size if changes else 0.0, notes=notes
    )
    places = {"target": target.pinned(), "checkpoint": _place(run)}
    facts = {"sources": places, "terms": [], "target_card": read_target_card(target.folder), "change": merged.change}
    with stage_folder(out, "model", _inputs(run), facts | {"fidelity": fidelity_report(changes)}) as unfinished:
        for shard in model.shards:
            _link(shard.path, unfinished / shard.path.name)
        index = [path for path in (model.folder / INDEX_FILE,) if path.is_file()]
        for path in (*copied_files(model.folder), *index):
            copy_into(unfinished, model.folder, path)
        if not has_tokenizer(model.folder):
            copy_tokenizer(target.tokenizer_folder, unfinished)
        source.check_unchanged()
    return merged


def _link(path: Path, place: Path) -> None:
    """Give a file a second name. Copy it where the disk allows none, as another disk does."""
    try:
        os.link(os.path.realpath(path), place)
    except OSError:
        check_space(place.parent, path.stat().st_size)
        shutil.copyfile(path, place)
