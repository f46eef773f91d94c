"""The memory of scoring: a model in evaluation, its key-value cache, and blocks of logits."""

from __future__ import annotations

from msa_lite.budget.machine import Device
from msa_lite.budget.need import CONTEXT, PROCESS, Need
from msa_lite.budget.shape import Shape
from msa_lite.budget.tuning import NF4

_ROOM = 1_000_000_000  # bytes that stay free beside weights that stream
_LOGITS = 64 << 20  # bytes of fp32 logits at a time (`evals.models`)


def score_need(shape: Shape, tokens: int, width: float, *, on_gpu: bool, four_bit: bool = False) -> Need:
    """Return the memory of scoring a model with batches of so many tokens, or generating with so many in the cache.

    width: bytes of a weight as it is loaded. four_bit: linear layers are in NF4.
    """
    computed = 2 if width < 4 else 4
    linear = NF4 if four_bit else width
    weights = linear * shape.in_linear + width * (shape.weights - shape.in_linear)
    queries = shape.heads * shape.head_dim
    attention = computed * (2 * shape.hidden + 2 * queries) + 4 * shape.hidden
    mlp = computed * (2 * shape.hidden + 3 * shape.intermediate)
    rows = max(1, _LOGITS // (4 * shape.vocabulary))
    parts = {
        "weights": int(weights),
        "cache": tokens * cache_bytes(shape, computed),
        "activations": tokens * max(attention, mlp),
        "logits": rows * shape.vocabulary * (computed + 4 + 4),
        **({"context": CONTEXT} if on_gpu else {"process": PROCESS}),
    }
    return Need(parts, shape.rough)


def cache_bytes(shape: Shape, width: int) -> int:
    """Return the bytes of a token in the key-value cache."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * width


def streamed_bytes(need: Need, device: Device, host: int | None) -> int:
    """Return the bytes of weights that wait in RAM and stream to the GPU layer by layer; 0 where all of them fit.

    0, too, where the RAM is too small for all weights. host: bytes of RAM, if known.
    """
    weights, room = need.parts["weights"], device.nbytes - CONTEXT - _ROOM
    if not device.is_gpu or weights <= room or (host is not None and weights + PROCESS > host):
        return 0
    return min(weights, weights - room)


def streamed_need(shape: Shape, need: Need, streamed: int) -> Need:
    """Return the need of a model of which so many bytes stream: what stays on the GPU, or its largest layer."""
    width = need.parts["weights"] / shape.weights
    largest = int(width * max(shape.embedding, shape.head, shape.in_linear // shape.layers))
    return Need({**need.parts, "weights": max(need.parts["weights"] - streamed, largest)}, need.rough)
