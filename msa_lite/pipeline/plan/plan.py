"""Plan a run or a training before it starts: the memory, disk and time of each stage, and what would make it fit."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from msa_lite.budget.plan import Plan
from msa_lite.budget.speed import Device, Measured, ScoreTimes, this_device
from msa_lite.data import Example, open_tokenizer, pad_id
from msa_lite.errors import UsageError
from msa_lite.evals.forward import score_bundles
from msa_lite.evals.generate import Decoding, generate
from msa_lite.evals.models import Runner, load_model
from msa_lite.io.console.progress import notices
from msa_lite.io.models.devices import avoid_fragments
from msa_lite.io.weights.hub import Source, fetch, fetch_tokenizer
from msa_lite.merger.checked import parse_size
from msa_lite.pipeline.prepare.run import step_settings
from msa_lite.pipeline.staged.plan import plan_training
from msa_lite.pipeline.stages.costs import find_remedies, forecast
from msa_lite.pipeline.stages.facts import (
    PlanInputs,
    batch_size,
    find_headers,
    find_plan_inputs,
    has_history,
    vector_names,
)
from msa_lite.recipe import Recipe, RecipeSource, TrainingRecipe, load_any, load_recipe
from msa_lite.train import check_mode
from msa_lite.train.rungs import time_steps

_TEXTS = {"cpu": 16, "cuda": 64}  # of a batch that is scored and answered
_TOKENS = 8  # of each answer


def measure_times(recipe: Recipe, inputs: PlanInputs) -> Measured:
    """Time steps of each fit, as its recipe has it, on the prior, and scores and answers of the prior's.

    Raise UsageError where prior or rows are not on this machine, StageError where no step fits into memory.
    """
    _check_prior(recipe)
    sets = {name: inputs.examples[name] for name in vector_names(recipe) if name in inputs.examples}
    if not sets:
        raise UsageError(f"--measure: the rows of the fits cannot be read: {'; '.join(inputs.notes)}")
    spec = recipe.vector
    avoid_fragments()
    check_mode(spec.mode, spec.optimizer, spec.compute)
    notices.info("timing a few steps on this machine; nothing is written")
    prior = fetch(recipe.prior_checkpoint, by_content=False)
    place = fetch_tokenizer(recipe.tokenizer or recipe.target)
    tokenizer = open_tokenizer(place.folder, place.name)
    settings = {name: step_settings(spec, batch_size(recipe, name, inputs.rows[name])) for name in sets}
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
            f"--measure: the prior {recipe.prior_checkpoint} is not on this machine; download it first, or leave "
            "--measure out"
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


_SMALLEST_GPU = 100_000_000  # bytes


def plan(
    recipe: RecipeSource,
    overrides: Iterable[str] = (),
    *,
    gpu: str | int | None = None,
    price_per_hour: float | None = None,
    measure: bool = False,
) -> Plan:
    """Predict memory, disk and time of each stage of a run or a training, from headers and configs; read no weights.

    gpu: the memory of a GPU, such as "8GB", in the place of this machine's device. price_per_hour: of that device.
    measure: load the prior and time a few steps on this machine, for times in the place of estimates. Raise UsageError
    where neither target nor prior can be found, on this machine or on the Hub.
    """
    if measure and gpu is not None:
        raise UsageError("--measure: times this machine; leave --gpu out")
    device = _device_of(gpu) if gpu is not None else this_device()
    if isinstance(load_any(recipe, overrides), TrainingRecipe):
        if measure:
            raise UsageError("--measure: times the fits of a run, not a training; leave it out")
        return plan_training(recipe, overrides, device, price_per_hour)
    loaded = load_recipe(recipe, overrides)
    inputs = find_plan_inputs(loaded)
    measured = measure_times(loaded, inputs) if measure else None
    made = forecast(loaded, inputs, device, measured=measured)
    if loaded.vector.mode == "full" and (count := _enough_processes(loaded, inputs, device)):
        launch = f"accelerate launch --num_processes {count} -m msa_lite"
        made = replace(
            made, notes=[*made.notes, f"{count} of these GPUs hold the fits in full mode together: {launch}"]
        )
    remedies = () if made.fits else tuple(find_remedies(loaded, inputs, device))
    return replace(made, remedies=remedies, price_per_hour=price_per_hour)


def _device_of(size: str | int) -> Device:
    """Return a GPU of this much memory. Raise UsageError for less than any has, such as 8 in the place of 8GB."""
    device = Device("", parse_size(size))
    if device.nbytes < _SMALLEST_GPU:
        raise UsageError(f"--gpu {size}: no GPU has so little memory; write it as 8GB")
    return device


def _enough_processes(recipe: Recipe, inputs: PlanInputs, device: Device) -> int | None:
    """Return how many GPUs share a fit in full mode that does not fit on one; None where it does, or 8 are too few."""
    for count in (1, 2, 4, 8) if device.is_gpu else ():
        fits = [stage.need.nbytes for stage in forecast(recipe, inputs, device, count).stages if stage.kind == "fit"]
        if max(fits, default=0) <= device.nbytes:
            return count if count > 1 else None
    return None
