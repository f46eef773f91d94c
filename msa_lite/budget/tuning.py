"""The memory of a fit at its peak, counted from the tensors that a decoder layer saves for its backward pass.

The counts are those of transformers' Llama under bf16 autocast, and of families that are built like it. The comments
name the tensors. `tests/memory_model.py` counts the same on fake tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from msa_lite.budget.need import CONTEXT, PROCESS, Need, highest
from msa_lite.budget.shape import Shape

NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)  # bytes of a weight: the code, an 8-bit scale a block, an fp32 scale of scales
_EIGHT_BIT = 2 + 2 * 4 / 256  # bytes of 8-bit AdamW a weight: two states, each with a scale a block
_SMALLEST = 4096  # weights of a tensor from which on bitsandbytes keeps its states in 8 bits
_LOGITS = 64 << 20  # bytes of fp32 logits at a time


@dataclass(frozen=True)
class FitCase:
    """A fit, as far as its memory depends on it."""

    mode: Literal["lora", "qlora", "full"]
    longest: int
    """Tokens of the longest row."""
    rank: int = 32
    targets: str | Iterable[str] = "all-linear"
    eight_bit: bool = False
    """True for AdamW with 8-bit states."""
    wide_norms: bool = False
    """True where norms are in fp32 beside matrices in 16 or 4 bits."""
    halves: bool = True
    """True where the device computes in bf16 or fp16."""
    on_gpu: bool = True
    shards: int = 1
    """Processes that share weights, gradients and states in full mode."""
    all_logits: bool = False
    """True where the loss is made of the logits of all tokens at once."""


@dataclass(frozen=True)
class Pass:
    """How rows run through the model at a time."""

    micro: int
    """Rows of a forward pass."""
    checkpointing: bool
    """True where layers save only their inputs, and run again in the backward pass."""
    embedding_on_cpu: bool = False
    accumulates: bool = True
    """True where a step has several forward passes, so that gradients are there from the first one on."""


def passes(batch: int, micro: int | None, qlora: bool, largest: int) -> Iterator[Pass]:
    """Yield the ways in which a fit on a GPU runs its rows, in the order in which it tries them.

    micro: rows of a forward pass, None for the largest that fits. largest: rows that are never exceeded.
    """
    sizes = [micro] if micro else [size for size in range(batch, 0, -1) if batch % size == 0 and size <= largest]
    for size in sizes:
        several = size < batch
        yield Pass(size, checkpointing=False, accumulates=several)
        yield Pass(size, checkpointing=True, accumulates=several)
        if qlora:
            yield Pass(size, checkpointing=True, embedding_on_cpu=True, accumulates=several)


def fit_need(shape: Shape, case: FitCase, run: Pass) -> Need:
    """Return the memory of the fit's step at its peak, everything included."""
    layer = _Layer(shape, case, run.micro * case.longest)
    moments = (_at_loss, _at_layer, _at_end, _at_step)
    return highest(*(Need(moment(shape, case, run, layer), shape.rough) for moment in moments))


def static_bytes(shape: Shape, case: FitCase, embedding_on_cpu: bool = False) -> dict[str, int]:
    """Return the bytes that a fit holds all the time: weights, adapters, gradients and the optimiser's states."""
    width = 2.0 if case.halves else 4.0  # of a frozen weight that is not quantised
    if case.mode == "full":
        trained, weights = shape.weights, 4.0 * shape.weights
    else:
        trained = sum(linear.adapter(case.rank) for linear in shape.adapted(case.targets))
        linear = NF4 if case.mode == "qlora" else width
        moved = shape.embedding if embedding_on_cpu else 0
        norms = 4 if case.mode == "qlora" else width
        weights = linear * shape.in_linear + width * (shape.embedding + shape.head - moved) + norms * shape.other
    states = _EIGHT_BIT if case.eight_bit else 8
    parts = {"weights": weights, "gradients": 4 * trained, "optimizer": states * trained}
    if case.mode == "full":
        parts = {part: nbytes / case.shards for part, nbytes in parts.items()}
    else:
        parts["adapters"] = 4 * trained
    fixed = {"context": CONTEXT} if case.on_gpu else {"process": PROCESS}
    return {part: int(nbytes) for part, nbytes in parts.items()} | fixed


