"""The ways in which a fit takes less memory, rung by rung, and the probe that finds the first that fits."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msa_lite.data import Example
from msa_lite.errors import StageError, UsageError
from msa_lite.io.console.progress import readable
from msa_lite.io.models.devices import free_bytes, free_memory, is_out_of_memory, memory_fault, total_bytes
from msa_lite.io.models.ends import can_leave_embedding, can_leave_head, leave_embedding, leave_head
from msa_lite.io.models.heads import autocast, layers_path
from msa_lite.io.models.streaming import is_streamed
from msa_lite.io.weights.hub import Source
from msa_lite.train.model import load_trainable, stream_fit
from msa_lite.train.plain import PlainLoss
from msa_lite.train.settings import FitSettings

if TYPE_CHECKING:
    from msa_lite.train.settings import Objective


CPU_TOKENS = 4096
"""The tokens of a micro-batch on a CPU, where running out of memory cannot be caught."""


@dataclass(frozen=True)
class Rung:
    """A way to use memory in a fit."""

    micro: int
    """Rows of one forward pass."""
    checkpointing: bool = False
    """Activations within a layer are computed again in the backward pass."""
    embedding_on_cpu: bool = False
    """The frozen embedding stays in the host's memory; its outputs go to the GPU."""
    states_on_cpu: bool = False
    """The states between layers wait in the host's memory for the backward pass."""
    layers_streamed: bool = False
    """The frozen weights of layers wait in the host's memory, and each layer's pass through when it computes."""
    head_streamed: bool = False
    """So do the rows of the head."""

    def __str__(self) -> str:
        words = {
            "checkpointing": self.checkpointing,
            "the embedding on the CPU": self.embedding_on_cpu,
            "states between layers on the CPU": self.states_on_cpu,
            "layers streamed from RAM": self.layers_streamed,
            "the head, too": self.head_streamed,
        }
        rows = f"{self.micro} row{'s' * (self.micro > 1)} at a time"
        return ", ".join([rows, *(word for word, is_so in words.items() if is_so)])

    def leaves_all_that(self, other: Rung) -> bool:
        """Check whether all that another rung leaves out of the GPU's memory is left out at this one."""
        ways = [key.name for key in fields(self) if key.name != "micro"]
        return all(getattr(self, way) >= getattr(other, way) for way in ways)


def longest_first(examples: Sequence[Example]) -> list[int]:
    """Return the indices of examples, the longest first."""
    return sorted(range(len(examples)), key=lambda i: -len(examples[i].ids))


