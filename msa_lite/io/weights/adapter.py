"""Read PEFT LoRA adapter folders with numpy alone; PEFT itself is only needed to train.

Every tensor of the adapter file and every field of its config is used, or known to have no effect on the weights, or
refused by name.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msa_lite.errors import FormatError, UsageError, join_faults
from msa_lite.io.files.addresses import AddressError, model_name
from msa_lite.io.files.reading import read_object
from msa_lite.io.weights.blocks import holds_rows
from msa_lite.io.weights.checkpoint import CONFIG_LIMIT, TensorEntry, read_shard, tell_folder
from msa_lite.io.weights.factors import LowRank
from msa_lite.io.weights.patterns import Patterns, endings

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"

# Fields that decide the delta, and fields without any effect on it. Any other field that is set is refused by name: it
# may change what the factors mean.
_READ = {
    "alpha_pattern", "bias", "fan_in_fan_out", "init_lora_weights", "lora_alpha", "lora_bias", "modules_to_save",
    "peft_type", "r", "rank_pattern", "target_parameters", "trainable_token_indices", "use_dora", "use_rslora",
}  # fmt: skip
_NO_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode",
    "layers_pattern", "layers_to_transform", "lora_dropout", "lora_ga_config", "loftq_config", "megatron_core",
    "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
}  # fmt: skip
_REASONS = {
    "layer_replication": "replicated layers",
}
# The meanings of the keys of an adapter file, tried in this order, without the adapter's name.
_KEYS = {
    "factor": r"(.+)\.lora_([AB])\.weight",
    "embedding": r"(.+)\.lora_embedding_([AB])",
    "shift": r"(.+)\.lora_B\.bias",
    "magnitude": r"(.+)\.lora_magnitude_vector(?:\.weight)?",
    "tokens": r"(.+)\.token_adapter\.trainable_tokens_delta",
    "copy": r"(.+)\.(?:(?:token_adapter\.)?base_layer|original_module)(\.(?:weight|bias))",
    "value": r"(.+?)(?:\.base_layer|\.modules_to_save)?(\.(?:weight|bias))",
}
# Older versions of PEFT, and whoever saves a state dict, leave the adapter's name in the keys: lora_A.default.weight.
_NAMED = re.compile(r"\.lora_(?:[AB]\.([^.]+)\.(?:weight|bias)|embedding_[AB]\.([^.]+))$")
_BEFORE_NAME = r"(\.(?:lora_(?:embedding_)?[AB]|lora_magnitude_vector|trainable_tokens_delta|modules_to_save))"
_OTHER_NAMES = {
    r"\.lora_[ab]$": "MLX has such names; docs/how-to/merge-only.md makes a PEFT adapter of it",
    r"lora(_|\.)(down|up)|lora_(unet|te)": "adapters of image models have such names",
    r"\.(hada_|lokr_|oft_|boft_|ia3_|vera_)": "it is of another method than LoRA",
}
WRAPPERS = {
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "checkpointed activations",
    "_forward_module": "Lightning Fabric",
    "_module": "Opacus",
    "module": "DDP",
}
"""The parts of a module's path that wrappers add, and the wrappers."""
_WRAPPED = rf"(?:(?:{'|'.join(WRAPPERS)})\.)*"
_PREFIX = re.compile(rf"^(?:{_WRAPPED}base_model\.{_WRAPPED}model\.)+")  # twice, where PEFT wrapped its own model
PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva", "mica")
"""The values of init_lora_weights that leave the model as it is; other starts change its weights."""
_INNER = ".base_layer"  # of a module that PEFT wraps once more for another of its parameters
_CONVERTIBLE = ("pissa", "olora", "corda", "lora_ga", "loftq")  # starts whose trained adapter PEFT can make a plain one
ZERO_3 = (
    "DeepSpeed's ZeRO-3 leaves such files where the weights were saved without gathering them. Save again with "
    "zero3_save_16bit_model (stage3_gather_16bit_weights_on_model_save), or make whole weights of the training's "
    "checkpoint with its zero_to_fp32.py"
)
"""The commonest cause of empty tensors, and what to do."""
_REPO = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_DEFAULTS = {"r": 8, "lora_alpha": 8}  # what PEFT takes where its config does not say


