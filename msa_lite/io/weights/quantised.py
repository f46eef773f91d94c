"""Checkpoints that are stored as codes and scales, read as the weights that they stand for.

The tensors tell the form, not the config: some tools write none there, or one that transformers does not know.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from msa_lite.errors import FormatError
from msa_lite.io.files.reading import parse_json
from msa_lite.io.weights.blocks import Files, read_part
from msa_lite.io.weights.checkpoint import FLOAT_DTYPES, Checkpoint, ShardFile, TensorEntry
from msa_lite.io.weights.quantised_forms import BitsAndBytes4, BitsAndBytes8, CodeForm, Packed, Scaled, Turned
from msa_lite.io.weights.writer import file_header

CONFIG_KEYS = ("quantization_config", "compression_config")
_STATE = ".quant_state.bitsandbytes__"
_STATE_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_FP8, _FP8_BLOCK = ("F8_E4M3", "F8_E5M2"), 128
_EXPONENTS = ("U8", "F8_E8M0")
_FP4_BLOCKS = (16, 32)  # weights of a scale
# Beside a module's codes and scales, nothing that the weights depend on: scales of its inputs and of the cache.
_BESIDE = (
    "input_scale", "activation_scale", "input_global_scale", "output_scale", "k_scale", "v_scale", "weight_format",
    "weight_shape",
)  # fmt: skip


@dataclass(frozen=True)
class _Found:
    """A weight that is stored as codes."""

    name: str
    """The weight's, in a model without codes."""
    form: CodeForm
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    """The names of its codes, scales and what else it is made of."""


class _Tensors:
    """The tensors of a checkpoint, and the small ones' content."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.by_name, self._files = checkpoint.tensors, Files()
        self.has_content = bool(checkpoint.shards)
        settings = checkpoint.config.get("quantization_config")
        self.settings: Mapping[str, Any] = settings if isinstance(settings, dict) else {}

    def first(self, *names: str) -> TensorEntry | None:
        """Return the first of these tensors that is there."""
        return next((self.by_name[name] for name in names if name in self.by_name), None)

    def content(self, entry: TensorEntry) -> np.ndarray:
        """Return the bytes of a tensor."""
        return read_part(self._files, entry, 0, entry.nbytes)

    def number(self, entry: TensorEntry) -> float:
        """Return the one number of a tensor; 1 where only headers are there."""
        if not self.has_content or not entry.is_float or not entry.nbytes:
            return 1.0
        return float(self.content(entry).view(FLOAT_DTYPES[entry.dtype]).reshape(-1)[0])


def dequantised(checkpoint: Checkpoint, stored: bool = False) -> Checkpoint:
    """Return a checkpoint whose codes are read as weights (`Packed`); one without codes is returned as it is.

    stored: keep the files' layout, and the matrices as they lie there, to store a merge in this form; else scales are
    gone, and every weight lies where a model without codes has it. Codes of a form that is not known stay as they are.
    Raise FormatError for codes and scales that do not fit each other. Of bitsandbytes' 4 bits, headers alone do not
    tell the shapes (`hides_shapes`).
    """
    tensors = _Tensors(checkpoint)
    found = {weight.parts[0]: weight for weight in _find(tensors)}
    if not found:
        return checkpoint
    gone = {part for weight in found.values() for part in weight.parts}
    modules = {name.rpartition(".")[0] for name in gone}
    gone |= {name for name in tensors.by_name if _is_beside(name, modules)}
    packed: dict[str, TensorEntry] = {}
    for name, entry in checkpoint.tensors.items():
        if name in found:
            weight = found[name]
            packed[name] = _packed(weight, entry, stored)
        elif name not in gone:
            packed[name] = entry
    by_name = {entry.name: entry for entry in packed.values()}
    if stored:
        return replace(checkpoint, tensors=by_name)
    config = {key: value for key, value in checkpoint.config.items() if key not in CONFIG_KEYS or is_coded(by_name)}
    return replace(checkpoint, config=config, tensors=by_name, shards=tuple(_plain(checkpoint.shards, packed)))


def _packed(weight: _Found, codes: TensorEntry, stored: bool) -> Packed:
    form: CodeForm = weight.form
    shape = weight.shape
    if isinstance(form, Turned) and stored:
        shape, form = form.form.shape, form.form
    return Packed(weight.name, codes.file, "F32", shape, codes.start, 4 * math.prod(shape), form)


def is_coded(tensors: Mapping[str, TensorEntry]) -> bool:
    """Check whether there are matrices of codes whose form is not known: of GPTQ, AWQ, HQQ and others."""
    return any(
        entry.dtype in ("I32", "U8", "I8", "F4", *_FP8) and "weight" in name.rpartition(".")[2] and len(entry.shape) > 1
        for name, entry in tensors.items()
    )


def hides_shapes(checkpoint: Checkpoint) -> bool:
    """Check whether a checkpoint's headers, without its files, do not tell the shapes of its weights."""
    return not checkpoint.shards and any(_STATE in name for name in checkpoint.tensors)


