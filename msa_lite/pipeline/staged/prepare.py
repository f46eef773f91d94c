"""Find, load and check all that a training needs before its first step: a model, and rows for each stage."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from msa_lite.errors import DataError, Faults, MismatchError
from msa_lite.evals.engine.models import check_source, count_weights
from msa_lite.io.files.reading import local_path
from msa_lite.io.files.writing import digest
from msa_lite.io.models.devices import check_device
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.io.weights.hub import Source, commit_of, fetch, fetch_tokenizer, split_name
from msa_lite.pipeline.prepare.models import open_reader
from msa_lite.pipeline.prepare.prompt import prompt_settings
from msa_lite.pipeline.prepare.questions import load_set, source_of
from msa_lite.pipeline.run.vectors import check_learns
from msa_lite.recipe import Columns, TrainingRecipe
from msa_lite.recipe.training import NewModel, NewTokenizer, Training, TrainingStage
from msa_lite.train import FitSettings, check_mode, check_trackers
from msa_lite.train.model import count_parameters, make_config, texts_of, train_tokenizer

logger = logging.getLogger(__name__)

_CHARACTERS = 4  # of a token, about: where tokens are counted, a new tokenizer is trained on as much text


@dataclass(frozen=True)
class Start:
    """The model that training starts from: a checkpoint, or a config to make one of."""

    name: str | dict[str, Any]
    """The model as the resolved recipe names it."""
    tokenizer: Any
    """The tokenizer of all stages."""
    parameters: int
    """The number of weights."""
    positions: int | None
    """The longest row that the model takes, if known."""
    source: Source | None = None
    """The checkpoint, if there is one."""
    config: Any = None
    """The config of a new model."""
    made_of: dict[str, Any] | None = None
    """The inputs of a new model, for its manifest."""


@dataclass(frozen=True)
class StageData:
    """The data of a stage."""

    sources: list[DataSource]
    """The data sets; pinned, unless their tokens are counted."""
    rows: list[list[Row]]
    """The rows of each data set; empty for a set whose tokens are counted, which is a stream."""
    texts: Path
    """The file that the texts of a stream are kept in."""

    def stream(self) -> Iterator[str]:
        """Read the texts of the one source, no further than they are taken."""
        source = self.sources[0]
        return kept_texts(source, self.texts) if is_remote_data(source) else stream_texts(source)

    def pinned(self) -> list[DataSource]:
        """Return the sources, that of a kept stream with the revision that is kept."""
        head = None if self.rows else kept_head(self.texts)
        return [replace(self.sources[0], revision=head["revision"])] if head else self.sources


@dataclass(frozen=True)
class ReadyStage:
    """A stage, ready to run."""

    name: str
    """The name of its folder."""
    settings: FitSettings
    """The settings of its fit."""
    examples: list[Example]
    """Its rows as token ids."""

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
    sources: list[list[DataSource]]
    """The data sets of each stage, pinned."""


def prepare_training(recipe: TrainingRecipe, folder: Path) -> TrainingRun:
    """Find the model, then read and encode the rows. `folder`/data keeps texts of the Hub whose tokens are counted.

    Raise all faults of the stages' data, and of a new model, in one error; a checkpoint is opened once there are none.
    """
    check_trackers(recipe.trackers)
    faults, data, source = Faults(), [], None
    for number, stage in enumerate(recipe.stages):
        with faults.gathered(f"stages.{number}: "):
            data.append(_load_data(stage, recipe.columns, folder))
    if isinstance(recipe.model, str):
        with faults.gathered():
            source = fetch(recipe.model)
        faults.check()  # opening the model loads torch and transformers, which takes seconds
    check_device()
    with faults.gathered():
        if source:
            start = _find_start(source)
        elif isinstance(recipe.model, NewModel):  # if the data is at fault, its config can be checked all the same
            start = _new_start(recipe.model, recipe, [] if faults else _first_texts(recipe, data[0]))
    faults.check()
    prompter = make_prompter(start.tokenizer, prompt_settings(recipe.prompt))
    stages = []
    for number, (stage, inputs) in enumerate(zip(recipe.stages, data, strict=True)):
        with faults.gathered(f"stages.{number}: "):
            tuning = stage.model_dump(include={*Training.model_fields} - {"max_length"})
            settings = FitSettings(mode="full", seed=recipe.seed + number, **tuning)
            check_mode(settings.mode, compute=settings.compute)
            ready = ReadyStage(f"{number + 1}-{stage.title}", settings, _encode(stage, inputs, prompter))
            if start.source:
                check_source(start.source, {token for example in ready.examples for token in example.ids})
            check_learns(ready.name, settings, len(ready.examples))
            _check_lengths(ready.examples, start.positions)
            stages.append(ready)
    faults.check()
    return TrainingRun(recipe, start, stages, [inputs.pinned() for inputs in data])


def _load_data(stage: TrainingStage, columns: Columns, folder: Path) -> StageData:
    texts = kept_file(stage, columns, folder)
    if stage.tokens is None:
        sources, rows = zip(*(load_set(data, columns) for data in stage.sets), strict=True)
        return StageData([*sources], [*rows], texts)
    data = StageData([source_of(stage.sets[0], columns)], [], texts)
    if next(data.stream(), None) is None:
        raise DataError(f"{data.sources[0].path}: the data set is empty")
    return data


def kept_file(stage: TrainingStage, columns: Columns, folder: Path) -> Path:
    """Return the file that keeps the texts of a stage whose tokens are counted. folder: that of the training."""
    return folder / "data" / f"{digest(stage.sets[0].flat(columns))[:16]}.jsonl"


def _find_start(source: Source) -> Start:
    check_source(source)
    config = load_checkpoint(source.folder).config
    positions = config.get("max_position_embeddings") or config.get("n_positions")
    return Start(source.pinned(), open_reader(source, source.name), count_weights(source), positions, source)


def _new_start(model: NewModel, recipe: TrainingRecipe, texts: list[str]) -> Start:
    if isinstance(model.tokenizer, NewTokenizer):
        tokenizer, named = train_tokenizer(texts, model.tokenizer.vocabulary), model
        origin: dict[str, Any] = {"vocabulary": model.tokenizer.vocabulary, "texts": digest(texts)}
    else:
        tokenizer, pinned, revision = _open_tokenizer(model.tokenizer)
        named, origin = model.model_copy(update={"tokenizer": pinned}), {"revision": revision}
    config = make_config(model.config, tokenizer)
    made_of = {"config": model.config, "tokenizer": origin, "seed": recipe.seed}
    positions = getattr(config, "max_position_embeddings", None)
    return Start(named.model_dump(), tokenizer, count_parameters(config), positions, config=config, made_of=made_of)


def _first_texts(recipe: TrainingRecipe, data: StageData) -> list[str]:
    """Return the texts that a new tokenizer is trained on: the first stage's rows, or about as much as its tokens."""
    limit = recipe.stages[0].tokens
    if limit is None:
        rows = [row for rows in data.rows for row in rows]
        return texts_of(rows, prompt_settings(recipe.prompt).template)
    texts, length = [], 0
    for text in data.stream():
        texts.append(text)
        length += len(text)
        if length >= _CHARACTERS * limit:
            break
    return texts


