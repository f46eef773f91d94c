"""Forward passes of the baselines: logits of chosen positions, activations of a layer, the reference.

The reference is the model before unlearning. When an adapter is trained, it is the same model with the adapter off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from msa_lite.data import IGNORE, Example, to_batch
from msa_lite.errors import UsageError
from msa_lite.io.heads import Halves
from msa_lite.io.layers import find_layers
from msa_lite.io.precision import autocast


@dataclass(frozen=True)
class Batch:
    """Rows padded on the right, as tensors (b, L) on the model's device."""

    ids: Any
    mask: Any
    """1 where there is a token."""
    labels: Any


def make_batch(examples: Sequence[Example], pad: int, device: Any) -> Batch:
    """Pad examples to a batch."""
    tensors = to_batch(examples, pad, device)
    return Batch(tensors["input_ids"], tensors["attention_mask"], tensors["labels"])


@dataclass(frozen=True)
class ChosenLogits:
    """Logits of chosen positions of rows, made of hidden states a block at a time where a loss needs them."""

    halves: Halves
    states: Any
    """(n, ·) states of the chosen positions."""
    mask: Any
    """(b, t) True at the chosen positions."""
    reference: Callable[[], AbstractContextManager[Any]] = nullcontext
    """The context in which the head runs."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (b, t, v)."""
        return (*self.mask.shape, self.halves.vocabulary)

    def map(self, function: Callable[..., Any], *others: Any) -> Any:
        """Return (b, t) function(logits, *others), 0 at positions that are not chosen.

        function: of (n, v) fp32 logits and n entries of each of the others, which are (b, t, …) tensors or the logits
        of another model at the same positions.
        """
        import torch

        def block(logits: Any, *parts: Any) -> Any:
            pairs = zip(others, parts, strict=True)
            return function(logits, *(o._make(part) if isinstance(o, ChosenLogits) else part for o, part in pairs))

        inputs = [other.states if isinstance(other, ChosenLogits) else other[self.mask] for other in others]
        with self.reference(), autocast(self.halves.model):
            values = self.halves.map_logits(block, self.states, *inputs)
        return torch.zeros(self.mask.shape, device=values.device).masked_scatter(self.mask, values)

    def _make(self, states: Any) -> Any:
        with self.reference():
            return self.halves.logits(states)


def answer_logits(
    halves: Halves,
    batch: Batch,
    positions: Any = None,
    reference: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[ChosenLogits, Any]:
    """Return the logits at positions with a label, and the (b, L − 1) labels that they predict.

    With a large vocabulary, logits of all positions would take more memory than everything else. positions: (b, L − 1)
    mask of other positions. reference: the context in which the model is the reference.
    """
    import torch

    labels = batch.labels[:, 1:]
    mask = labels != IGNORE if positions is None else positions
    head = halves.model.get_output_embeddings()
    if reference is not nullcontext and not any(weight.requires_grad for weight in head.parameters()):
        of_head: Any = torch.no_grad  # it is the same with and without the adapter, which takes time to switch off
    else:
        of_head = reference
    with reference(), autocast(halves.model):
        states = halves.run(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False)[0]
    return ChosenLogits(halves, states[:, :-1][mask], mask, of_head), labels


def layer_activations(model: Any, batch: Batch, layer: int) -> Any:
    """Return (b, L, d) output of a layer, counted from 0; the layers above it do not run."""
    layers, outputs = find_layers(model), []
    handle = layers[layer].register_forward_hook(
        lambda module, args, output: outputs.append(output[0] if isinstance(output, tuple) else output)
    )
    try:
        with _only_first(model, layer + 1):
            model(input_ids=batch.ids, attention_mask=batch.mask, logits_to_keep=1, use_cache=False)
    finally:
        handle.remove()
    return outputs[0]


def check_layer(name: str, config: dict[str, Any], layer: int) -> None:
    """Raise UsageError unless a model with this configuration has the layer."""
    config = {**config, **(config.get("text_config") or {})}
    count = next((config[key] for key in ("num_hidden_layers", "n_layer", "n_layers") if key in config), None)
    if count is not None and layer >= count:
        raise UsageError(
            f"baseline.methods.rmu.layer: {layer}, but {name} has {count} layers, 0 to {count - 1}; the paper's models "
            "have 16 and 32"
        )


@contextmanager
def _only_first(model: Any, count: int) -> Iterator[None]:
    """Take the layers from `count` on out of the model, for a while."""
    layers = find_layers(model)
    places = [
        (parent, name) for parent in model.modules() for name, child in parent.named_children() if child is layers
    ]
    for parent, name in places:
        setattr(parent, name, layers[:count])
    try:
        yield
    finally:
        for parent, name in places:
            setattr(parent, name, layers)


@contextmanager
def reference_of(model: Any, frozen: Any | None) -> Iterator[Any]:
    """Provide the reference, without gradients: `frozen`, or else the model with its adapter switched off."""
    import torch

    if frozen is not None:
        with torch.no_grad(), autocast(frozen):
            yield frozen
        return
    training = model.training
    with torch.no_grad(), model.disable_adapter():
        model.eval()
        try:
            yield model
        finally:
            model.train(training)


def freeze_copy(model: Any, layers: int | None = None) -> Any:
    """Copy the model, or only its first `layers`; training does not change the copy."""
    import copy

    with _only_first(model, layers) if layers else nullcontext():
        return copy.deepcopy(model).eval().requires_grad_(False)


def in_chunks(rows: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Yield consecutive parts of at most `size` rows."""
    return (rows[i : i + size] for i in range(0, len(rows), size))