def packed_weights(checkpoint: Checkpoint) -> dict[str, Packed]:
    """Return the weights that are read from codes, by name."""
    return {name: entry for name, entry in checkpoint.tensors.items() if isinstance(entry, Packed)}


def describe_forms(checkpoint: Checkpoint) -> str:
    """Name the forms of a checkpoint's codes: "fp8", "bitsandbytes NF4"; empty for one without codes."""
    return " and ".join(Counter(entry.form.label for entry in packed_weights(checkpoint).values()))


def name_form(checkpoint: Checkpoint) -> str | None:
    """Return the form of a stored checkpoint's codes, where it can be read, also by headers alone; else None."""
    if hides_shapes(checkpoint):
        return "4 bits of bitsandbytes"
    return describe_forms(dequantised(checkpoint)) or None


def _is_beside(name: str, modules: set[str]) -> bool:
    module, _, last = name.rpartition(".")
    return last in _BESIDE and (module in modules or any(part.startswith(f"{module}.") for part in modules))


def _plain(shards: tuple[ShardFile, ...], packed: Mapping[str, TensorEntry]) -> Iterator[ShardFile]:
    """Yield shards as a model without codes has them; none for files of nothing but scales. packed: by stored name."""
    for shard in shards:
        tensors = tuple(packed[entry.name] for entry in shard.tensors if entry.name in packed)
        if tensors:
            header = file_header(((e.name, e.dtype, e.shape, e.nbytes) for e in tensors), shard.metadata)
            yield replace(shard, header=header, tensors=tensors)


def _find(tensors: _Tensors) -> Iterator[_Found]:
    """Yield the weights that are stored as codes."""
    for name, entry in tensors.by_name.items():
        rules = (_four_bit, _int8, _stacked_fp4, _fp4, _fp8) if not entry.is_float else ()
        weight = next(filter(None, (rule(tensors, name, entry) for rule in rules)), None)
        if weight is not None:
            yield weight