@dataclass(frozen=True)
class Adapter:
    """A PEFT LoRA folder."""

    folder: Path
    config: dict[str, Any]
    modules: dict[str, LowRank]
    """Low-rank factors by module."""
    values: dict[str, TensorEntry] = field(default_factory=dict)
    """Full new values (modules_to_save, biases) by tensor name."""
    shifts: dict[str, tuple[TensorEntry, float]] = field(default_factory=dict)
    """Deltas of biases with their scale."""
    tokens: dict[str, tuple[TensorEntry, tuple[int, ...]]] = field(default_factory=dict)
    """New rows of an embedding with the numbers of these rows."""
    copies: dict[str, TensorEntry] = field(default_factory=dict)
    """Tensors of the prior that PEFT saved along; they hold no change."""
    bare: dict[str, Mapping[str, TensorEntry]] = field(default_factory=dict)
    """The factors A and B on bare parameters (target_parameters), such as those of stacked experts, by module. Which
    parameter is meant, and how many experts it holds, only the model tells (`spread_experts`)."""
    stacks: dict[str, tuple[LowRank, ...]] = field(default_factory=dict)
    """The factors of each slice of a tensor of stacked experts, by tensor name."""


def load_adapter(folder: Path) -> Adapter:
    """Open an adapter folder by its config and header.

    Raise UsageError when it is no adapter folder; FormatError when it is of a kind that is not handled, when a
    tensor is not accounted for, or when a rank contradicts the config.
    """
    folder = Path(folder)
    config = _load_adapter_config(folder)
    return read_factors(folder, config, read_shard(folder / ADAPTER_FILE).tensors)


def read_factors(folder: Path, config: dict[str, Any], entries: Iterable[TensorEntry]) -> Adapter:
    """Return the adapter of a config and the tensors of its file. folder: for messages. Raise as `load_adapter`."""
    tensors = _sort_tensors(folder, entries, trains_biases=config.get("bias", "none") != "none")
    patterns = Patterns(config.get("rank_pattern")), Patterns(config.get("alpha_pattern"))
    modules: dict[str, LowRank] = {}
    bare = _bare(config, patterns[0], tensors["factor"])
    faults = []
    for kind in ("factor", "embedding"):
        for module, pair in tensors[kind].items():
            if module in bare:
                continue
            low = _low_rank(config, patterns, module, pair, kind == "embedding", tensors["magnitude"].get(module))
            if isinstance(low, str):
                faults.append(f"{module}: {low}")
            elif bool(config.get("lora_bias")) != (module in tensors["shift"]):
                there = "there" if module in tensors["shift"] else "not there"
                faults.append(f"{module}: lora_bias is {bool(config.get('lora_bias'))}, but lora_B.bias is {there}")
            else:
                modules[module] = low
    factors = {**tensors["factor"], **tensors["embedding"]}
    for kind in ("magnitude", "shift"):
        faults += [f"{module}: a {kind} without factors" for module in tensors[kind] if module not in factors]
    tokens, wrong = _token_rows(config, tensors["tokens"])
    if faults or wrong:
        raise FormatError(join_faults(f"{folder}: tensors that do not belong together:", [*faults, *wrong]))
    shifts = {f"{m}.bias": (entry, modules[m].scale) for m, entry in tensors["shift"].items()}
    return Adapter(folder, config, modules, tensors["value"], shifts, tokens, tensors["copy"], bare)


def is_adapter(folder: Path) -> bool:
    """Check whether a folder is a PEFT adapter; any other folder is taken for a full checkpoint."""
    return os.path.lexists(Path(folder) / ADAPTER_CONFIG)


def is_bare_adapter(folder: Path) -> bool:
    """Check whether a folder holds an adapter, and no weights of a checkpoint beside it; axolotl leaves its config."""
    return is_adapter(folder) and not any(Path(folder).glob("model*.safetensors*"))


