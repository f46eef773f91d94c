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
    halves: bool = True
    """True where the device computes in bf16 or fp16."""
    on_gpu: bool = True
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


def passes(batch: int, micro: int | None, qlora: bool, largest: int) -> Iterator[Pass]:
    """Yield the ways in which a fit on a GPU runs its rows, in the order in which it tries them.

    micro: rows of a forward pass, None for the largest that fits. largest: rows that are never exceeded.
    """
    sizes = [micro] if micro else [size for size in range(batch, 0, -1) if batch % size == 0 and size <= largest]
    for size in sizes:
        yield Pass(size, checkpointing=False)
        yield Pass(size, checkpointing=True)
        if qlora:
            yield Pass(size, checkpointing=True, embedding_on_cpu=True)


def fit_need(shape: Shape, case: FitCase, run: Pass) -> Need:
    """Return the memory of the fit's step at its peak, everything included."""
    return highest(*(_at(shape, case, run, moment) for moment in ("loss", "layer", "step")))


def static_bytes(shape: Shape, case: FitCase, embedding_on_cpu: bool = False) -> int:
    """Return the bytes that a fit holds all the time: weights, adapters, gradients and the optimiser's states."""
    return sum(_static(shape, case, embedding_on_cpu).values())


def _static(shape: Shape, case: FitCase, embedding_on_cpu: bool) -> dict[str, int]:
    if case.mode == "full":
        trained, weights = shape.weights, 4.0 * shape.weights
    else:
        trained = sum(linear.adapter(case.rank) for linear in shape.adapted(case.targets))
        width = frozen_width(shape, case)
        linear = NF4 if case.mode == "qlora" else width
        moved = shape.embedding if embedding_on_cpu else 0
        norms = 4 if case.mode == "qlora" else width
        weights = linear * shape.in_linear + width * (shape.embedding + shape.head - moved) + norms * shape.other
    parts = {"weights": int(weights)}
    if case.mode != "full":
        parts["adapters"] = 4 * trained
    states = _EIGHT_BIT if case.eight_bit else 8
    return parts | {"gradients": 4 * trained, "optimizer": int(states * trained)} | _fixed(case)


def _fixed(case: FitCase) -> dict[str, int]:
    return {"context": CONTEXT} if case.on_gpu else {"process": PROCESS}


def frozen_width(shape: Shape, case: FitCase) -> float:
    """Return the bytes of a frozen weight that is not quantised: 16 bits where the device computes in them."""
    return 2.0 if case.halves else 4.0


def _at(shape: Shape, case: FitCase, run: Pass, moment: str) -> Need:
    parts = _static(shape, case, run.embedding_on_cpu)
    tokens = run.micro * case.longest
    if moment == "step":
        return Need(parts, shape.rough)
    layer = _Layer(shape, case, tokens)
    saved = layer.input if run.checkpointing else layer.saved
    parts["activations"] = int(shape.layers * saved + layer.around)
    if case.mode == "full" and case.halves and not run.checkpointing:
        parts["activations"] += 2 * shape.in_linear  # the 16-bit copies of autocast
    if moment == "loss":
        if case.mode == "full" and case.halves and run.checkpointing:
            parts["activations"] += 2 * shape.in_linear
        parts["logits"] = int(_loss_bytes(shape, case, tokens))
    else:
        recomputed = layer.saved + (2 * shape.in_linear / shape.layers if case.mode == "full" and case.halves else 0)
        parts["activations"] += int(recomputed if run.checkpointing else 0)
        parts["temporaries"] = int(layer.temporaries)
    return Need(parts, shape.rough)


def _loss_bytes(shape: Shape, case: FitCase, tokens: int) -> float:
    """Return the bytes of logits and their gradients at the most."""
    half = 2 if case.halves else 4
    if case.all_logits:
        return tokens * shape.vocabulary * (half + 4 + 4)
    rows = min(tokens, max(1, _LOGITS // (4 * shape.vocabulary)))
    return rows * shape.vocabulary * (half + 4 + 4)


class _Layer:
    """Bytes of one decoder layer over so many tokens."""

    def __init__(self, shape: Shape, case: FitCase, tokens: int) -> None:
        full, hidden, inner = case.mode == "full", shape.hidden, shape.intermediate
        half = 2 if case.halves else 4
        residual = 4 if full or not case.halves else 2
        normed = 4 if full or case.mode == "qlora" or not case.halves else 2  # a norm's output is of its weight's dtype
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        adapted = shape.adapted(case.targets)
        names = {linear.name for linear in adapted}

        def inputs(width: int, *modules: str) -> int:
            """Return what linear layers save of an input that they share."""
            savers = len(modules) if full else sum(name in names for name in modules)
            return half * width * (savers if normed != half else min(1, savers))

        norms = 2 * (
            4 * hidden + (residual * hidden if full else 0)
        )  # the input in fp32; the output where it is trained
        if shape.has_head_norms:
            norms += (4 + (half if full else 0)) * (queries + keys)
        attention = inputs(hidden, "q_proj", "k_proj", "v_proj") + half * (2 * queries + 2 * keys) + 4 * shape.heads
        mlp = inputs(hidden, "gate_proj", "up_proj") + 4 * half * inner
        ranks = 0 if full else half * case.rank * sum(linear.count for linear in adapted) / shape.layers
        self.input = tokens * residual * hidden
        self.saved = tokens * (norms + attention + mlp + ranks)
        self.around = tokens * (residual * hidden + 4 * hidden + half * hidden)  # embedding, last norm, its output
        self.temporaries = tokens * (residual * hidden + 3 * half * inner)
