"""Forward passes of the baselines: logits of the positions that are wanted, activations of a layer, the reference.

The reference is the model before unlearning. Where an adapter is trained it is the same model with the adapter off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from msa_lite.data import IGNORE, Example, make_collator
from msa_lite.errors import UsageError
from msa_lite.io.precision import autocast


@dataclass(frozen=True)
class Batch:
    """Rows padded on the right: ids, mask (1 where there is a token) and labels, each (b, L), on the model's device."""

    ids: Any
    mask: Any
    labels: Any


def make_batch(examples: Sequence[Example], pad: int, device: Any) -> Batch:
    """Examples as a batch."""
    made = make_collator(pad)([{"input_ids": e.ids, "labels": e.labels} for e in examples])
    return Batch(*(made[key].to(device) for key in ("input_ids", "attention_mask", "labels")))


def answer_logits(model: Any, batch: Batch, wanted: Any = None) -> tuple[Any, Any]:
    """(logits, labels): (b, t, v) in fp32 and the (b, t) labels that they predict, for positions with a label.

    Logits are made of those positions only that hold a label in some row: with a large vocabulary they would take more
    memory than all else. wanted: (b, L − 1) other positions to have, from the first that predicts.
    """
    chosen = (batch.labels[:, 1:] != IGNORE if wanted is None else wanted).any(0).nonzero().flatten()
    output = model(input_ids=batch.ids, attention_mask=batch.mask, logits_to_keep=chosen, use_cache=False)
    return output.logits.float(), batch.labels[:, 1:][:, chosen]


def layer_activations(model: Any, batch: Batch, layer: int) -> Any:
    """(b, L, d) output of a layer, counted from 0; those above it do not run."""
    blocks, found = _blocks(model), []
    handle = blocks[layer].register_forward_hook(
        lambda module, args, output: found.append(output[0] if isinstance(output, tuple) else output)
    )
    try:
        with _only_first(model, layer + 1):
            model(input_ids=batch.ids, attention_mask=batch.mask, logits_to_keep=1, use_cache=False)
    finally:
        handle.remove()
    return found[0]


def check_layer(name: str, config: dict[str, Any], layer: int) -> None:
    """Raise UsageError unless a model with this configuration has the layer."""
    config = {**config, **(config.get("text_config") or {})}
    count = next((config[key] for key in ("num_hidden_layers", "n_layer", "n_layers") if key in config), None)
    if count is not None and layer >= count:
        raise UsageError(
            f"baseline.methods.rmu.layer: {layer}, but {name} has {count} layers, 0 to {count - 1}; the paper's models "
            "have 16 and 32"
        )


def _blocks(model: Any) -> Any:
    """The list of a model's layers."""
    import torch

    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()))


@contextmanager
def _only_first(model: Any, count: int) -> Iterator[None]:
    """The model without its layers from `count` on, for a while."""
    blocks = _blocks(model)
    places = [
        (parent, name) for parent in model.modules() for name, child in parent.named_children() if child is blocks
    ]
    for parent, name in places:
        setattr(parent, name, blocks[:count])
    try:
        yield
    finally:
        for parent, name in places:
            setattr(parent, name, blocks)


@contextmanager
def reference_of(model: Any, frozen: Any | None) -> Iterator[Any]:
    """The reference, without gradients: `frozen` where there is one, else the model with its adapter switched off."""
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
    """A copy of the model that stays as it is; of its first layers alone, where that is enough."""
    import copy

    with _only_first(model, layers) if layers else nullcontext():
        return copy.deepcopy(model).eval().requires_grad_(False)


def in_chunks(rows: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Consecutive parts of at most `size` rows."""
    return (rows[i : i + size] for i in range(0, len(rows), size))