def base_name(folder: Path) -> str:
    """Return the model that an adapter was tuned from, as a folder or `repo[@revision]`.

    A relative path is looked for in the adapter's folder, then in the working folder. Raise UsageError where the
    config names no model, or a folder that is not there.
    """
    path = Path(folder) / ADAPTER_CONFIG
    config = read_object(path, CONFIG_LIMIT)
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(name, str) or not name:
        if not (folder / ADAPTER_FILE).exists():
            raise FormatError(f"{folder}: no {ADAPTER_FILE}: {tell_folder(folder)}")
        raise UsageError(
            f"{path}: names no base model; set base_model_name_or_path to the folder or Hub id it was tuned from"
        )
    here = os.path.realpath(folder)
    for place in (Path(folder) / name, Path(os.path.expanduser(name))):
        if os.path.isdir(place) and os.path.realpath(place) != here:
            return str(place)
    with suppress(AddressError):  # another place, which the next lines name with the adapter
        name = model_name(name)
    if not _REPO.fullmatch(name):
        raise UsageError(
            f"{folder}: is a LoRA adapter on {name}, which is not here; set base_model_name_or_path in its "
            f"{ADAPTER_CONFIG} to where that model is now"
        )
    return name + (f"@{revision}" if revision and isinstance(revision, str) else "")


def _sort_tensors(folder: Path, tensors: Iterable[TensorEntry], trains_biases: bool) -> dict[str, dict[str, Any]]:
    """Return the entries of an adapter file by kind and name. Raise FormatError unless each has its own meaning."""
    entries: dict[str, dict[str, Any]] = {kind: {} for kind in _KEYS}
    meanings: dict[tuple[str, ...], TensorEntry] = {}
    faults, empty, tensors = [], [], list(tensors)
    names = adapter_names(entry.name for entry in tensors)
    if len(names) > 1:
        raise FormatError(
            f"{folder}: holds several adapters, {', '.join(names)}; save one of them with PEFT: "
            f"model.save_pretrained(FOLDER, selected_adapters=['{names[0]}'])"
        )
    named = re.compile(rf"{_BEFORE_NAME}\.(?:{'|'.join(map(re.escape, ['default', *names]))})(?=\.|$)")
    for entry in tensors:
        name = named.sub(r"\1", _PREFIX.sub("", entry.name))
        kind, match = next(((k, m) for k, p in _KEYS.items() if (m := re.fullmatch(p, name))), ("", None))
        if match is None or (kind == "value" and "lora_" in name):
            reason = next((f" ({why})" for pattern, why in _OTHER_NAMES.items() if re.search(pattern, name)), "")
            faults.append(f"{entry.name}: not a tensor of a LoRA adapter that msa-lite knows{reason}")
            continue
        if kind == "copy" and match[2] == ".bias" and trains_biases:
            kind = "value"
        meaning = ("factor" if kind == "embedding" else kind, *match.groups())
        if (twin := meanings.setdefault(meaning, entry)) is not entry:
            if kind != "value" or twin.shape != entry.shape or not holds_rows(twin, entry, entry.matrix_shape[0]):
                faults.append(f"{entry.name}: stands for the same as {twin.name}")  # PEFT saves some values twice
        elif entry.shape == (0,):
            empty.append(entry.name)
        elif not entry.is_float:
            faults.append(f"{entry.name}: {entry.dtype}, expected floats")
        elif kind in ("factor", "embedding"):
            entries[kind].setdefault(match[1], {})[match[2]] = entry
        else:
            entries[kind]["".join(match.groups())] = entry
    if empty:
        raise FormatError(join_faults(f"{folder}: {len(empty)} of its tensors are empty. {ZERO_3}:", [*empty, *faults]))
    if faults:
        raise FormatError(join_faults(f"{folder}: tensors that cannot be merged exactly:", faults))
    return entries


def adapter_names(keys: Iterable[str]) -> list[str]:
    """Return the names of adapters in the keys of a file; PEFT itself saves none."""
    return sorted({match[1] or match[2] for key in keys if (match := _NAMED.search(key))})


