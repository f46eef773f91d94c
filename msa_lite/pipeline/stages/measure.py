"""Measure a few steps of the fits and a few scores and answers on this machine, for a plan. Nothing is written."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from msa_lite.budget.speed import Measured, ScoreTimes
from msa_lite.data import Example, open_tokenizer, pad_id
from msa_lite.errors import UsageError
from msa_lite.evals.forward import score_bundles
from msa_lite.evals.generate import Decoding, generate
from msa_lite.evals.models import Runner, load_model
from msa_lite.io.console.progress import notices
from msa_lite.io.models.devices import avoid_fragments
from msa_lite.io.weights.hub import Source, fetch, fetch_tokenizer
from msa_lite.pipeline.prepare.fits import step_settings
from msa_lite.pipeline.stages.facts import Facts, batch_size, find_headers, has_history
from msa_lite.recipe import Recipe
from msa_lite.train import check_mode
from msa_lite.train.rungs import time_steps

_TEXTS = {"cpu": 16, "cuda": 64}  # of a batch that is scored and answered
_TOKENS = 8  # of each answer


def measure_times(recipe: Recipe, facts: Facts) -> Measured:
    """Time steps of each fit, as its recipe has it, on the prior, and scores and answers of the prior's.

    Raise UsageError where prior or rows are not on this machine, StageError where no step fits into memory.
    """
    _check_prior(recipe)
    sets = {name: facts.examples[name] for name in recipe.vector_names if name in facts.examples}
    if not sets:
        raise UsageError(f"--measure: the rows of the fits cannot be read: {'; '.join(facts.notes)}")
    spec = recipe.vector
    avoid_fragments()
    check_mode(spec.mode, spec.optimizer, spec.compute)
    notices.info("timing a few steps on this machine; nothing is written")
    prior = fetch(recipe.prior_checkpoint, by_content=False)
    place = fetch_tokenizer(recipe.tokenizer or recipe.target)
    tokenizer = open_tokenizer(place.folder, place.name)
    settings = {name: step_settings(spec, batch_size(recipe, name, facts.rows[name])) for name in sets}
    fits = time_steps(prior, sets, settings, pad_id(tokenizer))
    texts = [example for examples in sets.values() for example in examples]
    times = time_scores(prior, tokenizer, texts, recipe.select.four_bit) if recipe.evaluate else None
    return Measured(fits, times)


def _check_prior(recipe: Recipe) -> None:
    """Raise UsageError where the prior's weights are not on this machine."""
    if recipe.demo is not None and not has_history(recipe):
        raise UsageError("--measure: the models of the demo are not made yet; the run makes them")
    checkpoint = find_headers(recipe.prior_checkpoint)
    if checkpoint is None or not checkpoint.shards:
        raise UsageError(
            f"--measure: {recipe.prior_checkpoint}, which the fits start from, is not on this machine; download it "
            "first, or leave --measure out"
        )


def time_scores(source: Source, tokenizer: Any, texts: Sequence[Example], four_bit: bool = False) -> ScoreTimes:
    """Time the loading of a model, and scores and answers of a batch of texts. four_bit: in NF4."""
    begin = time.perf_counter()
    runner = Runner(load_model(source.folder, four_bit=four_bit, added=source.added))
    load = time.perf_counter() - begin
    try:
        batch = list(texts[: _TEXTS["cuda" if runner.device.type == "cuda" else "cpu"]])
        prompts = [example.prompt_ids or example.ids[:1] for example in batch]
        for _ in range(2):  # the first one warms up
            with _clock(runner) as scores:
                list(score_bundles(runner, [[example] for example in batch]))
        with _clock(runner) as short:
            list(generate(runner, tokenizer, prompts, Decoding(1)))
        with _clock(runner) as long:
            list(generate(runner, tokenizer, prompts, Decoding(1 + _TOKENS)))
    finally:
        runner.close()
    tokens = sum(len(example.ids) for example in batch)
    answers = max(0.0, long[0] - short[0]) / (_TOKENS * len(batch))
    return ScoreTimes(load, scores[0] / tokens, answers)


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
