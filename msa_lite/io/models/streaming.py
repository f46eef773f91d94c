"""Load models that are larger than the GPU: layers without room there wait in RAM and pass through the GPU.

accelerate's hooks do so as well. But they leave weights that nobody can read, set or put an adapter on, and copy each
layer when it is wanted, not before. Here all but the layers stays on the GPU.
"""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msa_lite.errors import StageError
from msa_lite.io.console.libraries import without_bars
from msa_lite.io.console.progress import readable
from msa_lite.io.models.devices import free_ram
from msa_lite.io.models.ends import leave_embedding, leave_head
from msa_lite.io.models.heads import layers_path
from msa_lite.io.models.loading import check_model, load_whole
from msa_lite.io.models.transit import Transit, check_room
from msa_lite.io.weights.checkpoint import Checkpoint, load_checkpoint

logger = logging.getLogger(__name__)

_LEAST = 1 << 29  # bytes beside the weights that scoring a single item takes
_SHARE = 0.75  # of the free memory for weights that stay: each batch copies all others, so batches should be large
NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in 4 bits: the code, an 8-bit scale a block, an fp32 scale of scales."""
_NOTE = "msa_lite_streams"


@dataclass(frozen=True)
class Sizes:
    """The bytes of a model's weights, as it is loaded."""

    layers: Mapping[str, int]
    """Of each layer, by the name of its module, in their order."""
    others: Mapping[str, int]
    """Of all other modules with weights or buffers: embedding, head, norms."""
    ends: tuple[str, ...] = ()
    """The modules among them that can wait in RAM: embedding and head, unless they share their weight."""

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
    waiting: int
    """Bytes that wait in RAM."""
    ends: tuple[str, ...] = ()
    """Of embedding and head, what waits in RAM as well: on a GPU without room for it beside two layers."""

    def device_map(self, device: Any) -> dict[str, Any]:
        """Return the device of each module, for transformers."""
        return dict.fromkeys(self.resident, device) | dict.fromkeys((*self.streamed, *self.ends), "cpu")


def fits(nbytes: int, free: int) -> bool:
    """Check whether so many bytes of weights can be scored on a GPU with so much free memory."""
    return nbytes + _LEAST <= free


def place(sizes: Sizes, free: int) -> Placement:
    """Return which layers stay on a GPU with so many free bytes; those at the end wait in RAM.

    Raise StageError where the GPU has no room for two layers, though embedding and head wait as well.
    """
    largest = max(sizes.layers.values(), default=0)
    room, ends = int(_SHARE * free) - sum(sizes.others.values()), list[str]()
    for end in sizes.ends:
        if room < 2 * largest:
            room += sizes.others[end]
            ends.append(end)
    if room < 2 * largest or not sizes.layers:
        facts = f"the weights take {sizes.total / 1e9:.1f} GB, and the GPU has {free / 1e9:.1f} GB free"
        ways = "end other programs that use it, or take a GPU with more memory or a smaller model"
        raise StageError(f"{facts}: too little for two layers beside what cannot wait in RAM; {ways}")
    names, count = list(sizes.layers), 0
    room -= 2 * largest  # one computes, the next one comes
    while count < len(names) and sizes.layers[names[count]] <= room:
        room -= sizes.layers[names[count]]
        count += 1
    resident = (*(name for name in sizes.others if name not in ends), *names[:count])
    waiting = sum(sizes.layers[name] for name in names[count:]) + sum(sizes.others[name] for name in ends)
    return Placement(resident, tuple(names[count:]), len(names), waiting, tuple(ends))


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


def read_sizes(folder: Path, dtype: Any, four_bit: bool = False) -> Sizes | None:
    """Return the bytes of a checkpoint's parts, by headers and config; None for one that is stored quantised.

    four_bit: the matrices of layers will be in NF4.
    """
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
        of_each = NF4 if four_bit and is_inside and tensor.dim() > 1 else width
        sizes[module] = sizes.get(module, 0) + (0 if id(tensor) in seen else int(of_each * tensor.numel()))
        seen.add(id(tensor))  # a tied head is the embedding again
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_shared = head is None or head.weight is embedding.weight
    ends = () if is_shared else tuple(name for name, m in model.named_modules() if m is embedding or m is head)
    return Sizes(layers, others, ends)