def deciding_fields(folder: Path) -> dict[str, Any]:
    """Return the fields of an adapter's config that decide its delta. Raise FormatError for a file that is no config.

    Others, such as the path of its base, may differ between copies.
    """
    config = _DEFAULTS | read_object(folder / ADAPTER_CONFIG, CONFIG_LIMIT)
    return {key: value for key, value in config.items() if key in _READ and value}


def _load_adapter_config(folder: Path) -> dict[str, Any]:
    """Read an adapter's config. Raise as `load_adapter`."""
    if not os.path.lexists(folder / ADAPTER_CONFIG):
        raise UsageError(f"{folder}: no {ADAPTER_CONFIG}: not a PEFT adapter folder")
    if not os.path.lexists(folder / ADAPTER_FILE):
        raise FormatError(f"{folder}: no {ADAPTER_FILE}: {tell_folder(folder)}")
    config = _DEFAULTS | read_object(folder / ADAPTER_CONFIG, CONFIG_LIMIT)
    faults = list(_value_faults(config))
    if config.get("peft_type") != "LORA":
        faults.append(f"peft_type: {config.get('peft_type')!r}, only 'LORA' is read")
    if config.get("bias", "none") not in ("none", "all", "lora_only"):
        faults.append(f"bias: {config['bias']!r}, expected none, all or lora_only")
    if fault := _start_fault(config.get("init_lora_weights", True)):
        faults.append(fault)
    faults += [
        f"{key}: {value!r}, {_REASONS.get(key, 'not known to msa-lite, it may change what the factors mean')}"
        for key, value in config.items()
        if key not in _READ | _NO_EFFECT and value not in (None, False, [], {}, "")
    ]
    if faults:
        raise FormatError(join_faults(f"{folder}: this adapter cannot be merged exactly:", faults))
    return config


def _start_fault(start: Any) -> str | None:
    """Return why an adapter that started so is no change of its base, and what to do; None for a plain start."""
    kind = start.lower() if isinstance(start, str) else start
    if kind in PLAIN_STARTS:
        return None
    fault = f"init_lora_weights: {start!r} changes the model it starts from"
    if isinstance(kind, str) and kind.startswith(_CONVERTIBLE):
        return (
            f"{fault}, so its factors are no change of that model. Let PEFT make a plain adapter of it: save the "
            "adapter before training, by save_pretrained('./start'), and after it by save_pretrained(…, "
            "path_initial_model_for_weight_conversion='./start')"
        )
    return fault


