"""The filter of a run's vector: the moments of the target's layers, and the forget vector for each strength λ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from msa_lite.budget.needs import Need
from msa_lite.budget.plan import StageCost
from msa_lite.budget.shape import Linear, Shape
from msa_lite.budget.speed import Machine
from msa_lite.data import Example, hash_ids, pad_id
from msa_lite.evals.engine.models import load_model
from msa_lite.io.console.progress import Progress, notices
from msa_lite.io.finished.manifest import is_finished
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.io.weights.hub import Source, fetch
from msa_lite.merger.filtering import filter_inputs, filter_settings, filter_vectors
from msa_lite.merger.moments import MOMENTS_FOLDER, SIDES
from msa_lite.merger.unseen import Unseen, unseen_sentence
from msa_lite.pipeline.prepare.lengths import FILTER, rows_or_passages
from msa_lite.pipeline.prepare.run import Context, Run
from msa_lite.pipeline.run.vectors import vector_start
from msa_lite.pipeline.stages.costs import asking_cost, trained_weights
from msa_lite.pipeline.stages.facts import Facts, RowFacts
from msa_lite.pipeline.stages.stage import Stage
from msa_lite.recipe import Recipe
from msa_lite.recipe.schema import AUTO_FILTERS
from msa_lite.strengths import filtered_folder
from msa_lite.train.moments import HELD, MOST_LABELS

_MANY = 1 << 20  # tokens, more than a layer has inputs


def filter_stages(context: Context) -> tuple[list[Stage], list[Stage]]:
    """Return the stages of a filter: what comes before the fits, as it may refuse the target, and what comes after.

    Both are empty where the recipe has no filter.
    """
    strengths = [strength for strength in context.recipe.filters if strength]
    folders = {strength: filtered_folder(context.scope.folder, strength) for strength in strengths}

    def fitted() -> tuple[Path, Source]:
        return context.run.vector_folder("forget"), vector_start(context.run, "forget")

    filtered = [
        filter_stage(context, "forget vector", strength, folders, fitted, ["forget vector"]) for strength in strengths
    ]
    return [moments_stage(context)] if strengths else [], filtered


def filter_stage(
    context: Context,
    what: str,
    strength: float,
    folders: Mapping[float, Path],
    fitted: Callable[[], tuple[Path, Source]],
    needs: Sequence[str],
) -> Stage:
    """Return the stage that filters a vector with this strength λ. It needs the moments, too.

    what: the vector's name. folders: those of all strengths. The first stage whose own is missing makes all that are,
    since they share most of the work. fitted: returns the vector and the model that it was fitted from, once they are
    there.
    """
    label, folder = f"filtered {what}, λ = {strength:g}", folders[strength]

    def make(progress: Progress) -> Path:
        if not is_finished(folder, inputs()):  # else the moments may be gone
            (vector, start), target = fitted(), context.run.sources["target"]
            moments = measure_moments(context.run, progress)
            filter_vectors(fetch(str(vector)), moments, folders, target, start, progress, label)
        return folder

    def inputs() -> dict[str, Any]:
        vector, start = fitted()
        return filter_inputs(fetch(str(vector)), moments_inputs(context.run), strength, start)

    return Stage(
        label,
        "measure",
        folder,
        make,
        needs=[*needs, MOMENTS_FOLDER],
        inputs=inputs,
        cost=partial(_filter_cost, context.recipe, len(folders)),
        says=f"the {what} without what the rows to keep use, too",
    )


def moments_stage(context: Context) -> Stage:
    """Return the stage that measures the inputs of the target's layers on rows to forget and to keep."""
    return Stage(
        MOMENTS_FOLDER,
        "measure",
        context.scope.folder / MOMENTS_FOLDER,
        lambda progress: measure_moments(context.run, progress),
        inputs=lambda: moments_inputs(context.run),
        cost=_moments_cost,
        says="what the target's layers take in, on rows to forget and to keep; the filter needs it",
        temporary=None if context.recipe.merge.keep_moments else MOMENTS_FOLDER,
    )


