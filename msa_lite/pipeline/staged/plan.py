"""Plan a training in stages (`msa-lite train`): the memory, disk and time of each stage."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msa_lite.budget.needs import FitCase
from msa_lite.budget.plan import Plan, Remedy, StagePlan
from msa_lite.budget.shape import Shape, read_shape, shape_of_config
from msa_lite.budget.speed import Device, fit_seconds, speed_of
from msa_lite.data import encode, make_prompter, open_tokenizer
from msa_lite.errors import MsaError, UsageError
from msa_lite.io.files.writing import nearest_place
from msa_lite.io.models.devices import host_memory
from msa_lite.io.weights.hub import fetch_tokenizer
from msa_lite.pipeline.prepare.prompt import prompt_settings
from msa_lite.pipeline.prepare.questions import load_set
from msa_lite.pipeline.stages.costs import MOST_SAVES, choose_rung, computes_in_halves, time_note
from msa_lite.pipeline.stages.facts import RowFacts, find_headers, without_warnings
from msa_lite.recipe import RecipeSource, TrainingRecipe, load_training
from msa_lite.recipe.training import NewTokenizer, Stage


@dataclass(frozen=True)
class StageFacts:
    """A stage of a training, as far as its memory and time depend on it."""

    name: str
    rows: RowFacts | None
    """None where they are not known."""
    longest: int
    """Tokens of the longest row, or the most that it may have."""
    epochs: int
    batch: int
    """Rows of an optimiser step."""
    micro: int | str
    """Rows of a forward pass, or "auto"."""
    compute: str = "auto"
    """The precision of matrix products."""


def plan_training(
    source: RecipeSource, overrides: Iterable[str], device: Device, price_per_hour: float | None = None
) -> Plan:
    """Predict memory, disk and time of each stage. Raise UsageError where the sizes of the model cannot be read."""
    recipe, notes = load_training(source, overrides), list[str]()
    shape, download = _find_shape(recipe)
    facts = [*_find_facts(recipe, notes)]
    if shape.rough:
        notes.append(f"{shape.name}: {shape.rough}: its activations are a rough estimate")
    if count := _enough_processes(shape, facts, device):
        launch = f"accelerate launch --num_processes {count} -m msa_lite train"
        notes.append(f"{count} of these GPUs hold the training together: {launch}")
    notes.append(time_note(device, speed_of(device)))
    models = len(facts) if recipe.keep == "each" else min(2, len(facts))
    saves = min(MOST_SAVES, max(one.epochs for one in facts))
    disk = {"models": 4 * shape.weights * models, "saves of a stage": 12 * shape.weights * saves}
    disk |= {"download": download} if download else {}
    free = shutil.disk_usage(nearest_place(recipe.folder)).free
    made = Plan(device, training_stages(shape, facts, device), host_memory(), disk, free, notes)
    made = replace(made, price_per_hour=price_per_hour)
    if made.fits:
        return made

    def change(changes: list[str]) -> Plan:
        """Return the plan of the recipe with these changes."""
        stages = load_training(source, [*overrides, *changes]).stages
        micros = [replace(one, micro=stage.micro_batch_size) for one, stage in zip(facts, stages, strict=True)]
        cut = [
            replace(one, longest=min(one.longest, stage.max_length)) for one, stage in zip(micros, stages, strict=True)
        ]
        return replace(made, stages=training_stages(shape, cut, device))

    return replace(made, remedies=tuple(_remedies(recipe, made, change)))


def training_stages(shape: Shape, facts: Sequence[StageFacts], device: Device, processes: int = 1) -> list[StagePlan]:
    """Return the plan of each stage: all weights are trained, in fp32. processes: those that share a stage."""
    plans, speed = [], speed_of(device)
    for one in facts:
        wide = device.is_gpu and not device.has_bf16
        case = FitCase(
            "full",
            one.longest,
            halves=computes_in_halves(one.compute, device),
            wide=wide,
            on_gpu=device.is_gpu,
            shards=processes,
        )
        rung, need = choose_rung(shape, case, one.batch, one.micro, device)
        times = None
        if one.rows:
            passes = -(-one.rows.count // rung.micro)
            seconds = one.epochs * fit_seconds(shape, "full", rung.checkpointing, one.rows.tokens, speed, passes)
            times = seconds, seconds
        how = f"{rung}; the longest row has {one.longest} tokens"
        plans.append(StagePlan(f"the training of {one.name}", "fit", need, None, times, how))
    return plans


def _enough_processes(shape: Shape, facts: Sequence[StageFacts], device: Device) -> int | None:
    """Return how many GPUs share a training that does not fit on one; None where it does, or 8 are too few."""
    for count in (1, 2, 4, 8) if device.is_gpu else ():
        if all(stage.need.nbytes <= device.nbytes for stage in training_stages(shape, facts, device, count)):
            return count if count > 1 else None
    return None


def _find_shape(recipe: TrainingRecipe) -> tuple[Shape, int]:
    """Return the model's sizes, and the bytes of weights to download."""
    if isinstance(recipe.model, str):
        checkpoint = find_headers(recipe.model)
        if checkpoint is None:
            raise UsageError(f"model {recipe.model}: not on this machine, and the Hub gives no headers; log in with "
                             "`hf auth login`, or name a folder")  # fmt: skip
        remote = 0 if checkpoint.shards else sum(entry.nbytes for entry in checkpoint.tensors.values())
        return read_shape(checkpoint, recipe.model), remote
    from transformers import AutoConfig

    values = {key: value for key, value in recipe.model.config.items() if key != "model_type"}
    if isinstance(recipe.model.tokenizer, NewTokenizer):
        values.setdefault("vocab_size", recipe.model.tokenizer.vocabulary)
    else:
        values.setdefault("vocab_size", len(_open(recipe.model.tokenizer)))
    config = AutoConfig.for_model(recipe.model.config["model_type"], **values)
    return shape_of_config(config.to_dict(), "the new model"), 0


