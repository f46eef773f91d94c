"""What a training in stages needs, found, loaded and checked before the first step: a model and rows for each stage."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msa_lite.data import (
    DataSource,
    Example,
    Prompter,
    Row,
    check_vocabulary,
    encode,
    encode_up_to,
    is_remote_data,
    kept_head,
    kept_texts,
    load_rows,
    make_prompter,
    open_tokenizer,
    pin_source,
    stream_texts,
)
from msa_lite.errors import DataError, Faults, MismatchError
from msa_lite.evals.models import check_source
from msa_lite.io.checkpoint import load_checkpoint
from msa_lite.io.files import digest
from msa_lite.io.hub import Source, commit_of, fetch, split_name
from msa_lite.io.reading import local_path
from msa_lite.io.tokenizer import fetch_tokenizer
from msa_lite.pipeline.fits import check_fit_learns
from msa_lite.pipeline.prepare_prompt import prompt_settings
from msa_lite.recipe import Columns, TrainingRecipe
from msa_lite.recipe.training import NewModel, NewTokenizer, Stage, Training
from msa_lite.train import FitSettings
from msa_lite.train.scratch import count_parameters, make_config, texts_of, train_tokenizer

logger = logging.getLogger(__name__)

_CHARACTERS = 4  # of a token, about: where tokens are counted, a tokenizer is trained on so much text


@dataclass(frozen=True)
class Start:
    """The model that training starts from: a checkpoint (`source`), or what to make one of (`config`, `made_of`).

    name: as the resolved recipe has it. positions: the longest row that it takes, where that is known.
    """

    name: str | dict[str, Any]
    tokenizer: Any
    parameters: int
    positions: int | None
    source: Source | None = None
    config: Any = None
    made_of: dict[str, Any] | None = None


@dataclass(frozen=True)
class StageData:
    """The data of a stage: its sources, pinned, and the rows of each. texts: the file that a stream is kept in."""

    sources: list[DataSource]
    rows: list[list[Row]]
    texts: Path

    def stream(self) -> Iterator[str]:
        """The texts of the one source, read no further than they are taken."""
        source = self.sources[0]
        return kept_texts(source, self.texts) if is_remote_data(source) else stream_texts(source)

    def pinned(self) -> list[DataSource]:
        """The sources, that of a kept stream with the revision that is kept."""
        head = None if self.rows else kept_head(self.texts)
        return [replace(self.sources[0], revision=head["revision"])] if head else self.sources


@dataclass(frozen=True)
class ReadyStage:
    """A stage, ready to run. name: of its folder."""

    name: str
    settings: FitSettings
    examples: list[Example]

    @property
    def tokens(self) -> int:
        """Tokens of an epoch as the model reads them: prompts and special tokens included, padding not."""
        return sum(len(example.ids) for example in self.examples)


@dataclass(frozen=True)
class TrainingRun:
    """A recipe of a training with its inputs. data: the sources of each stage, with what pins them."""

    recipe: TrainingRecipe
    folder: Path
    start: Start
    stages: list[ReadyStage]
    sources: list[list[DataSource]]


def prepare_training(recipe: TrainingRecipe, folder: Path) -> TrainingRun:
    """Find the model, read and encode the rows; texts of the Hub that are counted in tokens are kept in `folder`/data.

    Raises all that is wrong with the model and with the data of the stages in one error.
    """
    faults, data = Faults(), []
    for number, stage in enumerate(recipe.stages):
        with faults.gathered(f"stages.{number}: "):
            data.append(_load_data(stage, recipe.columns, folder))
    with faults.gathered():
        if isinstance(recipe.model, str):
            start = _find_start(recipe.model)
        else:  # where there is a fault in the data, the config can be checked all the same
            start = _new_start(recipe.model, recipe, [] if faults else _first_texts(recipe, data[0]))
    faults.check()
    prompter = make_prompter(start.tokenizer, prompt_settings(recipe.prompt))
    stages = []
    for number, (stage, inputs) in enumerate(zip(recipe.stages, data, strict=True)):
        with faults.gathered(f"stages.{number}: "):
            tuning = stage.model_dump(include={*Training.model_fields} - {"max_length"})
            settings = FitSettings(mode="full", seed=recipe.seed + number, **tuning)
            ready = ReadyStage(f"{number + 1}-{stage.title}", settings, _encode(stage, inputs, prompter))
            if start.source:
                check_source(start.source, {token for example in ready.examples for token in example.ids})
            check_fit_learns(ready.name, settings, len(ready.examples))
            _check_lengths(ready.examples, start.positions)
            stages.append(ready)
    faults.check()
    return TrainingRun(recipe, folder, start, stages, [inputs.pinned() for inputs in data])


def _load_data(stage: Stage, columns: Columns, folder: Path) -> StageData:
    sources = [DataSource(**data.flat(columns)) for data in stage.sets]
    texts = folder / "data" / f"{digest(stage.sets[0].flat(columns))[:16]}.jsonl"
    if stage.tokens is None:
        sources = [pin_source(source) for source in sources]
        return StageData(sources, [load_rows(source) for source in sources], texts)
    data = StageData(sources, [], texts)
    if next(data.stream(), None) is None:
        raise DataError(f"{sources[0].path}: the data set is empty")
    return data


def _find_start(name: str) -> Start:
    source = fetch(name)
    check_source(source)
    checkpoint = load_checkpoint(source.folder)
    tokenizer = open_tokenizer(source.folder, name)
    check_vocabulary(tokenizer, checkpoint.config.get("vocab_size"), name)
    parameters = sum(math.prod(entry.shape) for entry in checkpoint.tensors.values())
    positions = checkpoint.config.get("max_position_embeddings") or checkpoint.config.get("n_positions")
    return Start(source.pinned(), tokenizer, parameters, positions, source)


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
    """What a tokenizer of the recipe's own is trained on: the first stage's rows, or about as much as it has tokens."""
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
    """(a tokenizer; its name, pinned; its revision). Of a repository, nothing but the tokenizer is fetched."""
    if local_path(name).is_dir():
        source = fetch(name)
        return open_tokenizer(source.folder, name), name, source.revision
    repo, asked = split_name(name)
    revision = commit_of(name) or asked
    found = fetch_tokenizer(name).folder
    return open_tokenizer(found, name), f"{repo}@{revision}" if revision else repo, revision


def _encode(stage: Stage, data: StageData, prompter: Prompter) -> list[Example]:
    if stage.tokens is None:
        pairs = zip(data.rows, data.sources, strict=True)
        return [e for rows, source in pairs for e in encode(rows, source, prompter, stage.max_length)]
    examples = encode_up_to(data.stream(), prompter.tokenizer, stage.max_length, stage.tokens)
    found = sum(len(example.ids) for example in examples)
    if not examples:
        raise DataError(f"{data.sources[0].path}: nothing to learn in {stage.tokens} tokens; ask for more")
    if found < stage.tokens - 1:  # a last one alone is no row
        logger.warning("%s: %d tokens were asked for, it has %d", data.sources[0].path, stage.tokens, found)
    return examples


def _check_lengths(examples: list[Example], positions: int | None) -> None:
    longest = max(len(example.ids) for example in examples)
    if positions is not None and longest > positions:
        raise MismatchError(f"its rows have up to {longest} tokens, the model takes {positions}; lower max_length")