def _at_loss(shape: Shape, case: FitCase, run: Pass, layer: _Layer) -> dict[str, int]:
    """Return the parts while the loss is made of logits, after the last layer."""
    parts = static_bytes(shape, case, run.embedding_on_cpu)
    if not run.accumulates:
        parts["gradients"] = 0
    saved = layer.input if run.checkpointing else layer.saved
    parts["activations"] = int(shape.layers * saved + layer.around)
    if case.halves:  # autocast's 16-bit copies of trained weights
        tied = shape.vocabulary * shape.hidden if case.mode == "full" else 0
        parts["activations"] += 2 * tied + layer.copies
    parts["logits"] = int(_loss_bytes(shape, case, run.micro * case.longest))
    return parts


def _at_layer(shape: Shape, case: FitCase, run: Pass, layer: _Layer) -> dict[str, int]:
    """Return the parts in the backward pass of the last layer, when all layers still hold what they saved."""
    parts = static_bytes(shape, case, run.embedding_on_cpu)
    if not run.accumulates:
        parts["gradients"] //= shape.layers
    if run.checkpointing:
        parts["activations"] = int(shape.layers * layer.input + layer.saved + layer.copies / shape.layers)
    else:
        parts["activations"] = int(shape.layers * layer.saved + layer.copies)
    parts["temporaries"] = int(layer.temporaries)
    return parts


def _at_end(shape: Shape, case: FitCase, run: Pass, layer: _Layer) -> dict[str, int]:
    """Return the parts when the embedding gets its gradient, last of all."""
    parts = static_bytes(shape, case, run.embedding_on_cpu)
    if case.mode == "full":  # the gradients of head and embedding and, where these are one, their sum
        new = 4 * shape.vocabulary * shape.hidden
        parts["temporaries"] = new * (3 if not shape.head else 1)
        if not run.accumulates:
            parts["gradients"] -= new
    return parts


def _at_step(shape: Shape, case: FitCase, run: Pass, layer: _Layer) -> dict[str, int]:
    """Return the parts in the optimiser's step."""
    return static_bytes(shape, case, run.embedding_on_cpu)


def _loss_bytes(shape: Shape, case: FitCase, tokens: int) -> float:
    """Return the bytes of logits and their gradients: in 16 bits, in fp32, their softmax and its gradient."""
    rows = tokens if case.all_logits else min(tokens, max(1, _LOGITS // (4 * shape.vocabulary)))
    return rows * shape.vocabulary * (12 if case.halves else 16)


class _Layer:
    """Bytes of one decoder layer over so many tokens."""

    def __init__(self, shape: Shape, case: FitCase, tokens: int) -> None:
        full, hidden, inner = case.mode == "full", shape.hidden, shape.intermediate
        half = 2 if case.halves else 4
        # A norm's output is of its weight's dtype. 4-bit layers give their outputs in the dtype of their inputs.
        normed = 4 if full or case.wide_norms or not case.halves else 2
        product = normed if case.mode == "qlora" else half
        residual = 4 if full else product
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        adapted = shape.adapted(case.targets)
        names = {linear.name for linear in adapted}

        def inputs(width: int, *modules: str) -> int:
            """Return what linear layers save of an input that they share: one copy, or each its own after a cast."""
            savers = len(modules) if full else sum(name in names for name in modules)
            return half * width * (min(1, savers) if normed == half else savers)

        norms = 2 * (
            4 * hidden + (residual * hidden if full else 0)
        )  # the input in fp32; the output where it is trained
        if shape.has_head_norms:
            norms += (4 + (half if full else 0)) * (queries + keys)
        attention = inputs(hidden, "q_proj", "k_proj", "v_proj") + half * (2 * queries + 2 * keys) + 4 * shape.heads
        mlp = inputs(hidden, "gate_proj", "up_proj") + (3 * product + half) * inner  # gate, its activation, up; their product
        ranks = 0 if full else half * case.rank * sum(linear.count for linear in adapted) / shape.layers
        trained = shape.in_linear if full else sum(linear.adapter(case.rank) for linear in adapted)
        self.copies = 2 * trained if case.halves else 0
        self.input = tokens * residual * hidden
        self.saved = tokens * (norms + attention + mlp + ranks)
        self.around = tokens * (residual * hidden + 4 * hidden + half * hidden)  # embedding, last norm, its output
        self.temporaries = tokens * (residual * hidden + 3 * half * inner)
