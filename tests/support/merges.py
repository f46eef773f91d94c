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

from msa_lite.io.finished.seal import load_manifest, write_manifest
from msa_lite.io.weights.adapter import ADAPTER_CONFIG, ADAPTER_FILE
from msa_lite.io.weights.hub import Source
from msa_lite.merger import merge, merge_adapters

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


def make_adapter(folder: Path, tensors: Arrays, **config: Any) -> Path:
    """Write a LoRA adapter of rank 2 and scale 2 with these tensors, which have the target's names."""
    folder.mkdir()
    save_file({f"base_model.model.{name}": array for name, array in tensors.items()}, folder / ADAPTER_FILE)
    (folder / ADAPTER_CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, **config}))
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


COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODULES = ("layers.0.proj", "layers.1.proj")
OUTCOME: dict[str, Any] = {
    "sentence": "It still answers 1 of the 48 questions it was to forget (before: 48).",
    "verdict": "PASS",
    "reasons": ["the verdict rests on few rows (forget: 8)"],
    "method": "msa",
    "chosen": {"alpha": 1.2, "beta": 0.5},
    "benchmark": "tofu",
    "dataset": f"locuslab/TOFU@{COMMIT}",
    "split": "forget10",
    "main": ["extraction_strength", "model_utility", "forget_quality"],
    "metrics": {
        "extraction_strength": {
            "target": {"value": 0.9, "n": 40, "stderr": 0.01, "higher_is_better": False},
            "unlearned": {"value": 0.123456789, "n": 40, "stderr": 0.01, "higher_is_better": False},
            "ideal": {"value": 0.1, "n": 40, "stderr": 0.01, "higher_is_better": False},
        },
        "model_utility": {
            "target": {"value": 0.6, "n": 90, "stderr": None, "higher_is_better": True},
            "unlearned": {"value": 0.55, "n": 90, "stderr": None, "higher_is_better": True},
            "ideal": {"value": 0.6, "n": 90, "stderr": None, "higher_is_better": True},
        },
        "forget_quality": {"unlearned": {"value": None, "n": 0, "stderr": None, "higher_is_better": True}},
        "rouge_l_f": {"unlearned": {"value": 0.2, "n": 40, "stderr": 0.1, "higher_is_better": False}},
    },
    "sweep": {
        "rule": "tofu",
        "split": "forget10 validation",
        "points": [
            {"values": {"alpha": 1.0, "beta": 0.5}, "score": 0.7, "met": True},
            {"values": {"alpha": 1.2, "beta": 0.5}, "score": 0.8, "met": True},
            {"values": {"alpha": 9.0, "beta": 0.5}, "score": None, "met": False},
        ],
    },
    "rows": {"forget": 48, "retain": 48},
    "fits": {"forget": {"rows": 48, "epochs": 5.0, "mode": "lora", "lora_rank": 32, "learning_rate": 0.0002}},
}


def write_parts(folder: Path, card: str | None = None, shards: bool = False, **config: Any) -> None:
    """A target with companions (card: its README.md; config: keys of config.json), a prior and two vectors."""
    random = np.random.default_rng(0)
    arrays = {f"{name}.weight": random.normal(size=(16, 16)).astype(np.float32) for name in MODULES}
    for place in ("target", "prior"):
        write_checkpoint(folder / place, arrays, {name: int(name[7]) for name in arrays} if shards else None)
    values = {"model_type": "llama", "dtype": "float32", "vocab_size": 300, **config}
    (folder / "target/config.json").write_text(json.dumps(values))
    (folder / "target/tokenizer.json").write_text('{"model": {"vocab": {"/usr/bin/": 1}}}')
    (folder / "target/tokenizer_config.json").write_text('{"tokenizer_class": "X", "name_or_path": "/home/eve/model"}')
    (folder / "target/LICENSE").write_text("Do as you like.")
    (folder / "target/trainer_state.json").write_text('{"best_model_checkpoint": "/home/eve/secret/run"}')
    if card is not None:
        (folder / "target/README.md").write_text(card)
    for name in ("forget", "retain"):
        factors = {m: (random.normal(0, 0.1, (2, 16)), random.normal(0, 0.1, (16, 2))) for m in MODULES}
        Adapter(factors).write(folder / name)


def make_merge(folder: Path, form: str = "model", hub: bool = False, **strengths: float) -> Path:
    """The folder of a merge of these parts; hub: target and prior are repositories, me/target and them/prior."""
    names = {"target": "me/target", "prior": "them/prior"} if hub else {}
    sources = {
        name: Source(f"{names[name]}@main", folder / name, COMMIT) if name in names else str(folder / name)
        for name in ("target", "prior", "forget", "retain")
    }
    target, function = sources.pop("target"), merge if form == "model" else merge_adapters
    values: dict[str, Any] = {**sources, "alpha": 1.2, "beta": 0.5, **strengths}
    return function(target, folder / "run" / form, **values).folder


def add_outcome(folder: Path, **changes: Any) -> dict[str, Any]:
    """Put an outcome into a folder's manifest, as a run does; return the manifest."""
    manifest = load_manifest(folder)
    assert manifest is not None
    manifest["outcome"] = OUTCOME | changes
    write_manifest(folder, manifest)
    return manifest


ROWS, COLUMNS, SHARDS = 512, 512, 6


def write_inputs(folder: Path) -> dict[str, Any]:
    """A target of six shards and two adapters; the arguments for `merge`, `out` left out."""
    random = np.random.default_rng(0)
    names = [f"layers.{number}" for number in range(SHARDS)]
    arrays = {f"{n}.weight": random.normal(size=(ROWS, COLUMNS)).astype(KINDS["bfloat16"]) for n in names}
    arrays |= {f"{name}.norm": np.arange(COLUMNS, dtype=np.float32) for name in names}
    write_checkpoint(folder / "target", arrays, {name: int(name.split(".")[1]) for name in arrays})
    halves = ((4, COLUMNS), (ROWS, 4))
    forget, retain = (Adapter({n: tuple(random.normal(0, 0.1, s) for s in halves) for n in names}) for _ in range(2))  # type: ignore[misc]
    return {
        "target": str(folder / "target"),
        "forget": str(forget.write(folder / "forget")),
        "retain": str(retain.write(folder / "retain")),
        "beta": 0.5,
        "threads": 2,
    }


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file of a folder by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stamps(folder: Path) -> dict[str, int]:
    """When each weight file of a folder was last written, by name."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
