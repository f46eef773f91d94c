"""The memory of scoring: a model in evaluation, its key-value cache, and blocks of logits."""

from __future__ import annotations

from msa_lite.budget.machine import Device
from msa_lite.budget.need import CONTEXT, PROCESS, Need
from msa_lite.budget.shape import Shape
from msa_lite.budget.tuning import NF4
from msa_lite.errors import StageError
from msa_lite.io.streaming import Sizes, fits, place

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


def stream_layers(shape: Shape, need: Need, device: Device, host: int | None) -> tuple[Need, int]:
    """Return the need where layers wait in RAM because the GPU is too small for all of them, and the bytes that do.

    Return the need as it is, and 0, where all layers fit, or where streaming does not help. host: bytes of RAM, if
    known.
    """
    weights, free = need.parts["weights"], device.nbytes - CONTEXT
    if not device.is_gpu or fits(weights, free):
        return need, 0
    layer = int(weights / shape.weights * shape.in_linear / shape.layers)
    sizes = Sizes({str(i): layer for i in range(shape.layers)}, {"others": weights - shape.layers * layer})
    try:
        placement = place(sizes, free, host or weights * 2)
    except StageError:
        return need, 0
    waiting = layer * len(placement.streamed)
    return Need({**need.parts, "weights": weights - waiting + layer}, need.rough), waiting
