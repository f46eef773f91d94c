"""Find, load and check all that a training needs before its first step: a model, and rows for each stage.

A plan reads the same, but of a model only the headers, and of a stream of texts nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from msa_lite.budget.plan import Plan, StageCost
from msa_lite.budget.shape import shape_of_config
from msa_lite.budget.speed import Machine
from msa_lite.data import (
    DataSource,
    Example,
    Prompter,
    Row,
    encode,
    encode_up_to,
    is_remote_data,
    kept_head,
    kept_texts,
    make_prompter,
    open_tokenizer,
    stream_texts,
)
from msa_lite.errors import DataError, Faults, MsaError
from msa_lite.evals.engine.models import check_source, count_weights, smallest_window
from msa_lite.io.console.progress import muted
from msa_lite.io.files.writing import digest
from msa_lite.io.models.devices import check_device
from msa_lite.io.models.window import model_window
from msa_lite.io.weights.hub import Source, fetch, fetch_tokenizer, is_remote
from msa_lite.io.weights.offline import offline_where_unreachable
from msa_lite.pipeline.prepare.models import open_reader
from msa_lite.pipeline.prepare.questions import load_set
from msa_lite.pipeline.run.vectors import check_learns
from msa_lite.pipeline.stages.costs import MOST_SAVES, SAVE, fit_cost
from msa_lite.pipeline.stages.facts import Facts, RowFacts, find_model_facts
from msa_lite.pipeline.stages.stage import Stage, enough_processes, forecast
from msa_lite.recipe import RecipeSource, TrainingRecipe, load_training
from msa_lite.recipe.training import NewModel, NewTokenizer, Training, TrainingStage
from msa_lite.train import FitSettings, check_mode, check_trackers
from msa_lite.train.scratch import count_parameters, make_config, texts_of, train_tokenizer

logger = logging.getLogger(__name__)

START_FOLDER = "0-start"  # the folder of a model from nothing
MODEL = "model"  # the name of the model's sizes in `Facts`
_CHARACTERS = 4  # of a token, about: where tokens are counted, a new tokenizer is trained on as much text

Sets = Sequence[tuple[DataSource, list[Row]]]
"""The data sets of a stage, pinned, with their rows; none where its tokens are counted, which is a stream."""


@dataclass(frozen=True)
class Start:
    """The model that training starts from: a checkpoint, or a config to make one of."""

    name: str | dict[str, Any]
    """The model as the resolved recipe names it."""
    tokenizer: Any
    """The tokenizer of all stages."""
    parameters: int
    """The number of weights."""
    window: int | None
    """The most tokens that the model reads; None where nothing limits them."""
    source: Source | None = None
    """The checkpoint, if there is one."""
    config: Any = None
    """The config of a new model."""
    made_of: dict[str, Any] | None = None
    """The inputs of a new model, for its manifest."""


@dataclass(frozen=True)
class ReadyStage:
    """A stage, ready to run."""

    name: str
    """The name of its folder."""
    settings: FitSettings
    """The settings of its fit."""
    examples: list[Example]
    """Its rows as token ids."""
    sources: list[DataSource]
    """Its data sets, pinned."""

    @property
    def tokens(self) -> int:
        """The tokens of an epoch as the model reads them: with prompts and special tokens, without padding."""
        return sum(len(example.ids) for example in self.examples)


@dataclass(frozen=True)
class TrainingRun:
    """The recipe of a training with its inputs, ready to run."""

    recipe: TrainingRecipe
    """The recipe as it was read."""
    start: Start
    """The model that the first stage goes on from."""
    stages: list[ReadyStage]
    """The stages in their order."""


def named_stages(recipe: TrainingRecipe) -> dict[str, TrainingStage]:
    """Return the stages of a training by the names of their folders: NUMBER-TITLE."""
    return {f"{number}-{stage.title}": stage for number, stage in enumerate(recipe.stages, 1)}


def prepare_training(recipe: TrainingRecipe) -> TrainingRun:
    """Find the model, then read and encode the rows. Its folder keeps texts of the Hub whose tokens are counted.

    Raise all faults of the stages' data, and of a new model, in one error; a checkpoint is opened once there are none.
    """
    check_trackers(recipe.track)
    faults, sets, source = Faults(), list[Sets](), None
    for number, stage in enumerate(recipe.stages):
        with faults.gathered(f"stages.{number}: "):
            sets.append(_load_sets(recipe, stage))
    if isinstance(recipe.model, str):
        with faults.gathered():
            source = fetch(recipe.model)
        faults.check()  # opening the model loads torch and transformers, which takes seconds
    check_device()
    with faults.gathered():
        if source:
            start = _find_start(source)
        elif isinstance(recipe.model, NewModel):  # if the data is at fault, its config can be checked all the same
            start = _new_start(recipe.model, recipe, [] if faults else _first_texts(recipe, sets[0]))
    faults.check()
    prompter = replace(make_prompter(start.tokenizer, recipe.prompt), window=start.window)
    stages = []
    for number, ((name, stage), stage_sets) in enumerate(zip(named_stages(recipe).items(), sets, strict=True)):
        with faults.gathered(f"stages.{number}: "):
            tuning = stage.model_dump(include={*Training.model_fields} - {"max_length"})
            settings = FitSettings(mode="full", seed=recipe.seed + number, **tuning)
            check_mode(settings.mode, compute=settings.compute)
            sources = [source for source, _ in stage_sets] or [_kept_source(recipe, stage)]
            examples, notes = _encode(recipe, stage, stage_sets, prompter)
            for note in notes:
                logger.warning("%s: %s", name, note)
            ready = ReadyStage(name, settings, examples, sources)
            if start.source:
                check_source(start.source, {token for example in ready.examples for token in example.ids})
            check_learns(name, settings, len(ready.examples))
            stages.append(ready)
    faults.check()
    return TrainingRun(recipe, start, stages)


def _load_sets(recipe: TrainingRecipe, stage: TrainingStage) -> Sets:
    if stage.tokens is None:
        return [load_set(data, recipe.columns) for data in stage.sets]
    if next(_stream(recipe, stage), None) is None:
        raise DataError(f"{stage.sets[0].path}: the data set is empty")
    return []


def _stream(recipe: TrainingRecipe, stage: TrainingStage) -> Iterator[str]:
    """Read the texts of a stage whose tokens are counted, no further than they are taken."""
    source = stage.sets[0].source(recipe.columns)
    return kept_texts(source, kept_file(recipe, stage)) if is_remote_data(source) else stream_texts(source)


def kept_file(recipe: TrainingRecipe, stage: TrainingStage) -> Path:
    """Return the file in a training's folder that keeps the texts of a stage whose tokens are counted."""
    return recipe.folder / "data" / f"{digest(asdict(stage.sets[0].source(recipe.columns)))[:16]}.jsonl"