def _four_bit(tensors: _Tensors, name: str, entry: TensorEntry) -> _Found | None:
    """Find NF4 and FP4 of bitsandbytes."""
    state = tensors.first(f"{name}{_STATE}nf4", f"{name}{_STATE}fp4")
    if state is None:
        return None
    scales, table = tensors.first(f"{name}.absmax"), tensors.first(f"{name}.quant_map")
    where = f"{entry.file}: {state.name}"
    if scales is None or table is None or table.nbytes != 64:
        raise FormatError(f"{where}: its scales (absmax) or its table (quant_map) is missing")
    content = parse_json(tensors.content(state).tobytes(), where)
    try:
        shape = tuple(int(side) for side in content["shape"])
        block, kind, nested = int(content["blocksize"]), str(content["quant_type"]), None
        if not scales.is_float:
            inner, outer = (tensors.by_name[f"{name}.{part}"] for part in ("nested_quant_map", "nested_absmax"))
            nested = inner, outer, int(content["nested_blocksize"]), float(content["nested_offset"])
        count = math.prod(shape)
        fits = len(shape) == 2 and block > 0 and entry.nbytes == -(-count // 2)
        if not fits or math.prod(scales.shape) != -(-count // block):
            raise ValueError(f"{entry.nbytes} bytes of codes do not make {shape}")
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{where}: not as bitsandbytes writes it ({error})") from error
    form = BitsAndBytes4(entry, table, scales, (shape[0], shape[1]), block, kind, nested)
    parts = (f"{name}.{part}" for part in _STATE_PARTS)
    return _Found(name, form, shape, (name, state.name, *parts))


def _int8(tensors: _Tensors, name: str, entry: TensorEntry) -> _Found | None:
    """Find LLM.int8 of bitsandbytes."""
    scales = tensors.first(f"{name.rpartition('.')[0]}.SCB")
    if scales is None or entry.dtype != "I8" or len(entry.shape) != 2:
        return None
    if scales.dtype != "F32" or math.prod(scales.shape) != entry.shape[0]:
        raise FormatError(f"{entry.file}: {scales.name} has {scales.shape} numbers for the rows of {entry.shape}")
    return _Found(name, BitsAndBytes8(entry, scales), entry.shape, (name, scales.name))


def _stacked_fp4(tensors: _Tensors, name: str, entry: TensorEntry) -> _Found | None:
    """Find mxfp4 of gpt-oss: blocks (experts, outputs, n, 16 bytes), whose weights are (experts, inputs, outputs)."""
    stem = name.removesuffix("_blocks")
    scales = tensors.first(f"{stem}_scales")
    if stem == name or scales is None or len(entry.shape) != 4 or scales.dtype not in _EXPONENTS:
        return None
    if scales.shape != entry.shape[:3]:
        raise FormatError(f"{entry.file}: {scales.name} is {scales.shape}, {name} is {entry.shape}")
    experts, outputs, count, half = entry.shape
    form = Scaled(entry, scales, (experts, outputs, 2 * count * half), 1, 2 * half, is_power=True)
    return _Found(stem, Turned(form), (experts, 2 * count * half, outputs), (name, scales.name))


def _scales_of(tensors: _Tensors, name: str) -> TensorEntry | None:
    stem = name.removesuffix(".weight")
    return tensors.first(f"{name}_scale_inv", f"{name}_scale", *([f"{stem}.scale"] if stem != name else []))


def _fp4(tensors: _Tensors, name: str, entry: TensorEntry) -> _Found | None:
    """Find nvfp4 and mxfp4 of ModelOpt, compressed-tensors and DeepSeek: two codes a byte, one scale a 16 or 32."""
    plain = name.removesuffix("_packed")
    scales = _scales_of(tensors, plain)
    if scales is None or entry.dtype not in ("U8", "I8") or len(entry.shape) not in (2, 3):
        return None
    shape = (*entry.shape[:-1], 2 * entry.shape[-1])
    width, rest = divmod(shape[-1], scales.shape[-1]) if scales.shape and scales.shape[-1] else (0, 1)
    is_power = scales.dtype in _EXPONENTS
    if rest or width not in _FP4_BLOCKS or scales.shape[:-1] != shape[:-1] or not (is_power or scales.dtype in _FP8):
        return None
    outer, parts = 1.0, [name, scales.name]
    if times := tensors.first(f"{plain}_scale_2"):
        outer, parts = tensors.number(times), [*parts, times.name]
    if over := tensors.first(f"{plain}_global_scale"):
        outer, parts = 1 / (tensors.number(over) or math.nan), [*parts, over.name]
    if not (math.isfinite(outer) and outer > 0):
        raise FormatError(f"{entry.file}: {parts[-1]}: the scale of the whole tensor is not above 0")
    return _Found(plain, Scaled(entry, scales, shape, 1, width, is_power, outer), shape, tuple(parts))


def _fp8(tensors: _Tensors, name: str, entry: TensorEntry) -> _Found | None:
    """Find fp8 with scales of the tensor, of its rows, or of blocks."""
    scales = _scales_of(tensors, name)
    if scales is None or entry.dtype not in _FP8 or len(entry.shape) not in (2, 3):
        return None
    if not (scales.is_float or scales.dtype in _EXPONENTS) or scales.dtype == "F64":
        raise FormatError(f"{entry.file}: {scales.name} is {scales.dtype}, which are no scales of {name}")
    block = tensors.settings.get("weight_block_size")
    named = block if isinstance(block, list) and len(block) == 2 and all(type(n) is int for n in block) else ()
    sides = _block(entry.shape, scales.shape, named)
    if sides is None:
        raise FormatError(f"{entry.file}: {scales.name} is {scales.shape}, which fits no blocks of {entry.shape}")
    is_power = scales.dtype in _EXPONENTS or tensors.settings.get("scale_fmt") == "ue8m0"
    one = math.prod(scales.shape) == 1  # of all experts together
    shape = (math.prod(entry.shape[:-1]), entry.shape[-1]) if one else entry.shape
    return _Found(name, Scaled(entry, scales, shape, *sides, is_power), entry.shape, (name, scales.name))


def _block(shape: tuple[int, ...], scales: tuple[int, ...], named: Any) -> tuple[int, int] | None:
    """Return rows and columns of a scale's block, or None where these scales fit no blocks of the weights.

    named: the two sides as the config names them, or nothing.
    """
    rows, columns = shape[-2:]
    if math.prod(scales) == 1:
        return math.prod(shape[:-1]), columns
    if len(shape) == 3:
        if scales[0] != shape[0]:
            return None
        scales = scales[1:]
    if len(scales) < 2:  # one a row, or, of experts, one a matrix
        scales = (scales[0] if scales else 1, 1)
    if len(scales) != 2:
        return None
    sides = []
    for size, count, known in zip((rows, columns), scales, named or (None, None), strict=True):
        options = (known, size if count == 1 else None, 1 if count == size else None, _FP8_BLOCK, size // max(1, count))
        side = next((n for n in options if n and n > 0 and -(-size // n) == count), None)
        if side is None:
            return None
        sides.append(min(side, size))
    return sides[0], sides[1]