def _value_faults(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the faults in the values of fields that decide the delta.

    null stands for an unset field; not for r and lora_alpha, where PEFT cannot load it either.
    """
    for key in ("fan_in_fan_out", "lora_bias", "use_dora", "use_rslora"):
        if not isinstance(config.get(key), bool | None):
            yield f"{key}: {config[key]!r}, expected true or false"
    for key, patterns, kinds, least, expected in (
        ("r", "rank_pattern", (int,), 1, "a positive whole number"),
        ("lora_alpha", "alpha_pattern", (int, float), -sys.float_info.max, "a finite number"),
    ):
        values = {} if config.get(patterns) is None else config[patterns]
        if not isinstance(values, dict):
            yield f"{patterns}: {values!r}, expected an object with {expected} for each name"
            values = {}
        for name, number in [
            (key, config[key]),
            *((f"{patterns}: {pattern!r}", n) for pattern, n in values.items()),
        ]:
            if type(number) not in kinds or not least <= number <= sys.float_info.max:
                yield f"{name}: {number!r}{' (a string)' if isinstance(number, str) else ''}, expected {expected}"
        yield from (f"{patterns}: {fault}" for fault in Patterns(values).faults)
    names = config.get("target_parameters")
    if not (names is None or (isinstance(names, list) and all(isinstance(name, str) for name in names))):
        yield f"target_parameters: {names!r}, expected a list of names"
    tokens = config.get("trainable_token_indices")
    lists = tokens.values() if isinstance(tokens, dict) else [[] if tokens is None else tokens]
    if not all(isinstance(numbers, list) and all(type(n) is int for n in numbers) for numbers in lists):
        yield f"trainable_token_indices: {tokens!r}, expected a list of whole numbers, or an object of such lists"


def unwrapped(name: str) -> str:
    """Return a module's or tensor's name as the bare model has it, without the parts of compile, DDP or FSDP."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _bare(config: Mapping[str, Any], ranks: Patterns, factors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the factors on bare parameters, by module.

    A module of which PEFT adapts several parameters is wrapped several times; the factors of several experts have
    another rank than the config's; and a parameter may be named with its module, as gate.weight.
    """
    names = [str(name) for name in config.get("target_parameters") or []]
    if not names:
        return {}
    wrapped = {name for name, depth in map(inner_depth, factors) if depth}
    owners = {name.rpartition(".")[0] for name in names} - {""}

    def is_bare(module: str, pair: Mapping[str, TensorEntry]) -> bool:
        return (
            inner_depth(module)[0] in wrapped
            or any(end in owners for end in endings(module))
            or pair["A"].shape[:1] != (ranks.first((module, unwrapped(module)), config["r"]),)
        )

    return {module: pair for module, pair in factors.items() if set(pair) == {"A", "B"} and is_bare(module, pair)}


def inner_depth(module: str) -> tuple[str, int]:
    """Return the name of a module that PEFT wraps several times, and how many other wrappers are around this one."""
    name = module.removesuffix(_INNER)
    if name == module:
        return name, 0
    name, depth = inner_depth(name)
    return name, depth + 1


def _low_rank(
    config: dict[str, Any],
    patterns: tuple[Patterns, Patterns],
    module: str,
    pair: dict[str, TensorEntry],
    is_embedding: bool,
    magnitude: TensorEntry | None,
) -> LowRank | str:
    """Return the factors of a module, or their fault. patterns: of ranks, and of alphas."""
    if set(pair) != {"A", "B"}:
        return f"only lora_{''.join(pair)} is there"
    a, b = pair["A"], pair["B"]
    if len(a.shape) != 2 or len(b.shape) != 2 or not a.shape[0]:
        return f"A is {a.shape}, B is {b.shape}, expected matrices of rank ≥ 1"
    rank = a.shape[0]
    names = (module, unwrapped(module))  # as it stands in the file, and in the bare model
    configured = patterns[0].first(names, config["r"])
    if rank != b.shape[1] or rank != configured:
        return f"A is {a.shape}, B is {b.shape}, the config says rank {configured}"
    if bool(config.get("use_dora")) != (magnitude is not None):
        return f"use_dora is {bool(config.get('use_dora'))}, but a magnitude is {'' if magnitude else 'not '}there"
    if magnitude is not None and (is_embedding or magnitude.shape != (b.shape[0],)):
        return f"a magnitude of shape {magnitude.shape}" + (" on an embedding is not handled" if is_embedding else "")
    lora_alpha = patterns[1].first(names, config["lora_alpha"])
    scale = lora_alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    # PEFT keeps an embedding's A as (r, vocabulary), so its delta is always the transposed product.
    return LowRank(module, a, b, scale, is_embedding or bool(config.get("fan_in_fan_out")), is_embedding, magnitude)


def _token_rows(config: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> tuple[dict[str, Any], list[str]]:
    """Return new embedding rows with their numbers, by tensor name, and the faults in them."""
    indices = config.get("trainable_token_indices") or {}
    order = {key: place for place, key in enumerate(indices)}  # the first that a module's name ends with counts
    rows, faults = {}, []
    for module, entry in entries.items():
        numbers = indices
        if isinstance(indices, dict):
            keys = sorted((key for key in endings(module) if key in order), key=order.__getitem__)
            numbers = indices[keys[0]] if keys else []
        if len(entry.shape) != 2 or entry.shape[0] != len(numbers):
            faults.append(f"{module}: {entry.shape} for {len(numbers)} trainable_token_indices")
        rows[f"{module}.weight"] = (entry, tuple(numbers))  # PEFT writes the rows in the order of the numbers
    return rows, faults