def micro_batches(settings: FitSettings, longest: int) -> list[int]:
    """Return the rows of a forward pass to try, largest first: divisors of batch_size, on a CPU up to so many tokens.

    longest: tokens of the longest row.
    """
    import torch

    size, fixed = settings.batch_size, settings.micro_batch_size
    if fixed != "auto":
        if size % fixed:
            raise UsageError(f"micro_batch_size {fixed} does not divide batch_size {size}")
        return [fixed]
    limit = size if torch.cuda.is_available() else max(1, CPU_TOKENS // longest)
    return [rows for rows in range(size, 0, -1) if size % rows == 0 and rows <= limit]


def ladder(model: Any, micros: Sequence[int], moves: bool = True) -> list[Rung]:
    """Return the rungs of a loaded model, the one that takes most memory first. micros: falling.

    moves: False for those that leave weights and states on the device.
    """
    on_gpu = moves and free_bytes() is not None
    rungs = [Rung(micros[0])]
    if model.supports_gradient_checkpointing:
        rungs.append(replace(rungs[-1], checkpointing=True))
    if on_gpu and can_leave_embedding(model):
        rungs.append(replace(rungs[-1], embedding_on_cpu=True))
    if on_gpu and rungs[-1].checkpointing:
        rungs.append(replace(rungs[-1], states_on_cpu=True))
    least = rungs[-1]
    rungs += [replace(least, micro=micro) for micro in micros[1:]]
    if not on_gpu or not can_stream(model):
        return rungs
    streamed = [replace(least, layers_streamed=True)]
    if can_leave_head(model):
        streamed.append(replace(streamed[0], head_streamed=True))
    below = [replace(way, micro=micro) for way in streamed for micro in micros]
    return below if is_streamed(model) else rungs + below


def can_stream(model: Any) -> bool:
    """Check whether layers have frozen weights, and each has its own."""
    path = layers_path(model)
    layers = [*model.get_submodule(path)] if path else []
    frozen = [id(p) for layer in layers for p in layer.parameters() if not p.requires_grad]
    return len(layers) > 1 and len(frozen) == len({*frozen}) > 0


def set_up(model: Any, rung: Rung, folder: Path | None = None) -> None:
    """Bring a model to a rung, from one above or from none. folder: see `stream`."""
    if rung.checkpointing:
        checkpoint_layers(model, rung.states_on_cpu)
    if rung.embedding_on_cpu and can_leave_embedding(model):
        leave_embedding(model, model.device)
        free_memory()
    if rung.layers_streamed and not is_streamed(model):
        stream_fit(model, model.device, folder)
        free_memory()
    if rung.head_streamed and can_leave_head(model):
        leave_head(model, model.device)
        free_memory()


def checkpoint_layers(model: Any, offload: bool = False) -> None:
    """Have the model compute the activations of a layer again in the backward pass, instead of keeping them.

    offload: the states between layers wait in the host's memory.
    """
    model.activation_checkpointing_enable({"use_reentrant": False}, offload=offload)
    model.disable_input_require_grads()  # for checkpoints of the old kind only; it would cost gradients of the inputs


@dataclass(frozen=True)
class Static:
    """Bytes that a fit holds all the time, whatever the rows."""

    weights: int
    gradients: int
    optimizer: int

    @classmethod
    def of(cls, model: Any, settings: FitSettings) -> Static:
        """Count them on a loaded model."""
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        # Two states of a byte each, and a scale for each block of 256; or two in fp32.
        return cls(weights, 4 * trained, int((2 + 8 / 256 if settings.has_8bit_states else 8) * trained))

    def __str__(self) -> str:
        rest = readable(self.gradients + self.optimizer)
        text = f"the weights take {readable(self.weights)}, gradients and optimiser {rest}"
        total = total_bytes()
        return f"{text}; the GPU has {readable(total)}" if total else text


@dataclass(frozen=True)
class StepProbe:
    """Tries whether a step fits: the longest rows that a forward pass may have, forward and backward."""

    objective: Objective
    settings: FitSettings
    rows: Sequence[int]
    """The indices of all rows, the longest first."""

    def fault(self, model: Any, micro: int) -> str | None:
        """Return why a step does not fit, or None. On a CPU nothing is tried. The model is left as it was."""
        room = free_bytes()
        if room is None:
            return None
        static = Static.of(model, self.settings)
        if static.gradients + static.optimizer >= room:
            needed = readable(static.gradients + static.optimizer)
            return f"gradients and optimiser need {needed}, {readable(room)} are free"
        try:
            with _scratch(model, static.optimizer), autocast(model):
                self.objective.prepare(model)
                self.objective.step(model, self.rows[:micro], 0, micro, lambda loss: loss.backward())
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return memory_fault(error)
        finally:
            self.objective.release()
            for parameter in model.parameters():
                parameter.grad = None
            free_memory()
        return None


def find_rung(model: Any, objective: PlainLoss, settings: FitSettings, rungs: Iterable[Rung]) -> Rung:
    """Set the model up at the first of these rungs that a step fits at, and return it.

    Raise StageError where there is none.
    """
    probe = StepProbe(objective, settings, longest_first(objective.examples))
    fault: str | None = None
    for rung in rungs:
        set_up(model, rung)
        fault = probe.fault(model, rung.micro)
        if fault is None:
            return rung
    raise StageError(f"no step of the fit is possible: out of memory ({fault}): {Static.of(model, settings)}")


@contextmanager
def _scratch(model: Any, optimizer: int) -> Iterator[None]:
    """Hold gradients and the optimiser's bytes as a step does; put the random numbers back afterwards."""
    import torch

    device = model.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        model.train()
        states = torch.empty(optimizer, dtype=torch.uint8, device=device)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        yield
        del states


_STEPS = 4  # after one that warms up


@dataclass(frozen=True)
class StepTimes:
    """The times of a fit's steps on this machine."""

    load: float
    """Seconds of loading the prior."""
    token: float
    """Seconds of forward and backward passes for each token of the rows: the median of the steps."""
    step: float
    """Seconds of the optimiser in a step: the median, too."""
    steps: int
    """The steps that were timed."""
    peak: int | None
    """The highest number of bytes in tensors on the GPU; None on a CPU."""
    rung: Rung
    """Their use of memory."""


@dataclass(frozen=True)
class Limit:
    """The length of a measurement."""

    seconds: float = 60.0
    """No further step of a set begins after so many."""
    tokens: int | None = None
    """A step has as many rows of its batch as have so many tokens, but at least one; None: all of them."""


def time_steps(
    prior: Source,
    sets: Mapping[str, Sequence[Example]],
    settings: Mapping[str, FitSettings],
    pad: int,
    limit: Limit = Limit(),
) -> dict[str, StepTimes]:
    """Load the prior as a fit does and time some of its steps on each set of rows, at the first rung that fits.

    sets, settings: by the name of the vector; settings differ in their batches alone. Raise StageError where no rung
    fits.
    """
    begin, times = time.perf_counter(), dict[str, StepTimes]()
    model = load_trainable(prior.folder, next(iter(settings.values())), prior.added)
    load = time.perf_counter() - begin
    try:
        last = Rung(1)
        for name in sorted(sets, key=lambda name: max(len(e.ids) for e in sets[name])):  # no rung can be taken back
            loss = PlainLoss(sets[name], pad)
            rungs = ladder(model, micro_batches(settings[name], loss.longest))
            rung = find_rung(model, loss, settings[name], [rung for rung in rungs if rung.leaves_all_that(last)])
            last = rung
            times[name] = StepTimes(load, *_time_set(model, loss, settings[name], rung, limit), rung)
    finally:
        del model
        free_memory()
    return times


def _time_set(
    model: Any, loss: PlainLoss, settings: FitSettings, rung: Rung, limit: Limit
) -> tuple[float, float, int, int | None]:
    """Return seconds for a token and of the optimiser, the number of steps, and the peak in bytes.

    The weights stay as they are.
    """
    import torch

    on_gpu, optimizer = model.device.type == "cuda", _optimizer(model, settings)

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    loss.prepare(model.train())
    tokens, steps = list[float](), list[float]()
    begin = now()
    for rows in _draws(loss.examples, settings, limit.tokens):
        if on_gpu and len(steps) == 1:
            torch.cuda.reset_peak_memory_stats()
        start = now()
        loss.step(model, rows, 0, rung.micro, lambda loss: loss.backward())
        passed = now()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(now() - passed)
        tokens.append((passed - start) / sum(len(loss.examples[i].ids) for i in rows))
        if len(steps) > 1 and now() - begin > limit.seconds:
            break
    loss.release()
    peak = int(torch.cuda.max_memory_allocated()) if on_gpu else None
    return statistics.median(tokens[1:]), statistics.median(steps[1:]), len(steps) - 1, peak


def _draws(examples: Sequence[Example], settings: FitSettings, most: int | None) -> list[list[int]]:
    """Return the rows of each step: drawn ones to warm up, the longest, drawn ones again. most: tokens of a step."""
    draw, count = random.Random(settings.seed), min(settings.batch_size, len(examples))
    if most is not None:
        count = max(1, min(count, most * len(examples) // sum(len(example.ids) for example in examples)))
    drawn = [draw.sample(range(len(examples)), count) for _ in range(_STEPS)]
    return [drawn[0], longest_first(examples)[:count], *drawn[1:]]


def _optimizer(model: Any, settings: FitSettings) -> Any:
    """Make the fit's optimiser, with a rate of 0."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(), learning_rate=0.0, report_to="none", **settings.trainer_options()
    )
    kind, options = Trainer.get_optimizer_cls_and_kwargs(arguments)
    return kind([parameter for parameter in model.parameters() if parameter.requires_grad], **options)
