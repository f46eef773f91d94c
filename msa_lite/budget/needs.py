"""The memory of a stage, part by part: of a fit at its peak, and of scoring."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from msa_lite.budget.shape import Shape
from msa_lite.budget.speed import Device
from msa_lite.errors import StageError
from msa_lite.io.models.ends import HEAD_BLOCK
from msa_lite.io.models.streaming import NF4, Sizes, fits, place
from msa_lite.train.memory.rungs import Rung, rungs

# Bytes that CUDA, cuBLAS and their kernels take beside all tensors: 0.3 GB to 0.5 GB on GPUs since 2018.
CONTEXT = 450_000_000
# Bytes of a Python process with torch and transformers loaded.
PROCESS = 700_000_000


@dataclass(frozen=True)
class Need:
    """The memory of a stage at its peak."""

    json_keys: ClassVar = {"bytes": "nbytes", "parts": "parts", "rough": "rough"}

    parts: Mapping[str, int]
    """Bytes by what they hold: weights, adapters, gradients, optimizer, activations, logits, cache, temporaries."""
    rough: str | None = None
    """The reason why this is a rough estimate, or None."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of all parts."""
        return sum(self.parts.values())


def highest(*needs: Need) -> Need:
    """Return the need with the most bytes."""
    return max(needs, key=lambda need: need.nbytes)


_EIGHT_BIT = 2 + 2 * 4 / 256  # bytes of 8-bit AdamW a weight: two states, each with a scale a block
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
    wide: bool = False
    """True where states between layers are in fp32, as fp16 wants it."""
    on_gpu: bool = True
    shards: int = 1
    """Processes that share weights, gradients and states in full mode."""
    reference: float = 0.0
    """The part of a reference's layers that run, 0 without one: full mode has a second model with these layers, and
    the reference's logits, and how they differ, stand beside the model's own."""


def fit_rungs(shape: Shape, case: FitCase, micros: Sequence[int]) -> list[Rung]:
    """Return the rungs of a fit on a GPU. micros: rows of a forward pass, falling."""
    if case.shards > 1:  # which has no other way
        return [Rung(micro, checkpointing=True) for micro in micros]
    frozen = case.mode != "full"
    end, layers = frozen and shape.head > 0, frozen and shape.layers > 1
    return rungs(micros, embedding=end, states=True, layers=layers, head=end)


