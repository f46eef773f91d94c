"""Checkpoints and adapters written by hand from arrays, without torch, and the fp64 results that a merge must give."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

KINDS: dict[str, np.dtype[Any]] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
Arrays = dict[str, np.ndarray]


def write_checkpoint(folder: Path, arrays: Arrays, shards: Mapping[str, int] | None = None) -> Path:
    """A checkpoint folder; shards: the number of the file that each tensor stands in, one file for None."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama", "dtype": "bfloat16"}')
    if shards is None:
        save_file(arrays, folder / "model.safetensors", {"format": "pt"})
        return folder
    names = {name: f"model-{number:05}.safetensors" for name, number in shards.items()}
    for file in set(names.values()):
        save_file({n: a for n, a in arrays.items() if names[n] == file}, folder / file, {"format": "pt"})
    index = {"metadata": {"total_size": sum(a.nbytes for a in arrays.values())}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def read_checkpoint(folder: Path) -> Arrays:
    """All tensors of a folder as they are stored."""
    return {name: array for path in sorted(folder.glob("*.safetensors")) for name, array in load_file(path).items()}


@dataclass
class Adapter:
    """Factors (A, B) by tensor name without `.weight`, and PEFT's settings, ranks and alphas by module."""

    factors: dict[str, tuple[np.ndarray, np.ndarray]]
    lora_alpha: float = 8
    use_rslora: bool = False
    fan_in_fan_out: bool = False
    alphas: dict[str, float] = field(default_factory=dict)

    def delta(self, module: str) -> np.ndarray:
        """scale · B A in fp64, as the target stores the weight."""
        a, b = (factor.astype(np.float64) for factor in self.factors[module])
        rank = a.shape[0]
        scale = self.alphas.get(module, self.lora_alpha) / (math.sqrt(rank) if self.use_rslora else rank)
        left, right = (a.T, b.T) if self.fan_in_fan_out else (b, a)
        return (left * scale) @ right

    def size(self, module: str) -> np.ndarray:
        """The same from absolute values: what rounding errors of the product are measured by."""
        factors = {module: tuple(np.abs(factor) for factor in self.factors[module])}
        return Adapter(factors, self.lora_alpha, self.use_rslora, self.fan_in_fan_out, self.alphas).delta(module)  # type: ignore[arg-type]

    def write(self, folder: Path) -> Path:
        """The folder as PEFT writes it."""
        folder.mkdir(parents=True)
        config = {
            "peft_type": "LORA",
            "r": 1,
            "rank_pattern": {module: a.shape[0] for module, (a, _) in self.factors.items()},
            "lora_alpha": self.lora_alpha,
            "alpha_pattern": self.alphas,
            "use_rslora": self.use_rslora,
            "fan_in_fan_out": self.fan_in_fan_out,
        }
        (folder / "adapter_config.json").write_text(json.dumps(config))
        tensors = {
            f"base_model.model.{module}.lora_{half}.weight": factor
            for module, pair in self.factors.items()
            for half, factor in zip("AB", pair, strict=True)
        }
        save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
        return folder


def edit_adapter(folder: Path, out: Path, tensors: Callable[[Arrays], Any] | None = None, **config: Any) -> Path:
    """A copy of an adapter with other config fields, and its tensors changed in place by a function."""
    shutil.copytree(folder, out)
    content = json.loads((out / "adapter_config.json").read_text()) | config
    (out / "adapter_config.json").write_text(json.dumps(content))
    if tensors:
        arrays = load_file(out / "adapter_model.safetensors")
        tensors(arrays)
        save_file(arrays, out / "adapter_model.safetensors")
    return out


def nearest(values: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """The nearest value of a dtype, ties to even, by exact fp64 distances to its candidates; as bits."""
    if dtype.itemsize > 2:
        return values.astype(dtype).view(f"u{dtype.itemsize}")
    first = values.astype(np.float32).astype(dtype).view(np.int16)
    candidates = np.stack([first - 1, first, first + 1])
    distances = np.abs(candidates.view(dtype).astype(np.float64) - values)
    is_best = (distances == np.nanmin(distances, axis=0)) & ~np.isnan(distances)
    order = np.argmax(is_best * (2 + (candidates % 2 == 0)), axis=0)  # of two at one distance, the even one
    return np.take_along_axis(candidates, order[None], axis=0)[0].view(np.uint16)


def gap(values: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Distance between the neighbours in a dtype that values of this magnitude lie between."""
    limits = ml_dtypes.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(np.abs(values), float(limits.smallest_normal))))
    return 2.0 ** (exponent - limits.nmant)