def _open_tokenizer(name: str) -> tuple[Any, str, str | None]:
    """Return a tokenizer, its pinned name and its revision. Nothing else of a repository is fetched."""
    if local_path(name).is_dir():
        source = fetch(name)
        return open_tokenizer(source.folder, name), name, source.revision
    repo, branch = split_name(name)
    revision = commit_of(name) or branch
    folder = fetch_tokenizer(name).folder
    return open_tokenizer(folder, name), f"{repo}@{revision}" if revision else repo, revision


def _encode(stage: TrainingStage, data: StageData, prompter: Prompter) -> list[Example]:
    if stage.tokens is None:
        pairs = zip(data.rows, data.sources, strict=True)
        return [e for rows, source in pairs for e in encode(rows, source, prompter, stage.max_length)]
    examples = encode_up_to(data.stream(), prompter.tokenizer, stage.max_length, stage.tokens)
    if not examples:
        raise DataError(f"{data.sources[0].path}: nothing to learn in {stage.tokens} tokens; ask for more")
    tokens = sum(len(example.ids) for example in examples)
    if tokens < stage.tokens - 1:  # a last one alone is no row
        logger.warning("%s: the recipe asks for %d tokens, the data has %d", data.sources[0].path, stage.tokens, tokens)
    return examples


def _check_lengths(examples: list[Example], positions: int | None) -> None:
    longest = max(len(example.ids) for example in examples)
    if positions is not None and longest > positions:
        raise MismatchError(f"its rows have up to {longest} tokens, the model takes {positions}; lower max_length")
