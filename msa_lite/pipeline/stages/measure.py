"""Measure a few steps of fits and a few scores and answers on this machine, for a plan. Nothing is left on disk."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from msa_lite.budget.plan import gigabytes
from msa_lite.budget.shape import Shape
from msa_lite.budget.speed import Measured, ScoreTimes, fit_seconds, score_seconds, speed_of, this_device
from msa_lite.data import Example, open_tokenizer, pad_id
from msa_lite.errors import UsageError
from msa_lite.evals.forward import score_bundles
from msa_lite.evals.generate import Decoding, generate
from msa_lite.evals.models import Runner, load_model
from msa_lite.io.console.libraries import has
from msa_lite.io.files.reading import local_path
from msa_lite.io.models.devices import avoid_fragments, free_ram
from msa_lite.io.weights.hub import Source, fetch, fetch_tokenizer
from msa_lite.io.weights.offline import offline
from msa_lite.pipeline.prepare.fits import step_settings
from msa_lite.pipeline.prepare.models import demo_config, written_out_as
from msa_lite.pipeline.stages.facts import Facts, RowFacts, batch_size, find_headers, has_history
from msa_lite.recipe import Demo, Recipe
from msa_lite.train import FitSettings, check_mode
from msa_lite.train.model import make_config, train_tokenizer, write_start
from msa_lite.train.rungs import Limit, time_steps

MOST_SECONDS = 5.0
"""The time that a measurement may take by estimate, unless it is asked for."""
_LOADED = 1e9  # bytes a second that a model is loaded at
_STEP = 0.4  # seconds that a step of a CPU may take by estimate, where its whole batch would take longer
_STEPS = 1.5  # seconds after which no further step begins
_TEXTS = {"cpu": 16, "cuda": 64}  # of a batch that is scored and answered
_TOKENS = 8  # of each answer
_MADE, _TOKENS_MADE = 10_000, 32  # rows that stand for others, more than a batch; the different tokens in them
_BYTES = {"full": 16}  # of a fit for each weight on a CPU: in fp32, with gradient and two moments; else 4
_ROOM = 0.8  # the part of the free memory that a measurement may take
_PROMPT = 4  # tokens of a prompt: a token of an answer takes little longer after a long one


def why_run_unmeasured(recipe: Recipe, facts: Facts) -> str:
    """Return why a plan of a run measures nothing by itself; "" where it does."""
    rows = {name: size for name, size in facts.rows.items() if name in recipe.vector_names}
    if is_new_demo(recipe):
        return why_long(facts.shapes["prior"], rows, recipe.vector.mode)
    return why_unmeasured(recipe.prior_checkpoint, facts.shapes["prior"], rows, recipe.vector.mode)


def why_unmeasured(model: str, shape: Shape, rows: Mapping[str, RowFacts], mode: str) -> str:
    """Return why a plan measures nothing by itself; "" where it can, in `MOST_SECONDS` by estimate.

    model: what the fits start from.
    """
    return why_impossible(model, rows) or why_long(shape, rows, mode)


def why_long(shape: Shape, rows: Mapping[str, RowFacts], mode: str) -> str:
    """Return why a measurement is left out for its length; "" where it takes `MOST_SECONDS` at most, by estimate."""
    if not rows:
        return "the rows of the fits cannot be read"
    if not has("train"):
        return "the libraries that train are not installed"
    device = this_device()
    speed, needed = speed_of(device), _BYTES.get(mode, 4) * shape.weights
    if not device.is_gpu and needed > _ROOM * free_ram():  # nothing catches it there
        return f"timing steps takes {gigabytes(needed)} of memory, and {gigabytes(free_ram())} are free"
    # The longest row is among the steps, alone in its batch if need be.
    lengths = [max(size.tokens / size.count for size in rows.values()), max(size.longest for size in rows.values())]
    steps = sum(max(_STEP, fit_seconds(shape, mode, False, length, speed)) for length in lengths)
    steps = 0.0 if device.is_gpu else steps
    answers = score_seconds(shape, _TEXTS["cpu"], _PROMPT, _TOKENS, _TEXTS["cpu"], speed)
    if 2 * shape.stored / _LOADED + steps + answers <= MOST_SECONDS:
        return ""
    size = gigabytes(shape.stored)
    return f"timing steps on {size} of weights takes more than {MOST_SECONDS:g} s; `msa-lite plan --measure` does it"


def why_impossible(model: str | None, rows: Mapping[str, RowFacts]) -> str:
    """Return why nothing can be measured; "" where it can. model: what the fits start from; None: a new one."""
    checkpoint = find_headers(model) if model else None
    if model and (checkpoint is None or not checkpoint.shards):
        return f"{model}, which the fits start from, is not on this machine"
    if model and local_path(model).is_dir() and (form := written_out_as(model)):
        return f"{model}, which the fits start from, is written out whole first ({form})"
    return "" if rows else "the rows of the fits cannot be read"


def measure_run(recipe: Recipe, facts: Facts, brief: bool = True) -> Measured:
    """Time steps of each fit, as its recipe has it, on the prior, and scores and answers of the prior's.

    brief: with as few rows as tell something in `MOST_SECONDS`. A new demo's model, which is not made yet, is one of
    random weights. Raise UsageError where prior or rows are not on this machine, StageError where no step fits into
    memory.
    """
    is_new = is_new_demo(recipe)
    rows = {name: size for name, size in facts.rows.items() if name in recipe.vector_names}
    if not is_new and (reason := why_impossible(recipe.prior_checkpoint, rows)):
        raise UsageError(f"--measure: {reason}")
    sets = {name: facts.examples.get(name) or made_rows(size) for name, size in rows.items()}
    settings = {name: step_settings(recipe.vector, batch_size(recipe, name, rows[name])) for name in sets}
    shape, scores = facts.shapes["prior"], recipe.evaluate is not None
    random = random_model(demo_config(recipe.demo)) if recipe.demo and is_new else None
    with random or nullcontext(opened(recipe.prior_checkpoint, recipe.tokenizer or recipe.target)) as (
        source,
        tokenizer,
    ):
        return measure_steps(source, tokenizer, sets, settings, shape, brief, scores)


def measure_steps(
    source: Source,
    tokenizer: Any,
    sets: Mapping[str, Sequence[Example]],
    settings: Mapping[str, FitSettings],
    shape: Shape,
    brief: bool,
    scores: bool,
) -> Measured:
    """Time steps of fits on sets of rows by name, and, with `scores`, scores and answers. shape: of the model."""
    avoid_fragments()
    first = next(iter(settings.values()))
    check_mode(first.mode, first.optimizer, first.compute)
    on_cpu, speed = not this_device().is_gpu, speed_of(this_device())
    limit, tokens = Limit(), None
    if brief:
        seconds = fit_seconds(shape, first.mode, False, 1, speed)  # of a token
        limit = Limit(_STEPS / len(sets), int(_STEP / seconds) if on_cpu else None)
        tokens = limit.tokens
    fits = time_steps(source, sets, settings, pad_id(tokenizer), limit)
    texts = [example for examples in sets.values() for example in examples]
    return Measured(first.mode, fits, time_scores(source, tokenizer, texts, tokens) if scores else None)


def is_new_demo(recipe: Recipe) -> bool:
    """Check whether a recipe makes models from nothing for its demo, and has not made them yet."""
    return isinstance(recipe.demo, Demo) and not has_history(recipe)


def opened(model: str, tokenizer: str) -> tuple[Source, Any]:
    """Return a model that is on this machine, with a tokenizer. A newer commit of the Hub's is not downloaded."""
    with offline():
        place = fetch_tokenizer(tokenizer)
        return fetch(model, by_content=False), open_tokenizer(place.folder, place.name)


