"""Time a few real steps of a fit, for the plan of a run. Nothing is written."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msa_lite.data import Example
from msa_lite.io.hub import Source
from msa_lite.io.memory import free_memory
from msa_lite.train.model import load_trainable
from msa_lite.train.plain import PlainLoss
from msa_lite.train.rungs import Rung, find_rung, ladder
from msa_lite.train.settings import FitSettings

_STEPS = 4  # after one that warms up
_SECONDS = 60.0  # after which no further step begins


@dataclass(frozen=True)
class StepTimes:
    """The times of a fit's steps on this machine."""

    load: float
    """Seconds of loading the prior."""
    token: float
    """Seconds of a step for each token of its rows: the median of the steps."""
    steps: int
    """The steps that were timed."""
    peak: int | None
    """The highest number of bytes in tensors on the GPU; None on a CPU."""
    rung: Rung
    """Their use of memory."""


def time_steps(
    prior: Source, sets: Mapping[str, Sequence[Example]], settings: Mapping[str, FitSettings], pad: int
) -> dict[str, StepTimes]:
    """Load the prior as a fit does and time some of its steps on each set of rows, at the first rung that fits.

    sets, settings: by the name of the vector; settings differ in their batches alone. Raise StageError where no rung
    fits.
    """
    begin, times = time.perf_counter(), dict[str, StepTimes]()
    model = load_trainable(prior.folder, next(iter(settings.values())), prior.added)
    load = time.perf_counter() - begin
    try:
        kinds = ladder(model, [1])
        for name in sorted(sets, key=lambda name: max(len(e.ids) for e in sets[name])):  # no rung can be taken back
            loss = PlainLoss(sets[name], pad)
            rung = find_rung(model, loss, settings[name], kinds)
            kinds = kinds[kinds.index(replace(rung, micro=1)) :]
            times[name] = StepTimes(load, *_time_set(model, loss, settings[name], rung), rung)
    finally:
        del model
        free_memory()
    return times


def _time_set(model: Any, loss: PlainLoss, settings: FitSettings, rung: Rung) -> tuple[float, int, int | None]:
    """Return seconds for a token, the number of steps, and the peak in bytes. The weights stay as they are."""
    import torch

    on_gpu, optimizer = model.device.type == "cuda", _optimizer(model, settings)
    loss.prepare(model.train())
    seconds: list[float] = []
    begin = time.perf_counter()
    for rows in _draws(loss.examples, settings):
        if on_gpu and len(seconds) == 1:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss.step(model, rows, 0, rung.micro, lambda part: part.backward())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - start) / sum(len(loss.examples[i].ids) for i in rows))
        if len(seconds) > 1 and time.perf_counter() - begin > _SECONDS:
            break
    loss.release()
    peak = int(torch.cuda.max_memory_allocated()) if on_gpu else None
    return statistics.median(seconds[1:]), len(seconds) - 1, peak


def _draws(examples: Sequence[Example], settings: FitSettings) -> list[list[int]]:
    """Return the rows of each step: drawn ones to warm up, the longest, and drawn ones again."""
    draw, count = random.Random(settings.seed), min(settings.batch_size, len(examples))
    drawn = [draw.sample(range(len(examples)), count) for _ in range(_STEPS)]
    longest = sorted(range(len(examples)), key=lambda i: -len(examples[i].ids))[:count]
    return [drawn[0], longest, *drawn[1:]]


def _optimizer(model: Any, settings: FitSettings) -> Any:
    """Make the fit's optimiser, with a rate of 0."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(), learning_rate=0.0, report_to="none", **settings.trainer_options()
    )
    kind, options = Trainer.get_optimizer_cls_and_kwargs(arguments)
    return kind([parameter for parameter in model.parameters() if parameter.requires_grad], **options)
