"""The ways in which a fit takes less memory, rung by rung, and the probe that finds the first that fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msa_lite.data import Example
from msa_lite.errors import UsageError
from msa_lite.io.console.progress import readable
from msa_lite.io.models.devices import free_bytes, free_memory, is_out_of_memory, memory_fault, total_bytes
from msa_lite.io.models.ends import can_leave_embedding, can_leave_head, leave_embedding, leave_head
from msa_lite.io.models.heads import autocast, layers_path
from msa_lite.io.models.streaming import is_streamed
from msa_lite.train.memory.model import stream_fit
from msa_lite.train.objectives.objective import Objective
from msa_lite.train.settings import FitSettings

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


def rungs(
    micros: Sequence[int],
    *,
    checkpointing: bool = True,
    embedding: bool = False,
    states: bool = False,
    layers: bool = False,
    head: bool = False,
) -> list[Rung]:
    """Return the rungs of a fit, the one that takes most memory first. micros: rows of a forward pass, falling.

    The others say what may be computed again, or leave the GPU.
    """
    first = [Rung(micros[0])]
    first += [replace(first[-1], checkpointing=True)] if checkpointing else []
    first += [replace(first[-1], embedding_on_cpu=True)] if embedding else []
    first += [replace(first[-1], states_on_cpu=True)] if states else []
    streamed = [replace(first[-1], layers_streamed=True)] if layers else []
    streamed += [replace(streamed[0], head_streamed=True)] if layers and head else []
    fewer = [replace(first[-1], micro=micro) for micro in micros[1:]]
    return [*first, *fewer, *(replace(way, micro=micro) for way in streamed for micro in micros)]


def ladder(model: Any, micros: Sequence[int], moves: bool = True) -> list[Rung]:
    """Return the rungs of a loaded model. micros: see `rungs`. moves: False where all has to stay on the device."""
    on_gpu, checkpointing = moves and free_bytes() is not None, bool(model.supports_gradient_checkpointing)
    found = rungs(
        micros,
        checkpointing=checkpointing,
        embedding=on_gpu and can_leave_embedding(model),
        states=on_gpu and checkpointing,
        layers=on_gpu and can_stream(model),
        head=on_gpu and can_leave_head(model),
    )
    return [rung for rung in found if rung.layers_streamed] if is_streamed(model) else found


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


def step_fault(model: Any, objective: Objective, settings: FitSettings, rows: Sequence[int], micro: int) -> str | None:
    """Return why a step does not fit: the longest rows that a forward pass may have, forward and backward; or None.

    rows: the indices of all rows, the longest first. On a CPU nothing is tried. The model is left as it was.
    """
    room = free_bytes()
    if room is None:
        return None
    static = Static.of(model, settings)
    if static.gradients + static.optimizer >= room:
        needed = readable(static.gradients + static.optimizer)
        return f"gradients and optimiser need {needed}, {readable(room)} are free"
    try:
        with _scratch(model, static.optimizer), autocast(model):
            objective.prepare(model)
            objective.step(model, rows[:micro], 0, micro, lambda loss: loss.backward())
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return memory_fault(error)
    finally:
        objective.release()
        for parameter in model.parameters():
            parameter.grad = None
        free_memory()
    return None


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