def check_ram(waiting: int, folder: Path | None = None) -> None:
    """Raise StageError, before anything is loaded, where layers of so many bytes find no room to wait in.

    folder: as in `stream`. Warn where they wait in a file.
    """
    folder = folder or Path(tempfile.gettempdir())
    if in_file := check_room(waiting, free_ram(), folder):
        logger.warning(
            "%s of layers find no room in RAM and wait in a file in %s, which is slower", readable(in_file), folder
        )


def load_streamed(folder: Path, placement: Placement, device: Any, **how: Any) -> Any:
    """Load a checkpoint, with the layers that stream in the host's memory; `stream` comes next.

    how: dtype and quantization_config (4 bits), for transformers. Quantised layers are those of a model that is loaded
    whole: each matrix is quantised on the device.
    """
    four_bit = how.get("quantization_config")
    if four_bit is not None:
        four_bit.llm_int8_enable_fp32_cpu_offload = True  # so transformers leaves these layers as they are
    with without_bars():
        model = load_whole(folder, device_map=placement.device_map(device), **how)
    settle(model)
    if four_bit is not None:
        _quantise_layers(model, placement.streamed, device)
    return model


def _quantise_layers(model: Any, names: Sequence[str], device: Any) -> None:
    """Put 4-bit layers in the place of linear ones in layers that transformers left as they were."""
    import torch
    from transformers.integrations.bitsandbytes import Bnb4bitQuantize, replace_with_bnb_linear

    quantizer = model.hf_quantizer
    skipped = [name for name in quantizer.modules_to_not_convert if name not in names]
    plain = {
        path: module
        for path, module in model.named_modules()
        if path.startswith(tuple(f"{name}." for name in names)) and getattr(module, "weight", None) is not None
    }
    replace_with_bnb_linear(model, skipped, quantizer.quantization_config)
    quantise = Bnb4bitQuantize(quantizer)
    for path, module in plain.items():
        if (quantised := model.get_submodule(path)) is module:
            continue
        name = f"{path}.weight"
        weight = quantise.convert({name: module.weight.detach().to(device)}, model=model)[name]
        quantised.weight = weight if torch.device(device).type == "cpu" else weight.to("cpu")
        quantised.bias = module.bias
        quantised.support_avx512bf16_for_cpu = False  # another layout, for weights that stay on a CPU


def leave_ends(model: Any, names: Sequence[str], device: Any) -> None:
    """Keep a loaded model's embedding or head in RAM. names: see `Placement.ends`."""
    for name in names:
        leave = leave_embedding if model.get_submodule(name) is model.get_input_embeddings() else leave_head
        leave(model, device)


def stream(model: Any, names: Sequence[str], device: Any, *, is_fit: bool = False, folder: Path | None = None) -> None:
    """Let layers pass through a device, each while it computes; from where they are, their weights go to RAM.

    is_fit: see `Transit`. folder: for what finds no room in RAM; default: the system's for temporary files. Raise
    StageError as `check_room`.
    """
    if not is_fit:
        model.requires_grad_(False)  # autocast would keep its casts of weights that could be trained
    layers = [model.get_submodule(name) for name in names]
    transit = Transit(layers, device, is_fit=is_fit, ram=free_ram(), folder=folder or Path(tempfile.gettempdir()))
    setattr(model, _NOTE, transit)


def is_streamed(model: Any) -> bool:
    """Check whether layers of a model pass through the GPU."""
    return getattr(model, _NOTE, None) is not None


def settle(model: Any) -> None:
    """Take the hooks off that transformers puts on a model in several places; its weights in RAM become real again."""
    from accelerate.hooks import remove_hook_from_submodules

    remove_hook_from_submodules(model)
    vars(model).pop("hf_device_map", None)  # PEFT would place the model anew