def _kept_source(recipe: TrainingRecipe, stage: TrainingStage) -> DataSource:
    """Return the source of a stream, with the revision that is kept."""
    source, head = stage.sets[0].source(recipe.columns), kept_head(kept_file(recipe, stage))
    return replace(source, revision=head["revision"]) if head else source


def _find_start(source: Source) -> Start:
    check_source(source)
    reader, window = open_reader(source, source.name), smallest_window([source])
    return Start(source.pinned(), reader, count_weights(source), window, source)


def _new_start(model: NewModel, recipe: TrainingRecipe, texts: list[str]) -> Start:
    if isinstance(model.tokenizer, NewTokenizer):
        tokenizer, named = train_tokenizer(texts, model.tokenizer.vocabulary), model
        origin: dict[str, Any] = {"vocabulary": model.tokenizer.vocabulary, "texts": digest(texts)}
    else:
        source = fetch_tokenizer(model.tokenizer)
        tokenizer = open_tokenizer(source.folder, source.name)
        named, origin = model.model_copy(update={"tokenizer": source.pinned()}), {"revision": source.revision}
    config = make_config(model.config, tokenizer)
    made_of = {"config": model.config, "tokenizer": origin, "seed": recipe.seed}
    window = model_window(config)
    return Start(named.model_dump(), tokenizer, count_parameters(config), window, config=config, made_of=made_of)


def _first_texts(recipe: TrainingRecipe, sets: Sets) -> list[str]:
    """Return the texts that a new tokenizer is trained on: the first stage's rows, or about as much as its tokens."""
    limit = recipe.stages[0].tokens
    if limit is None:
        return texts_of([row for _, rows in sets for row in rows], recipe.prompt.template)
    texts, length = [], 0
    for text in _stream(recipe, recipe.stages[0]):
        texts.append(text)
        length += len(text)
        if length >= _CHARACTERS * limit:
            break
    return texts


def _encode(
    recipe: TrainingRecipe, stage: TrainingStage, sets: Sets, prompter: Prompter
) -> tuple[list[Example], list[str]]:
    """Return the examples of a stage, and a sentence about each data set with rows that are cut."""
    if stage.tokens is None:
        faults, parts, cut = Faults(), list[Example](), list[str]()
        for source, rows in sets:
            with faults.gathered(f"{source.path}: "):
                examples, notes = encode(rows, source, prompter, stage.max_length)
                parts += examples
                cut += [f"{source.path}: {note}" for note in notes]
        faults.check()
        return parts, cut
    path = stage.sets[0].path
    examples = encode_up_to(_stream(recipe, stage), prompter, stage.max_length, stage.tokens)
    if not examples:
        raise DataError(f"{path}: nothing to learn in {stage.tokens} tokens; ask for more")
    tokens = sum(len(example.ids) for example in examples)
    if tokens < stage.tokens - 1:  # a last one alone is no row
        logger.warning("%s: the recipe asks for %d tokens, the data has %d", path, stage.tokens, tokens)
    return examples, []