def _open(name: str) -> Any:
    place = fetch_tokenizer(name)
    return open_tokenizer(place.folder, place.name)


def _find_facts(recipe: TrainingRecipe, notes: list[str]) -> Iterator[StageFacts]:
    """Yield the stages. Add a note where rows cannot be read."""
    tokenizer = None
    try:
        if isinstance(recipe.model, str):
            tokenizer = _open(recipe.model)
        elif isinstance(recipe.model.tokenizer, str):
            tokenizer = _open(recipe.model.tokenizer)
    except (MsaError, ImportError) as error:
        notes.append(f"no tokenizer: {str(error).splitlines()[0]}")
    for number, stage in enumerate(recipe.stages):
        name = f"{number + 1}-{stage.title}"
        try:
            rows = _find_rows(recipe, stage, tokenizer)
        except (MsaError, ImportError) as error:
            rows = None
            notes.append(f"{name}: its rows could not be read ({str(error).splitlines()[0]})")
        longest = rows.longest if rows else stage.max_length
        yield StageFacts(name, rows, longest, stage.epochs, stage.batch_size, stage.micro_batch_size, stage.compute)
    if tokenizer is None:
        notes.append("without a tokenizer, rows are taken to be as long as max_length allows")


def _find_rows(recipe: TrainingRecipe, stage: Stage, tokenizer: Any) -> RowFacts | None:
    """Return the rows of a stage, those of a number of tokens without reading them; None without a tokenizer."""
    if stage.tokens is not None:
        return RowFacts(-(-stage.tokens // stage.max_length), min(stage.tokens, stage.max_length), stage.tokens)
    if tokenizer is None:
        return None
    prompter = make_prompter(tokenizer, prompt_settings(recipe.prompt))
    with without_warnings():
        sets = [load_set(data, recipe.columns) for data in stage.sets]
        return RowFacts.of([e for source, rows in sets for e in encode(rows, source, prompter, stage.max_length)])


def _remedies(recipe: TrainingRecipe, made: Plan, change: Callable[[list[str]], Plan]) -> Iterator[Remedy]:
    """Yield changes of the recipe that lower its peak, each with the peak that it leaves."""
    half = max(8, max(stage.max_length for stage in recipe.stages) // 2)
    micro, shorter = "training.micro_batch_size=auto", f"training.max_length={half}"
    kinds = (
        ([micro], "no change of the result"),
        ([shorter], "longer rows are cut"),
        ([micro, shorter], "longer rows are cut"),
    )
    for overrides, harm in kinds:
        changed = change(overrides)
        if (peak := changed.peak.need.nbytes) < made.peak.need.nbytes:
            yield Remedy(tuple(overrides), harm, peak, changed.fits)
