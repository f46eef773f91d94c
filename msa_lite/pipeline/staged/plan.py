"""Plan a training in stages (`msa-lite train`): the memory, disk and time of each stage."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from msa_lite.budget.plan import Plan, StageCost
from msa_lite.budget.shape import Shape, shape_of_config
from msa_lite.budget.speed import Machine
from msa_lite.data import encode, make_prompter, open_tokenizer
from msa_lite.errors import MsaError
from msa_lite.io.console.progress import muted
from msa_lite.io.weights.hub import fetch_tokenizer, is_remote
from msa_lite.io.weights.offline import offline_where_unreachable
from msa_lite.pipeline.prepare.prompt import prompt_settings
from msa_lite.pipeline.prepare.questions import load_set
from msa_lite.pipeline.stages.costs import MOST_SAVES, SAVE, fit_cost, full_size
from msa_lite.pipeline.stages.facts import Facts, RowFacts, find_shapes, read_heads
from msa_lite.pipeline.stages.forecast import enough_processes, forecast
from msa_lite.pipeline.stages.stage import Stage
from msa_lite.recipe import RecipeSource, TrainingRecipe, load_training
from msa_lite.recipe.training import NewModel, NewTokenizer, TrainingStage
from msa_lite.train.model import texts_of, train_tokenizer

START_FOLDER = "0-start"  # the folder of a model from nothing
_MODEL = "model"  # the name of its shape


def training_stages(recipe: TrainingRecipe) -> list[Stage]:
    """Return the stages of a training as its recipe tells them: where they stand, and what they cost."""
    start = [] if isinstance(recipe.model, str) else [Stage(START_FOLDER, "make", recipe.folder / START_FOLDER)]
    fits = []
    for number, stage in enumerate(recipe.stages, 1):
        name = f"{number}-{stage.title}"
        is_kept = recipe.keep == "each" or number <= 2  # of `keep: last`, two are there at a time
        fits.append(Stage(name, "fit", recipe.folder / name, cost=partial(_cost, name, stage, is_kept)))
    return [*start, *fits]


def _cost(name: str, stage: TrainingStage, is_kept: bool, facts: Facts, machine: Machine) -> list[StageCost]:
    """Return the cost of a stage: all weights are trained, in fp32."""
    shape = facts.shapes[_MODEL]
    size = full_size(f"the training of {name}", facts.rows.get(name), stage, stage.max_length, machine.device)
    saves = SAVE * shape.weights * min(MOST_SAVES, stage.epochs)
    disk = {"models": 4 * shape.weights if is_kept else 0}
    return [replace(fit_cost(shape, size, machine), disk=disk, while_running={"saves of a stage": saves})]


def plan_training(source: RecipeSource, overrides: Iterable[str], machine: Machine) -> Plan:
    """Predict memory, disk and time of each stage. Raise UsageError where the sizes of the model cannot be read."""
    recipe = load_training(source, overrides)
    stages, facts = training_stages(recipe), find_training_facts(recipe)
    if count := enough_processes(stages, facts, machine.device):
        launch = f"accelerate launch --num_processes {count} -m msa_lite train"
        facts.notes.append(f"{count} of these GPUs hold the training together: {launch}")
    return forecast(stages, facts, machine, recipe.folder)


def find_training_facts(recipe: TrainingRecipe) -> Facts:
    """Find the model and the rows of a training. Notes say which rows cannot be read."""
    tokenizer, notes, rows = None, list[str](), dict[str, RowFacts]()
    if isinstance(recipe.model, str):
        names = {_MODEL: recipe.model}
        with offline_where_unreachable() if is_remote(recipe.model) else nullcontext():
            shapes, download, missing = find_shapes(names, read_heads(names), notes)
    else:
        shapes, download, missing = {_MODEL: _new_shape(recipe.model)}, 0, ()
    try:
        tokenizer = _find_tokenizer(recipe)
    except (MsaError, ImportError) as error:
        notes += [] if missing else [f"no tokenizer: {str(error).splitlines()[0]}"]
    for number, stage in enumerate(recipe.stages, 1):
        try:
            if stage_rows := _find_rows(recipe, stage, tokenizer):
                rows[f"{number}-{stage.title}"] = stage_rows
        except (MsaError, ImportError) as error:
            notes.append(f"{number}-{stage.title}: its rows could not be read ({str(error).splitlines()[0]})")
    if tokenizer is None:
        notes.append("without a tokenizer, rows are taken to be as long as max_length allows")
    return Facts(shapes, rows, download, notes, missing=missing)


def _new_shape(model: NewModel) -> Shape:
    """Return the sizes of a model from nothing."""
    from transformers import AutoConfig

    values = {key: value for key, value in model.config.items() if key != "model_type"}
    if isinstance(model.tokenizer, NewTokenizer):
        values.setdefault("vocab_size", model.tokenizer.vocabulary)
    else:
        values.setdefault("vocab_size", len(_open(model.tokenizer)))
    config = AutoConfig.for_model(model.config["model_type"], **values)
    return shape_of_config(config.to_dict(), "the new model")


def _open(name: str) -> Any:
    place = fetch_tokenizer(name)
    return open_tokenizer(place.folder, place.name)


def _find_tokenizer(recipe: TrainingRecipe) -> Any:
    """Return the tokenizer of a training; a new one is trained here on the same rows, but not on texts by the token."""
    name = recipe.model if isinstance(recipe.model, str) else recipe.model.tokenizer
    if isinstance(name, str):
        return _open(name)
    if recipe.stages[0].tokens is not None:
        return None
    rows = [row for data in recipe.stages[0].sets for row in load_set(data, recipe.columns)[1]]
    return train_tokenizer(texts_of(rows, prompt_settings(recipe.prompt).template), name.vocabulary)


def _find_rows(recipe: TrainingRecipe, stage: TrainingStage, tokenizer: Any) -> RowFacts | None:
    """Return the rows of a stage, those of a number of tokens without reading them; None without a tokenizer."""
    if stage.tokens is not None:
        return RowFacts(-(-stage.tokens // stage.max_length), min(stage.tokens, stage.max_length), stage.tokens)
    if tokenizer is None:
        return None
    prompter = make_prompter(tokenizer, prompt_settings(recipe.prompt))
    with muted():
        sets = [load_set(data, recipe.columns) for data in stage.sets]
        return RowFacts.of([e for source, rows in sets for e in encode(rows, source, prompter, stage.max_length)])