def find_training_facts(recipe: TrainingRecipe) -> Facts:
    """Find the sizes of a training's model and rows, without weights. Notes say which rows cannot be read.

    Raise UsageError where the sizes of the model cannot be read.
    """
    tokenizer, rows = None, dict[str, RowFacts]()
    if isinstance(recipe.model, str):
        with offline_where_unreachable() if is_remote(recipe.model) else nullcontext():
            facts = find_model_facts({MODEL: recipe.model})
    else:
        config = _new_config(recipe.model)
        facts = Facts({MODEL: shape_of_config(config.to_dict(), "the new model")}, {}, window=model_window(config))
    notes = facts.notes
    try:
        tokenizer = _find_tokenizer(recipe)
    except (MsaError, ImportError) as error:
        notes += [] if facts.missing else [f"no tokenizer: {str(error).splitlines()[0]}"]
    for name, stage in named_stages(recipe).items():
        if stage.tokens is not None:  # they are not read for it
            length = min(stage.max_length, facts.window or stage.max_length)
            rows[name] = RowFacts(-(-stage.tokens // length), min(stage.tokens, length), stage.tokens)
        elif tokenizer is not None:
            try:
                prompter = replace(make_prompter(tokenizer, recipe.prompt), window=facts.window)
                with muted():
                    examples, cut = _encode(recipe, stage, _load_sets(recipe, stage), prompter)
                rows[name] = RowFacts.of(examples)
                notes += [f"{name}: {note}" for note in cut]
            except (MsaError, ImportError) as error:
                notes.append(f"{name}: its rows could not be read ({str(error).splitlines()[0]})")
    if tokenizer is None:
        notes.append("without a tokenizer, rows are taken to be as long as max_length allows")
    return replace(facts, rows=rows)


def _new_config(model: NewModel) -> Any:
    """Return the config of a model from nothing, as far as it is known before its tokenizer is trained."""
    from transformers import AutoConfig

    own = model.tokenizer
    vocabulary = own.vocabulary if isinstance(own, NewTokenizer) else len(_open(own))
    values = {"vocab_size": vocabulary} | {key: value for key, value in model.config.items() if key != "model_type"}
    return AutoConfig.for_model(model.config["model_type"], **values)


def _find_tokenizer(recipe: TrainingRecipe) -> Any:
    """Return the tokenizer of a training; a new one is trained here on the same rows, but not on texts by the token."""
    name = recipe.model if isinstance(recipe.model, str) else recipe.model.tokenizer
    if not isinstance(name, NewTokenizer):
        return _open(name)
    first = recipe.stages[0]
    if first.tokens is not None:
        return None
    return train_tokenizer(_first_texts(recipe, _load_sets(recipe, first)), name.vocabulary)


def _open(name: str) -> Any:
    source = fetch_tokenizer(name)
    return open_tokenizer(source.folder, source.name)


def training_stages(recipe: TrainingRecipe) -> list[Stage]:
    """Return the stages of a training as its recipe tells them: where they stand, and what they cost."""
    start = [] if isinstance(recipe.model, str) else [Stage(START_FOLDER, "make", recipe.folder / START_FOLDER)]
    fits = [
        Stage(name, "fit", recipe.folder / name, cost=partial(_cost, name, stage))
        for name, stage in named_stages(recipe).items()
    ]
    return [*start, *fits]


def _cost(name: str, stage: TrainingStage, facts: Facts, machine: Machine) -> list[StageCost]:
    """Return the cost of a stage: all weights are trained, in fp32."""
    shape = facts.shapes[MODEL]
    values = stage.model_dump(include={"epochs", "batch_size", "micro_batch_size", "compute"})
    settings, rows = FitSettings("full", **values), facts.rows_of(name, stage.max_length)
    saves = SAVE * shape.weights * min(MOST_SAVES, stage.epochs)
    cost = fit_cost(f"the training of {name}", shape, settings, rows, machine)
    return [replace(cost, disk={"models": 4 * shape.weights}, while_running={"saves of a stage": saves})]


def plan_training(source: RecipeSource, overrides: Iterable[str], machine: Machine) -> Plan:
    """Predict memory, disk and time of each stage. Raise UsageError where the sizes of the model cannot be read."""
    recipe = load_training(source, overrides)
    stages, facts = training_stages(recipe), find_training_facts(recipe)
    if count := enough_processes(stages, facts, machine.device):
        launch = f"accelerate launch --num_processes {count} -m msa_lite train"
        facts.notes.append(f"{count} of these GPUs hold the training together: {launch}")
    return forecast(stages, facts, machine, recipe.folder)
