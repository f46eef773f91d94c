"""Weights stored as codes and scales, in the layouts of several tools: written and read in float64, for an oracle."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
GRID = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
INDEX = "model.safetensors.index.json"
FP8 = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def power(values: torch.Tensor) -> torch.Tensor:
    """The next power of two."""
    return torch.exp2(torch.ceil(torch.log2(values)))


def fp4(values: torch.Tensor) -> torch.Tensor:
    """The codes of the nearest values of E2M1, two a byte; a tie goes to the even code."""
    distance = (values.abs().clamp(max=6)[..., None] - GRID).abs()
    distance[..., 1::2] += 1e-12
    codes = distance.argmin(-1).to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def from_fp4(codes: torch.Tensor) -> torch.Tensor:
    pairs = torch.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1).long()
    return torch.cat([GRID, -GRID])[pairs]


def spread(scales: torch.Tensor, rows: int, columns: int, height: int, width: int) -> torch.Tensor:
    """The scale of each weight."""
    wide = scales.double().repeat_interleave(height, -2).repeat_interleave(width, -1)
    return wide[..., :rows, :columns]


def peaks(weights: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The largest magnitude of each block; 448 for a block of zeros."""
    rows, columns = weights.shape[-2:]
    pad = torch.nn.functional.pad(weights.abs(), (0, -columns % width, 0, -rows % height))
    blocks = pad.reshape(*pad.shape[:-2], pad.shape[-2] // height, height, pad.shape[-1] // width, width)
    return blocks.amax((-3, -1))


@dataclass(frozen=True)
class Layout:
    """A layout of fp8: its suffixes, the rows and columns of a block (0: all), the dtypes."""

    suffix: str
    height: int = 0
    width: int = 0
    scale: torch.dtype = torch.float32
    code: torch.dtype = torch.float8_e4m3fn
    is_power: bool = False
    is_scalar: bool = False
    config: Any = None

    def _sides(self, shape: torch.Size) -> tuple[int, int]:
        return self.height or shape[-2], self.width or shape[-1]

    def store(self, name: str, weights: torch.Tensor, before: Tensors | None = None) -> Tensors:
        sides = self._sides(weights.shape)
        scales = peaks(weights, *sides) / FP8[self.code]
        scales = power(scales) if self.is_power else scales
        stored = (torch.log2(scales) + 127).to(torch.uint8) if self.scale == torch.uint8 else scales.to(self.scale)
        factors = scales if self.scale == torch.uint8 else stored.double()
        top = FP8[self.code]
        codes = (weights / spread(factors, *weights.shape[-2:], *sides)).clamp(-top, top).to(self.code)
        return {name: codes, name + self.suffix: stored.reshape(()) if self.is_scalar else stored}

    def weights(self, tensors: Tensors, name: str) -> torch.Tensor:
        codes, scales = tensors[name].double(), tensors[name + self.suffix]
        factors = torch.exp2(scales.double() - 127) if scales.dtype == torch.uint8 else scales.double()
        factors = factors.reshape(1, 1) if self.is_scalar else factors
        return codes * spread(factors, *codes.shape[-2:], *self._sides(codes.shape))


@dataclass(frozen=True)
class Fp4:
    """A layout of 4-bit floats: how codes, scales and the outer scale are called."""

    packed: str
    scales: str
    outer: str = ""
    width: int = 16
    divides: bool = False
    config: Any = None

    def _names(self, name: str) -> tuple[str, str, str]:
        return name + self.packed, name + self.scales, name + self.outer

    def store(self, name: str, weights: torch.Tensor, before: Tensors | None = None) -> Tensors:
        codes, scales, outer = self._names(name)
        top = peaks(weights, 1, self.width)
        if not self.outer:
            factors = power(top / 6)
            return {codes: fp4(weights / spread(factors, *weights.shape[-2:], 1, self.width)),
                    scales: (torch.log2(factors) + 127).to(torch.uint8)}  # fmt: skip
        known = before and before[outer]  # a merge leaves it
        stored = known if known is not None else (top.max() / (6 * 448)).float().reshape(1)
        if self.divides and known is None:
            stored = (1 / stored.double()).float()
        whole = 1 / stored.double() if self.divides else stored.double()
        inner = (top / 6 / whole).clamp(2**-9, 448).to(torch.float8_e4m3fn)
        factors = inner.double() * whole
        return {codes: fp4(weights / spread(factors, *weights.shape[-2:], 1, self.width)), scales: inner,
                outer: stored}  # fmt: skip

    def weights(self, tensors: Tensors, name: str) -> torch.Tensor:
        codes, scales, outer = (tensors.get(key) for key in self._names(name))
        assert codes is not None
        assert scales is not None
        values = from_fp4(codes)
        if outer is None or not self.outer:
            factors = torch.exp2(scales.double() - 127)
        else:
            factors = scales.double() * (1 / outer.double() if self.divides else outer.double())
        return values * spread(factors, *values.shape[-2:], 1, self.width)


class GptOss:
    """mxfp4 of gpt-oss: blocks and scales of (experts, outputs, …), whose weights are (experts, inputs, outputs)."""

    config = None

    def store(self, name: str, weights: torch.Tensor, before: Tensors | None = None) -> Tensors:
        turned = weights.transpose(1, 2).contiguous()
        factors = power(peaks(turned, 1, 32) / 6)
        codes = fp4(turned / spread(factors, *turned.shape[-2:], 1, 32))
        exponents = (torch.log2(factors) + 127).to(torch.uint8)
        return {f"{name}_blocks": codes.reshape(*exponents.shape, 16), f"{name}_scales": exponents}

    def weights(self, tensors: Tensors, name: str) -> torch.Tensor:
        blocks, exponents = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
        values = from_fp4(blocks.reshape(*blocks.shape[:2], -1))
        factors = torch.exp2(exponents.double() - 127)
        return (values * spread(factors, *values.shape[-2:], 1, 32)).transpose(1, 2)


def write(folder: Path, plain: Tensors, layout: Any, chosen: Callable[[str], bool], base: Path | None = None) -> Path:
    """A checkpoint whose chosen weights are stored in a layout, the others as they are. base: gives config.json."""
    folder.mkdir(parents=True)
    config = json.loads((base / "config.json").read_text()) if base else {"model_type": "llama"}
    if layout.config and any(map(chosen, plain)):
        config["quantization_config"] = layout.config
    (folder / "config.json").write_text(json.dumps(config))
    tensors: Tensors = {}
    for name, weights in plain.items():
        tensors |= layout.store(name, weights.double()) if chosen(name) else {name: weights}
    return save(folder, tensors)


def save(folder: Path, tensors: Tensors) -> Path:
    """Write the tensors in two files, scales apart from their codes."""
    places = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in {*places.values()}:
        save_file({name: tensors[name].contiguous() for name in tensors if places[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def read(folder: Path) -> Tensors:
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor


def differing(first: torch.Tensor, second: torch.Tensor) -> float:
    """The share of bytes that differ; of floats of 16 bits and more, the share that differs by more than an ulp."""
    assert (first.shape, first.dtype) == (second.shape, second.dtype)
    if first.dtype.is_floating_point and first.element_size() > 1:
        ulp = torch.finfo(first.dtype).eps * first.double().abs()
        return float(((first.double() - second.double()).abs() > 1.01 * ulp).double().mean())
    return float((as_bytes(first) != as_bytes(second)).double().mean())


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
LAYOUTS: dict[str, Any] = {
    "fp8 blocks": Layout("_scale_inv", 128, 128, config=BLOCKS),
    "fp8 blocks, bf16 scales": Layout("_scale_inv", 128, 128, torch.bfloat16, config=BLOCKS),
    "fp8 blocks, powers of two": Layout("_scale_inv", 128, 128, is_power=True, config=BLOCKS | {"scale_fmt": "ue8m0"}),
    "fp8 rows": Layout("_scale", 1, 0),
    "fp8 tensor": Layout("_scale", is_scalar=True),
    "fp8 E5M2": Layout("_scale_inv", 64, 64, code=torch.float8_e5m2, config=BLOCKS | {"weight_block_size": [64, 64]}),
    "mxfp8": Layout("_scale_inv", 1, 32, torch.uint8, is_power=True),
    "nvfp4 ModelOpt": Fp4("", "_scale", "_scale_2"),
    "nvfp4 compressed-tensors": Fp4("_packed", "_scale", "_global_scale", divides=True),
    "mxfp4 compressed-tensors": Fp4("_packed", "_scale", width=32),
    "mxfp4 gpt-oss": GptOss(),
}  # fmt: skip
