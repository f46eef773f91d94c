"""PEFT LoRA adapter folders → low-rank factors under the target's own tensor names.

Every tensor of the adapter file and every field of its config is accounted for: used, known to be without effect on
the weights, or an error that names it. Reading is by numpy; PEFT itself is only needed to train.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from msa_lite.errors import FormatError, MismatchError, UsageError, join_faults
from msa_lite.io.checkpoint import TensorEntry, read_rows, read_shard

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
_PREFIX = "base_model.model."

# Fields that decide the delta and are read here, and fields without any effect on it. A field that stands in
# neither set and is set to something is refused by name: it may change what the factors mean.
_READ = {"peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "fan_in_fan_out"}
_NO_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules", "inference_mode",
    "layers_pattern", "layers_to_transform", "lora_dropout", "lora_ga_config", "loftq_config", "megatron_core",
    "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
}  # fmt: skip
_REASONS = {
    "use_dora": "DoRA is not linear in the factors",
    "modules_to_save": "full new values instead of factors",
    "lora_bias": "a bias delta",
    "target_parameters": "adapters on bare parameters (fused experts)",
    "layer_replication": "replicated layers",
}
_REFUSED_TENSORS = (
    ("lora_magnitude_vector", "DoRA is not linear in the factors; train with use_dora=False"),
    ("lora_embedding_", "an adapter on an embedding; train without embeddings in target_modules"),
    ("lora_B.bias", "a bias delta (lora_bias); train with lora_bias=False"),
    ("base_layer.", "a full copy of a prior's tensor; save with save_embedding_layers=False"),
    ("lora_E", "AdaLoRA factors; only plain LoRA is read"),
    ("trainable_tokens", "absolute token rows; only plain LoRA is read"),
)


@dataclass(frozen=True)
class LowRank:
    """Factors of one tensor's delta: Δw = scale · B A, transposed where the weight is stored as (in, out).

    A: (r, in), B: (out, r) entries of the adapter file; scale = lora_alpha / r, or lora_alpha / √r for rsLoRA.
    """

    a: TensorEntry
    b: TensorEntry
    scale: float
    transposed: bool

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the delta as the target stores the weight."""
        out, into = self.b.shape[0], self.a.shape[1]
        return (into, out) if self.transposed else (out, into)


@dataclass(frozen=True)
class Adapter:
    """A PEFT LoRA folder: config, and factors by module name (no prefix, no `.weight`)."""

    folder: Path
    config: dict[str, Any]
    modules: dict[str, LowRank]


