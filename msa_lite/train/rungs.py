"""The ways in which a fit takes less memory, rung by rung, and the probe that finds the first rung that fits.

From the least harm to the most: checkpointing costs a third of the speed, an embedding and saved states in the host's
memory cost copies, smaller micro-batches leave a GPU idle. No rung changes the result but for rounding.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from msa_lite.errors import StageError, UsageError
from msa_lite.io.memory import free_bytes, free_memory, is_out_of_memory, memory_fault, total_bytes
from msa_lite.io.precision import autocast
from msa_lite.io.progress import readable

if TYPE_CHECKING:
    from msa_lite.train.objective import Objective
    from msa_lite.train.plain import PlainLoss
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

    def __str__(self) -> str:
        parts = [f"{self.micro} row{'s' * (self.micro > 1)} at a time"]
        parts += ["checkpointing"] * self.checkpointing + ["the embedding on the CPU"] * self.embedding_on_cpu
        return ", ".join(parts + ["states between layers on the CPU"] * self.states_on_cpu)

    def as_json(self) -> dict[str, Any]:
        """Return all of it, JSON-able; `Rung(**value)` reads it."""
        return asdict(self)


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
    return [part for part in range(size, 0, -1) if size % part == 0 and part <= limit]


def ladder(model: Any, micros: Sequence[int]) -> list[Rung]:
    """Return the rungs of a loaded model, the one that takes most memory first. micros: falling."""
    on_gpu = free_bytes() is not None
    rungs = [Rung(micros[0])]
    if model.supports_gradient_checkpointing:
        rungs.append(replace(rungs[-1], checkpointing=True))
    if on_gpu and _can_leave(model):
        rungs.append(replace(rungs[-1], embedding_on_cpu=True))
    if on_gpu and rungs[-1].checkpointing and _can_offload(model):
        rungs.append(replace(rungs[-1], states_on_cpu=True))
    return rungs + [replace(rungs[-1], micro=micro) for micro in micros[1:]]


def set_up(model: Any, rung: Rung) -> None:
    """Bring a model to a rung, from one above or from none."""
    if rung.checkpointing:
        _checkpoint(model, rung.states_on_cpu)
    if rung.embedding_on_cpu and _can_leave(model):
        _move_embedding(model)
        free_memory()


def _checkpoint(model: Any, offload: bool) -> None:
    """Have the model compute activations again."""
    how = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(how, **({"offload": True} if offload else {}))
    else:  # the name of older versions
        model.gradient_checkpointing_enable(how)
    model.disable_input_require_grads()  # for checkpoints of the old kind only; it would cost gradients of the inputs


def _can_offload(model: Any) -> bool:
    enable = getattr(model, "activation_checkpointing_enable", None)
    return enable is not None and "offload" in inspect.signature(enable).parameters


def _can_leave(model: Any) -> bool:
    """Check whether the embedding is frozen, no head shares its weight, and it is still on the GPU."""
    import torch

    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    weight = getattr(embedding, "_parameters", {}).get("weight")
    if not isinstance(embedding, torch.nn.Embedding) or weight is None or weight.requires_grad:
        return False
    return head is None or getattr(head, "weight", None) is not weight


def _move_embedding(model: Any) -> None:
    """Keep the embedding in the host's memory, out of the model's parameters, so that no library moves it back."""
    embedding, device = model.get_input_embeddings(), model.device
    embedding.to("cpu")
    weight = embedding._parameters.pop("weight").detach()
    embedding.weight = weight  # a plain attribute: `model.device` stays that of the layers
    embedding.register_forward_pre_hook(lambda module, inputs: tuple(ids.cpu() for ids in inputs))
    embedding.register_forward_hook(lambda module, inputs, states: states.to(device))


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


def find_rung(model: Any, objective: PlainLoss, settings: FitSettings, kinds: Sequence[Rung]) -> Rung:
    """Set the model up at the first rung that a step fits at, and return it. kinds: the rungs of a single row to try.

    Raise StageError where there is none.
    """
    examples, micros = objective.examples, micro_batches(settings, objective.longest)
    probe = StepProbe(objective, settings, sorted(range(len(examples)), key=lambda i: -len(examples[i].ids)))
    rungs = [replace(kind, micro=micros[0]) for kind in kinds]
    fault: str | None = None
    for rung in [*rungs, *(replace(rungs[-1], micro=micro) for micro in micros[1:])]:
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