@contextmanager
def random_model(values: Mapping[str, Any]) -> Iterator[tuple[Source, Any]]:
    """Yield a model of random weights, and a tokenizer for it. values: its config, with vocab_size."""
    tokenizer = train_tokenizer(["0 1 2"], values["vocab_size"])
    with tempfile.TemporaryDirectory() as folder:
        write_start(Path(folder) / "model", make_config(values, tokenizer), tokenizer, 0, {})
        yield Source(folder, Path(folder) / "model", ""), tokenizer


def made_rows(size: RowFacts) -> list[Example]:
    """Return rows that stand for those that are not there yet: of the mean length, of tokens that any model has."""
    ids = [3 + place % _TOKENS_MADE for place in range(size.tokens // size.count)]
    return [Example(index, ids, ids) for index in range(min(size.count, _MADE))]


def time_scores(source: Source, tokenizer: Any, texts: Sequence[Example], tokens: int | None = None) -> ScoreTimes:
    """Time the loading of a model, and scores and answers of a batch of texts.

    tokens: so many are scored at most, but at least one text; None: all of a batch.
    """
    begin = time.perf_counter()
    runner = Runner(load_model(source.folder, added=source.added))
    load = time.perf_counter() - begin
    try:
        batch = list(texts[: _TEXTS["cuda" if runner.device.type == "cuda" else "cpu"]])
        prompts = [(example.prompt_ids or example.ids)[:_PROMPT] for example in batch]
        while tokens is not None and len(batch) > 1 and sum(len(example.ids) for example in batch) > tokens:
            batch.pop()
        for _ in range(2):  # the first one warms up
            with _clock(runner) as scores:
                list(score_bundles(runner, [[example] for example in batch]))
        with _clock(runner) as short:
            list(generate(runner, tokenizer, prompts, Decoding(1)))
        with _clock(runner) as long:
            list(generate(runner, tokenizer, prompts, Decoding(1 + _TOKENS)))
    finally:
        runner.close()
    answers = max(0.0, long[0] - short[0]) / (_TOKENS * len(prompts))
    return ScoreTimes(load, scores[0] / sum(len(example.ids) for example in batch), answers)


@contextmanager
def _clock(runner: Runner) -> Iterator[list[float]]:
    """Yield a list that gets the seconds of the block when it ends."""
    import torch

    seconds: list[float] = []
    begin = time.perf_counter()
    yield seconds
    if runner.device.type == "cuda":
        torch.cuda.synchronize()
    seconds.append(time.perf_counter() - begin)