def _pattern_value(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """PEFT's rule for rank_pattern and alpha_pattern: the key is a regex on the end of the name, first match wins."""
    for key, value in patterns.items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


def _check_config(folder: Path, config: dict[str, Any]) -> None:
    faults = []
    if config.get("peft_type") != "LORA":
        faults.append(f"peft_type: {config.get('peft_type')!r}, only 'LORA' is read")
    if config.get("bias", "none") != "none":
        faults.append(f"bias: {config['bias']!r}, full new bias values; train with bias='none'")
    if config.get("init_lora_weights", True) not in (True, False, "gaussian", "orthogonal", "eva"):
        faults.append(f"init_lora_weights: {config['init_lora_weights']!r} changes the model it starts from")
    known = _READ | _NO_EFFECT | {"bias", "init_lora_weights"}
    faults += [
        f"{key}: {value!r}, {_REASONS.get(key, 'not known to msa-lite, it may change what the factors mean')}"
        for key, value in config.items()
        if key not in known and value not in (None, False, [], {}, "")
    ]
    if faults:
        raise FormatError(join_faults(f"{folder}: this adapter cannot be merged exactly:", faults))


def load_adapter(folder: Path) -> Adapter:
    """Open an adapter folder by its config and header.

    Raises UsageError when it is no adapter folder; FormatError when it is of a kind whose delta is not a plain
    product of factors, when a tensor is not accounted for, or when a rank contradicts the config.
    """
    folder = Path(folder)
    if not (folder / ADAPTER_CONFIG).is_file():
        raise UsageError(f"{folder}: no {ADAPTER_CONFIG}: not a PEFT adapter folder")
    if not (folder / ADAPTER_FILE).is_file():
        raise FormatError(f"{folder}: no {ADAPTER_FILE}; pickled adapters are not read, save it as safetensors")
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text())
    except ValueError as error:
        raise FormatError(f"{folder / ADAPTER_CONFIG}: not JSON ({error})") from error
    if not isinstance(config, dict):
        raise FormatError(f"{folder / ADAPTER_CONFIG}: not a JSON object")
    _check_config(folder, config)
    halves: dict[str, dict[str, TensorEntry]] = {}
    faults = []
    for entry in read_shard(folder / ADAPTER_FILE).tensors:
        name = entry.name.removeprefix(_PREFIX)
        found = re.fullmatch(r"(.+)\.lora_(A|B)(?:\.default)?\.weight", name)
        reason = next((why for part, why in _REFUSED_TENSORS if part in name), None)
        if reason or found is None:
            faults.append(f"{entry.name}: {reason or 'not a LoRA factor (modules_to_save holds full new values)'}")
        elif len(entry.shape) != 2 or not entry.is_float:
            faults.append(f"{entry.name}: {entry.dtype} of shape {entry.shape}, expected a matrix of floats")
        else:
            halves.setdefault(found[1], {})[found[2]] = entry
    if faults:
        raise FormatError(join_faults(f"{folder}: tensors that cannot be merged exactly:", faults))
    modules = {}
    for module, pair in halves.items():
        if set(pair) != {"A", "B"}:
            faults.append(f"{module}: only lora_{''.join(pair)} is there")
            continue
        rank = pair["A"].shape[0]
        wanted = _pattern_value(config.get("rank_pattern") or {}, module, config.get("r", rank))
        if rank != pair["B"].shape[1] or rank != wanted:
            faults.append(f"{module}: A is {pair['A'].shape}, B is {pair['B'].shape}, the config says rank {wanted}")
            continue
        lora_alpha = _pattern_value(config.get("alpha_pattern") or {}, module, config.get("lora_alpha", rank))
        scale = lora_alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        modules[module] = LowRank(pair["A"], pair["B"], scale, bool(config.get("fan_in_fan_out")))
    if faults:
        raise FormatError(join_faults(f"{folder}: factors that do not belong together:", faults))
    return Adapter(folder, config, modules)


def match_names(adapter: Adapter, target: Mapping[str, TensorEntry]) -> dict[str, LowRank]:
    """The adapter's factors by the target's tensor names.

    A module `m` is the tensor `m.weight`; where a checkpoint leaves out the wrapper's name (GPT-2 files hold
    `h.0…` for the module `transformer.h.0…`), the name without its first part. Weights stored as (in, out) are
    known by their shape. Square ones follow the others, for PEFT goes by the kind of each layer and saves what held
    for the last one; the config decides where all are square.

    Raises MismatchError with the first ten modules that have no tensor in the target, or one of another shape.
    """
    matched, faults = {}, []
    square: list[tuple[str, str]] = []
    transposed: set[bool] = set()
    for module, factors in adapter.modules.items():
        names = (f"{module}.weight", f"{module.partition('.')[2]}.weight")
        name = next((n for n in names if n in target), None)
        if name is None:
            faults.append(f"{module}: the target has no tensor '{names[0]}'")
            continue
        turned = replace(factors, transposed=not factors.transposed)
        shape = target[name].shape
        if shape not in (factors.shape, turned.shape):
            faults.append(f"{module}: the delta is {factors.shape}, the target's tensor is {shape}")
            continue
        matched[name] = factors if shape == factors.shape else turned
        if factors.shape == turned.shape:
            square.append((module, name))
        else:
            transposed.add(matched[name].transposed)
    if len(transposed) > 1:
        faults += [f"{module}: square, among both (in, out) and (out, in) weights: ambiguous" for module, _ in square]
    elif transposed:
        matched |= {name: replace(matched[name], transposed=True in transposed) for _, name in square}
    if faults:
        hint = "is it an adapter for another model?"
        raise MismatchError(join_faults(f"{adapter.folder}: does not fit the target ({hint})", faults))
    if not matched:
        raise MismatchError(f"{adapter.folder}: holds no LoRA factors at all, so it would change nothing")
    return matched


def load_factor(handle: int, entry: TensorEntry) -> np.ndarray:
    """A factor in fp32, (rows, columns). Raises FormatError when it holds NaN or infinities."""
    values = read_rows(handle, entry, 0, entry.shape[0]).astype(np.float32)
    if not np.isfinite(values).all():
        raise FormatError(f"{entry.file}: '{entry.name}' holds NaN or infinite values; train the vector again")
    return values