def _moments_cost(facts: Facts, machine: Machine) -> list[StageCost]:
    """Return the cost of measuring the inputs of the target's layers: one or a few forward passes over the rows."""
    shape, tokens = facts.shapes["target"], _tokens(facts)
    kept = [min(count, MOST_LABELS) for count in tokens]
    disk = sum(4 * linear.count * linear.inputs * min(count, linear.inputs) for linear in _fed(shape) for count in kept)
    often = -(-disk // HELD)  # where roots do not fit into memory at once, the rows run again
    cost = asking_cost("the moments", shape, RowFacts(1, 0, often * sum(tokens)), machine)
    return [replace(cost, kind="moments", seconds=cost.seconds if facts.rows else None, disk={"moments": disk})]


def _filter_cost(recipe: Recipe, strengths: int, facts: Facts, machine: Machine) -> list[StageCost]:
    """Return the cost of filtering the forget vector with one of several λ, in RAM.

    The first λ makes the products of all pairs of rows for all of them. Each has a system of equations a layer, which
    a checkpoint solves twice, for all rows of its change. An adapter's A's wait for their scalar.
    """
    shape, tokens = facts.shapes["target"], [min(count, MOST_LABELS) for count in _tokens(facts)]
    is_full, rank = recipe.vector.mode == "full", recipe.vector.lora.rank
    work, held, used, change = 0.0, dict[int, int](), dict[int, int](), 0
    fed = {linear.name for linear in _fed(shape)}
    for linear in shape.linear:
        count = sum(min(side, linear.inputs) for side in tokens)
        size, rows = min(count, linear.inputs), linear.outputs if is_full else rank
        products = size**2 * linear.inputs / strengths if linear.name in fed else 0
        work += linear.count * (products + (1 + is_full) * (size**3 + 2 * rows * size * (size + linear.inputs)))
        held[linear.inputs] = 8 * (count * linear.inputs + 2 * size**2)  # roots and products
        used[linear.inputs] = 8 * (count * linear.inputs + 4 * size**2)  # with a system and its factors
        change = max(change, 8 * linear.outputs * (5 * linear.inputs + 2 * size) if is_full else 0)
    sizes = [*sorted(held, reverse=True), *held][:2]  # the largest, and the other that is kept
    waiting = 0 if is_full else 4 * strengths * rank * sum(linear.inputs * linear.count for linear in shape.linear)
    need = Need({"buffers": (used[sizes[0]] + held[sizes[1]] if sizes else 0) + change + waiting})
    seconds = machine.seconds(shape, host=work) if facts.rows else None
    disk = {"filtered vector": 4 * trained_weights(recipe, facts.shapes["prior"])}
    return [StageCost("the filter", "filter", need, seconds, "layer by layer, in RAM", disk=disk, place="host")]


def _tokens(facts: Facts) -> list[int]:
    """Return the tokens of the rows to forget and to keep; of rows that are not known, as many as a root can hold."""
    return [facts.rows[side].tokens if side in facts.rows else _MANY for side in ("forget", FILTER)]


def _fed(shape: Shape) -> list[Linear]:
    """Return a model's linear layers without those that get the same input as another one."""
    return [linear for linear in shape.linear if linear.name not in ("k_proj", "v_proj", "up_proj")]


def measure_moments(run: Run, progress: Progress) -> Path:
    """Measure the moments of a run's target, unless they are there. Return their folder."""
    from msa_lite.train.moments import write_moments

    target, folder = run.sources["target"], run.folder / MOMENTS_FOLDER
    names, pad = load_checkpoint(target.folder).tensors, pad_id(run.prompter.tokenizer)
    spec, strengths = run.recipe.vector, [strength for strength in run.recipe.filters if strength] or AUTO_FILTERS
    targets = "all-linear" if spec.mode == "full" else spec.lora.targets
    unseen = Unseen(strengths, targets, rows_or_passages(run.spared))

    def load() -> Any:
        return load_model(target.folder)

    write_moments(folder, moments_inputs(run), load, names, _examples(run), pad, progress, unseen)
    if unseen.facts:
        notices.info("%s", unseen_sentence(unseen.facts))
    return folder


def moments_inputs(run: Run) -> dict[str, Any]:
    """Return all that decides the moments, as their manifest records it."""
    rows = {side: hash_ids(examples) for side, examples in _examples(run).items()}
    return {"target": run.sources["target"].identity(), **rows, "positions": "of labels, none first"}


def _examples(run: Run) -> dict[str, Sequence[Example]]:
    """Return the rows that moments are measured on, by side: the change on the first is kept, on the others not."""
    return dict(zip(SIDES, (run.examples["forget"], run.examples[FILTER]), strict=True))


def filter_identity(run: Run) -> dict[str, Any]:
    """Return what decides the filtered vectors besides the forget vector and λ, for the manifest of a choice."""
    if not any(run.recipe.filters):
        return {}
    return {MOMENTS_FOLDER: moments_inputs(run), **filter_settings()}