def fit_need(shape: Shape, case: FitCase, rung: Rung, accumulates: bool = True) -> Need:
    """Return the memory of the fit's step at its peak, everything included.

    accumulates: True where gradients are there from the start, as in the second forward pass of a step.
    """
    tokens = rung.micro * case.longest
    rows = min(tokens, max(1, _LOGITS // (4 * shape.vocabulary)))
    layer, block = _Layer(shape, case, tokens), rows * shape.vocabulary
    head = shape.vocabulary * shape.hidden if case.mode == "full" else 0
    held: dict[str, float] = {**static_bytes(shape, case, rung)}
    forward = held if accumulates else {**held, "gradients": 4 * head if rows < tokens else 0}
    inputs = 0 if rung.states_on_cpu else shape.layers * layer.input
    kept = inputs if rung.checkpointing else shape.layers * layer.saved + layer.copies
    again = layer.saved + layer.copies / shape.layers if rung.checkpointing else 0
    states = tokens * shape.hidden * (2 if case.halves else 4)
    at_logits = {  # logits in fp32 and 16 bits, and their log-probabilities, whose place their gradients take
        "activations": kept + layer.around + (2 * head if case.halves else 0),
        "logits": block * ((10 if case.halves else 8) + bool(case.reference) * (14 if case.halves else 12)),
        "temporaries": states,
    }
    at_head = {  # the gradient of the head, in 16 bits and in fp32
        "activations": kept + layer.around,
        "logits": 4 * block,
        "temporaries": head * (6 if case.halves else 4) + states,
    }
    at_layer = {"activations": kept + again, "temporaries": layer.temporaries}
    at_end = {  # the gradient of the embedding
        "activations": inputs if rung.checkpointing else 0,
        "gradients": held["gradients"] - (0 if accumulates or not shape.head else 4 * head),
        "temporaries": 4 * head + (2 * tokens * layer.residual * shape.hidden if head else 0),
    }
    if case.shards > 1:  # each layer is put together for its turn; embedding and head stay so
        ends = (shape.embedding + shape.head) * (2 if case.reference else 1)
        whole = {"gathered": 2 * (ends + 2 * shape.in_linear // shape.layers)}
        forward, held = forward | whole, held | whole
    moments = [forward | at_logits, forward | at_head, forward | at_layer, held | at_end, held]
    if rung.checkpointing and not head:  # the first layer, when the others have their gradients
        at_first = {"activations": layer.input + again, "temporaries": layer.temporaries}
        moments.append(held | {"gradients": held["gradients"] * (1 - 1 / shape.layers)} | at_first)
    return highest(*(Need({part: int(size) for part, size in moment.items()}, shape.rough) for moment in moments))


def static_bytes(shape: Shape, case: FitCase, rung: Rung) -> dict[str, int]:
    """Return the bytes that a fit holds all the time: weights, adapters, gradients and the optimiser's states."""
    trained, weights = shape.trained(case.mode, case.rank, case.targets), 4.0 * shape.weights
    if case.mode != "full":
        width, layers, head = _frozen_bytes(shape, case)
        embedding = 0.0 if rung.embedding_on_cpu else width * shape.embedding
        layers *= 2 / shape.layers if rung.layers_streamed else 1  # one computes, the next one comes
        weights = embedding + layers + (min(head, 2 * HEAD_BLOCK) if rung.head_streamed else head)
    states = _EIGHT_BIT if case.eight_bit else 8
    parts = {"weights": weights, "gradients": 4 * trained, "optimizer": states * trained}
    if case.mode == "full":
        parts = {part: nbytes / case.shards for part, nbytes in parts.items()}
    else:
        parts["adapters"] = 4 * trained
    if case.reference and case.mode == "full":
        width = 2 if case.shards > 1 and case.halves else 4  # in shards it is kept as it is multiplied
        left_out = (1 - case.reference) * shape.in_linear
        parts["reference"] = width * (shape.weights - left_out) / case.shards
    fixed = {"context": CONTEXT} if case.on_gpu else {"process": PROCESS}
    return {part: int(nbytes) for part, nbytes in parts.items()} | fixed


def waiting_bytes(shape: Shape, case: FitCase, rung: Rung) -> int:
    """Return the bytes of the layers that wait in RAM at a rung, and pass through the GPU forward and backward."""
    _, layers, _ = _frozen_bytes(shape, case)
    return int(layers) if rung.layers_streamed else 0


def head_bytes(shape: Shape, case: FitCase, rung: Rung) -> int:
    """Return the bytes of the head that pass through the GPU forward at a rung: once for each block of logits."""
    _, _, head = _frozen_bytes(shape, case)
    blocks = -(-rung.micro * case.longest // max(1, _LOGITS // (4 * shape.vocabulary)))
    return int(blocks * head) if rung.head_streamed else 0


def _frozen_bytes(shape: Shape, case: FitCase) -> tuple[float, float, float]:
    """Return the bytes of a frozen weight that is not quantised, of all layers and of the head."""
    width = 2.0 if case.halves else 4.0
    linear, norm = (NF4, 4.0) if case.mode == "qlora" else (width, width)
    return width, linear * shape.in_linear + norm * shape.norms, width * shape.head


class _Layer:
    """Bytes of one decoder layer over so many tokens."""

    def __init__(self, shape: Shape, case: FitCase, tokens: int) -> None:
        full, hidden, inner = case.mode == "full", shape.hidden, shape.intermediate
        half = 2 if case.halves else 4
        residual = normed = 4 if full or case.wide else half  # a frozen norm's output is of the dtype of its input
        product = normed if case.mode == "qlora" else half  # as is that of a 4-bit layer
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
        mlp = (
            inputs(hidden, "gate_proj", "up_proj") + (3 * product + half) * inner
        )  # gate, its activation, up; their product
        ranks = 0 if full else half * case.rank * sum(linear.count for linear in adapted) / shape.layers
        trained = shape.in_linear if full else sum(linear.adapter(case.rank) for linear in adapted)
        self.copies = 2 * trained if case.halves else 0
        self.residual = residual
        self.input = tokens * residual * hidden
        self.saved = tokens * (norms + attention + mlp + ranks)
        # The embedding's output, and the last norm's input in fp32 with its outputs.
        self.around = tokens * hidden * (4 * 4 if full else residual + 4 + half)
        self.temporaries = tokens * (3 * half * inner + 4 * hidden)
        if case.mode == "qlora":  # the widest weight, unpacked for the gradient of its input
            self.temporaries = max(self.temporaries, tokens * (2 * half * inner + 4 * hidden) + half * inner * hidden)


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


def stream_layers(shape: Shape, need: Need, device: Device, four_bit: bool = False) -> tuple[Need, int]:
    """Return the need where layers wait in RAM because the GPU is too small for all of them, and the bytes that do.

    Return the need as it is, and 0, where all layers fit, or where streaming does not help. four_bit: layers are in
    NF4.
    """
    weights, free = need.parts["weights"], device.nbytes - CONTEXT
    if not device.is_gpu or fits(weights, free):
        return need, 0
    in_layers = NF4 * shape.in_linear if four_bit else weights / shape.weights * shape.in_linear
    width = (weights - in_layers) / (shape.weights - shape.in_linear)
    layer, ends = int(in_layers / shape.layers), ("embedding", "head") if shape.head else ()
    sizes = dict(zip(("embedding", "head"), (int(width * shape.embedding), int(width * shape.head)), strict=True))
    others = sizes | {"norms": weights - shape.layers * layer - sum(sizes.values())}
    try:
        placement = place(Sizes({str(i): layer for i in range(shape.layers)}, others, ends), free)
    except StageError:
        return need, 0
    buffers = 2 * layer + (min(sizes["head"], 2 * HEAD_BLOCK) if "head" in placement.ends else 0)
    return Need({**need.parts, "weights": weights - placement.waiting + buffers}, need.rough), placement.waiting
