"""Score models that are larger than the GPU: layers without room there wait in RAM and pass through the GPU.

accelerate's hooks do so as well. But they leave weights that nobody can read, set or put an adapter on, and they copy
a head that found no room for each block of logits anew. Here all but the layers stays on the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msa_lite.errors import StageError
from msa_lite.io.models.heads import layers_path
from msa_lite.io.models.loading import check_model
from msa_lite.io.weights.checkpoint import Checkpoint, load_checkpoint

_LEAST = 1 << 29  # bytes beside the weights that scoring a single item takes
_SHARE = 0.75  # of the free memory for weights that stay: each batch copies all others, so batches should be large
_RAM = 0.9  # of the free RAM that weights may take
_NOTE = "msa_lite_streams"


@dataclass(frozen=True)
class Sizes:
    """The bytes of a model's weights, as it is loaded."""

    layers: Mapping[str, int]
    """Of each layer, by the name of its module, in their order."""
    others: Mapping[str, int]
    """Of all other modules with weights or buffers: embedding, head, norms."""

    @property
    def total(self) -> int:
        """Return the bytes of all weights."""
        return sum(self.layers.values()) + sum(self.others.values())


@dataclass(frozen=True)
class Placement:
    """The places of the weights of a model that is larger than the GPU."""

    resident: tuple[str, ...]
    """The modules that stay on the GPU."""
    streamed: tuple[str, ...]
    """The layers that wait in RAM."""
    layers: int
    """All layers of the model."""

    def device_map(self, device: Any) -> dict[str, Any]:
        """Return the device of each module, for transformers."""
        return dict.fromkeys(self.resident, device) | dict.fromkeys(self.streamed, "cpu")


def fits(nbytes: int, free: int) -> bool:
    """Check whether so many bytes of weights can be scored on a GPU with so much free memory."""
    return nbytes + _LEAST <= free


def place(sizes: Sizes, free: int, ram: int) -> Placement:
    """Return which layers stay on a GPU with so many free bytes; those at the end wait in so many bytes of RAM.

    Raise StageError where the GPU has no room for a single layer beside embedding and head, or RAM is too small.
    """
    largest = max(sizes.layers.values(), default=0)
    room = int(_SHARE * free) - sum(sizes.others.values())
    facts = f"the weights take {sizes.total / 1e9:.1f} GB, and the GPU has {free / 1e9:.1f} GB free"
    ways = "end other programs that use it, or take a GPU with more memory or a smaller model"
    if room < largest or not sizes.layers:
        raise StageError(f"{facts}: too little for embedding, head and a layer; {ways}")
    names, count = list(sizes.layers), 0
    room -= largest  # one layer at a time passes through
    while count < len(names) and sizes.layers[names[count]] <= room:
        room -= sizes.layers[names[count]]
        count += 1
    waiting = sum(sizes.layers[name] for name in names[count:])
    if waiting > _RAM * ram:
        raise StageError(
            f"{facts}, so layers of {waiting / 1e9:.1f} GB would wait in RAM, of which {ram / 1e9:.1f} GB are free; "
            f"{ways}"
        )
    return Placement((*sizes.others, *names[:count]), tuple(names[count:]), len(names))


def loaded_bytes(checkpoint: Checkpoint, dtype: Any) -> int:
    """Return the bytes of a checkpoint's weights in memory. dtype: a torch.dtype, or "auto": the config's or stored."""
    import torch

    if dtype == "auto":
        name = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
        dtype = getattr(torch, str(name), None)
    entries = checkpoint.tensors.values()
    if not isinstance(dtype, torch.dtype):
        return sum(entry.nbytes for entry in entries)
    return sum(math.prod(entry.shape) for entry in entries) * dtype.itemsize


def read_sizes(folder: Path, dtype: Any) -> Sizes | None:
    """Return the bytes of a checkpoint's parts, by headers and config; None for one that is stored quantised."""
    model = check_model(folder)
    if model is None:
        return None
    checkpoint = load_checkpoint(folder)
    count = sum(math.prod(entry.shape) for entry in checkpoint.tensors.values())
    width = loaded_bytes(checkpoint, dtype) / max(1, count)
    path = layers_path(model)
    layers, others = dict[str, int](), dict[str, int]()
    seen: set[int] = set()
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        is_inside = bool(path) and name.startswith(f"{path}.")
        module = path + "." + name[len(path) + 1 :].partition(".")[0] if is_inside else name.rpartition(".")[0]
        sizes = layers if is_inside else others
        sizes[module] = sizes.get(module, 0) + (0 if id(tensor) in seen else int(width * tensor.numel()))
        seen.add(id(tensor))  # a tied head is the embedding again
    return Sizes(layers, others)


def stream(model: Any, names: tuple[str, ...], device: Any) -> None:
    """Let layers whose weights are in RAM pass through a device, each while it runs.

    Between forward passes their weights can be read, set and given adapters like any others.
    """
    import torch

    model.requires_grad_(False)  # autocast would keep its casts of weights that could be trained
    homes: dict[Any, list[tuple[Any, Any]]] = {}

    def enter(layer: Any, _inputs: Any) -> None:
        homes[layer] = [(weight, weight.data) for weight in layer.parameters()]
        with torch.inference_mode(False):  # whose tensors could not be a weight's own
            for weight, value in homes[layer]:
                weight.data = value.to(device)

    def leave(layer: Any, _inputs: Any, _output: Any) -> None:
        for weight, value in homes.pop(layer, ()):
            weight.data = value

    for name in names:
        layer = model.get_submodule(name)
        for buffer in layer.buffers():
            buffer.data = buffer.data.to(device)
        layer.register_forward_pre_hook(enter)
        layer.register_forward_hook(leave, always_call=True)  # also where memory runs out
    setattr(model, _NOTE, True)


def is_streamed(model: Any) -> bool:
    """Check whether layers of a model pass through the GPU."""
    return bool(getattr(model, _NOTE, False))


def settle(model: Any) -> None:
    """Take the hooks off that transformers puts on a model in several places; its weights in RAM become real again."""
    from accelerate.hooks import remove_hook_from_submodules

    remove_hook_from_submodules(model)
    vars(model).pop("hf_device_map", None)  # PEFT would place the model anew
