"""Load models with transformers and PEFT: whole, from safetensors, without code of the model's own.

No other module loads models.

Where a file lacks weights, transformers fills in random numbers; where an adapter's names fit nothing, PEFT leaves the
model bare. Both only warn. Here both are errors. Headers and config are checked before a weight is read.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from msa_lite.errors import FormatError, MismatchError, clip, join_faults
from msa_lite.io.console.libraries import require, without_bars
from msa_lite.io.files.reading import read_object
from msa_lite.io.models.guards import explained, foreign_fields, pattern_fault, too_large, without_reports
from msa_lite.io.weights.adapter import ADAPTER_CONFIG, ADAPTER_FILE, PLAIN_STARTS, adapter_names
from msa_lite.io.weights.blocks import Files, read_rows
from msa_lite.io.weights.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, load_checkpoint, read_shard, tell_folder
from msa_lite.io.weights.matching import check_names
from msa_lite.io.weights.quantised import dequantised, packed_weights
from msa_lite.io.weights.quantised_forms import Packed

_SAFE = {"use_safetensors": True, "trust_remote_code": False}
_CONSTANTS = (".masked_bias", ".rotary_emb.inv_freq")  # in older checkpoints, though they follow from the config
_MASKS = (".attn.bias", ".attention.bias")
_GENERATION = "generation_config.json"
_LARGEST = 1 << 28  # bytes of a tokenizer's file; those of 250,000 tokens take about 35 MB


def open_config(folder: Path, checkpoint: Checkpoint | None = None) -> Any:
    """Return the config of a causal language model as transformers has it. checkpoint: the folder's, if it is open.

    Of a vision-language model it is that of the text model, where transformers has a class for this part alone.

    Raise FormatError for a config that transformers cannot read, of a kind that it does not know, that is no causal
    language model, that needs code of the model's own, or whose sizes do not fit the weights.
    """
    from transformers import AutoConfig, GenerationConfig

    checkpoint = checkpoint or load_checkpoint(folder)
    widest = max((size for entry in checkpoint.tensors.values() for size in entry.shape), default=0)
    faults = [*foreign_fields(checkpoint.config), *too_large(checkpoint.config, len(checkpoint.tensors), widest)]
    if (folder / SINGLE_FILE).exists() and any(shard.path.name != SINGLE_FILE for shard in checkpoint.shards):
        faults.append(f"{INDEX_FILE}: names other files, but there is {SINGLE_FILE}, which transformers would take")
    if (folder / ADAPTER_CONFIG).exists():
        faults.append(f"{ADAPTER_CONFIG}: transformers would put that adapter on the model")
    if faults:
        raise FormatError(join_faults(f"{folder}: config.json and weights cannot be loaded safely:", faults))
    with explained(folder, "its config"):
        if checkpoint.shards:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            if "quantization_config" not in checkpoint.config and hasattr(config, "quantization_config"):
                del config.quantization_config
        else:  # headers alone, of a model on the Hub
            config = AutoConfig.for_model(**checkpoint.config)
        if (kind := _model_class(config)) is None:
            raise FormatError(f"{folder}: its config.json is of a '{config.model_type}', no causal language model")
        if kind.config_class is not type(config) and kind.config_class is config.sub_configs.get("text_config"):
            config = config.get_text_config()
    if (folder / _GENERATION).exists():
        values = read_object(folder / _GENERATION)
        with explained(folder, _GENERATION), suppress(TypeError):  # then transformers takes its own defaults
            GenerationConfig.from_dict(values)
        _check_ends(folder / _GENERATION, values.get("eos_token_id"))
    _check_ends(folder / "config.json", getattr(config, "eos_token_id", None))
    return config


def _model_class(config: Any) -> Any:
    """Return the class of a model that says text by a config: a causal language model, or one that also sees; or None.

    transformers knows the second kind under another head than the first.
    """
    from transformers.models.auto import modeling_auto as auto

    return auto.MODEL_FOR_CAUSAL_LM_MAPPING.get(
        type(config), auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    )


def check_model(folder: Path) -> Any:
    """Check by headers and config that a checkpoint loads whole; return the model without its weights.

    This takes at most a second, whatever the model's size. Return None for a model that is stored quantised and that
    transformers loads itself (`_readable`), which only loading can check. Raise FormatError as `open_config` and
    `load_checkpoint` do, MismatchError with the names of tensors that are missing, left over or of another shape.
    """
    import torch

    checkpoint = _readable(load_checkpoint(folder))
    check_names(checkpoint)
    config = open_config(folder, checkpoint)
    if getattr(config, "quantization_config", None) is not None:
        _check_quantised(checkpoint)
        return None
    _check_floats(checkpoint)
    kinds = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    weights = {
        name: torch.empty(entry.shape, dtype=kinds.get(entry.dtype, torch.uint8), device="meta")
        for name, entry in checkpoint.tensors.items()
    }
    with explained(folder, "a model of its config"), without_reports():
        model, report = _model_class(config).from_pretrained(
            None,
            config=config,
            state_dict=weights,
            device_map={"": "meta"},
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    _check_whole(folder, report)
    return model


def empty_model(checkpoint: Checkpoint) -> Any:
    """Return the model of a checkpoint's config without weights: its modules, and the shapes of its parameters.

    Raise FormatError as `open_config`, and UsageError where torch and transformers are not installed.
    """
    require("train", f"{checkpoint.folder}: where its files hold stacked experts is told by transformers")
    import torch

    config = open_config(checkpoint.folder, checkpoint)
    with explained(checkpoint.folder, "a model of its config"), without_reports(), torch.device("meta"):
        return _model_class(config)._from_config(config)


def _check_floats(checkpoint: Checkpoint) -> None:
    """Raise FormatError for weights that are no floats, in a model whose config does not call it quantised.

    transformers would take the codes for weights. Masks of attention, in some older checkpoints, may be bytes.
    """
    faults = [
        f"{name}: stored as {entry.dtype}"
        for name, entry in checkpoint.tensors.items()
        if not entry.is_float and name.endswith((".weight", ".bias")) and not name.endswith(_MASKS)
    ]
    if faults:
        raise FormatError(join_faults(f"{checkpoint.folder}: weights that are no floats:", faults))


def _check_quantised(checkpoint: Checkpoint) -> None:
    """Raise FormatError where transformers would load a quantised model as something else.

    With a method that it does not know, it takes the stored codes for weights and ignores their scales.
    """
    from transformers.quantizers.auto import AutoHfQuantizer

    settings = checkpoint.config.get("quantization_config")
    with explained(checkpoint.folder, "its quantization_config"):
        is_known = isinstance(settings, dict) and AutoHfQuantizer.supports_quant_method(settings)
    if not isinstance(settings, dict) or not is_known:
        method = str(settings.get("quant_method") if isinstance(settings, dict) else settings)[:80]
        raise FormatError(
            f"{checkpoint.folder}: quantization_config: this transformers does not know '{method}' and would take the "
            "stored codes for weights; update it, or give the unquantised model"
        )
    by_method = settings.get("quant_method") == "bitsandbytes"
    in_bits = by_method or settings.get("load_in_4bit") or settings.get("load_in_8bit")
    if in_bits and not any(entry.dtype in ("U8", "I8") for entry in checkpoint.tensors.values()):
        raise FormatError(
            f"{checkpoint.folder}: quantization_config: says bitsandbytes, but the weights are plain; take it out of "
            "config.json"
        )


def load_whole(folder: Path, **how: Any) -> Any:
    """Load a causal language model with all of its weights. how: dtype, device and the like, for transformers.

    Raise as `check_model`, before a weight is read.
    """
    from transformers import GenerationConfig

    folder = Path(folder)
    is_plain = check_loads(folder, folder) is not None
    checkpoint = _readable(load_checkpoint(folder))
    config = open_config(folder, checkpoint)
    how |= {"state_dict": _read_weights(checkpoint)} if packed_weights(checkpoint) else {}
    with explained(folder, "its weights"), without_bars():
        place = None if "state_dict" in how else folder
        model, report = _model_class(config).from_pretrained(
            place, config=config, output_loading_info=True, **_SAFE, **how
        )
        if place is None and model.can_generate() and (folder / _GENERATION).exists():
            model.generation_config = GenerationConfig.from_pretrained(folder)
    # A quantised file has constants beside its weights, by names that the model itself does not have.
    _check_whole(folder, report if is_plain else {**report, "unexpected_keys": ()})
    return model


def _check_ends(path: Path, ends: Any) -> None:
    """Raise FormatError where the tokens that end answers are no numbers of tokens. ends: as a config has them."""
    if any(type(end) is not int for end in (ends if isinstance(ends, list) else [ends]) if end is not None):
        raise FormatError(f"{path}: eos_token_id: expected numbers of tokens, got {clip(repr(ends), 80)}")


def _readable(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose codes are read as weights on a CPU. On a GPU transformers computes with the codes.

    On a CPU it knows few of the forms, and bitsandbytes some sizes of matrices alone.
    """
    import torch

    return checkpoint if torch.cuda.is_available() else dequantised(checkpoint)


def _read_weights(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return all weights of a checkpoint by name, codes as the fp32 weights that they stand for."""
    import torch
    from safetensors import safe_open

    files, weights = Files(), dict[str, Any]()
    for name, entry in checkpoint.tensors.items():
        if isinstance(entry, Packed):
            rows = read_rows(files, entry, 0, entry.matrix_shape[0])
            weights[name] = torch.from_numpy(rows).reshape(entry.shape)
        else:
            with safe_open(entry.file, "pt") as stream:
                weights[name] = stream.get_tensor(entry.name)
    return weights


def check_loads(folder: Path, base: Path) -> int | None:
    """Check by headers and configs that a model loads whole: a checkpoint, or a PEFT adapter on `base`.

    folder: the same as `base` for a checkpoint. Return the rows of its embedding, or None where nothing tells them.
    Raise as `check_model` and `attach_adapter`, FormatError for a folder that is a checkpoint and an adapter at once.
    """
    files = [*base.glob("*.safetensors"), *base.glob("*.json"), folder / ADAPTER_CONFIG, folder / ADAPTER_FILE]
    states = [(path, path.stat()) for path in sorted(files) if path.exists()]
    return _check_loads(folder, base, tuple((path, s.st_size, s.st_mtime_ns) for path, s in states))


@functools.lru_cache(maxsize=64)  # a run asks for its few models many times
def _check_loads(folder: Path, base: Path, state: tuple[tuple[Path, int, int], ...]) -> int | None:
    """Check a model. state: that of its files, so that a change is noticed."""
    if folder != base and any((folder / name).exists() for name in (SINGLE_FILE, INDEX_FILE)):
        raise FormatError(f"{folder}: holds a checkpoint and an adapter; which one is meant? Move one elsewhere")
    model = check_model(base)
    if model is None:
        return None
    rows = int(model.get_input_embeddings().weight.shape[0])
    if folder != base and read_object(folder / ADAPTER_CONFIG).get("init_lora_weights") in (None, *PLAIN_STARTS):
        attach_adapter(model, folder)
    return rows


def attach_adapter(model: Any, folder: Path) -> Any:
    """Put a PEFT adapter on a model; return the model.

    Raise FormatError for a broken, pickled or unreadable adapter, MismatchError with the names that do not fit.
    """
    import torch
    from peft import PeftConfig, PeftModel
    from peft.auto import MODEL_TYPE_TO_PEFT_MODEL_MAPPING as KINDS
    from peft.utils import get_peft_model_state_dict

    folder = Path(folder)
    keys = _check_adapter(folder, model)
    # On a model without weights, factors take no memory either, whatever rank the config says.
    is_bare = model.device.type == "meta"
    how = {"low_cpu_mem_usage": True} if is_bare else {}
    where = torch.device("meta") if is_bare else nullcontext()
    with explained(folder, "this adapter"), without_reports(), where:
        config = PeftConfig.from_pretrained(str(folder))
        config.inference_mode = True
        names = getattr(model, "_checkpoint_conversion_mapping", {})
        model = KINDS.get(config.task_type, PeftModel)(model, config, **how)
        report = model.load_adapter(str(folder), "default", key_mapping=names, **how)
        saved = get_peft_model_state_dict(model, save_embedding_layers=False)
    # PEFT reports only its own factors, so copies of modules and token rows are compared here.
    copies = {key for key in saved if "modules_to_save" in key or "token_adapter" in key}
    missing = {*report.missing_keys, *(copies - keys)}
    _check_whole(folder, {"missing_keys": missing, "unexpected_keys": report.unexpected_keys})
    return model


def read_tokenizer(folder: Path, name: str, to_count: bool = False) -> Any:
    """Load a folder's tokenizer and try it on a word. name: the model's, for messages.

    to_count: without torch where tokenizer.json is there, for a plan, which only counts tokens. A class of its family
    may still make other tokens than that file says. Raise FormatError where it cannot be loaded, or makes no ids.
    """
    import transformers

    by_file = to_count and (folder / "tokenizer.json").exists()
    kind = transformers.PreTrainedTokenizerFast if by_file else transformers.AutoTokenizer
    for file in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        if (folder / file).exists():
            read_object(folder / file)
    for file in ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model"):
        if (folder / file).exists() and (folder / file).stat().st_size > _LARGEST:
            raise FormatError(f"{folder / file}: has more than {_LARGEST} bytes, which is no tokenizer")
    try:
        tokenizer = kind.from_pretrained(folder, trust_remote_code=False)
        ids = tokenizer("a word")["input_ids"]
        if not ids or not all(type(number) is int and number >= 0 for number in ids):
            raise ValueError(f"it turns 'a word' into {ids}")
    except BaseException as error:  # its parsers raise anything; those in Rust raise what is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise FormatError(f"{name}: its tokenizer cannot be loaded ({reason[:500]})") from error
    return tokenizer


def _check_adapter(folder: Path, model: Any) -> set[str]:
    """Return the names in an adapter's file. Raise FormatError for a pickled one, and for endless patterns."""
    if not (folder / ADAPTER_FILE).is_file():
        raise FormatError(f"{folder}: no {ADAPTER_FILE}: {tell_folder(folder)}")
    config = read_object(folder / ADAPTER_CONFIG)
    patterns = [text for text in map(config.get, ("target_modules", "exclude_modules")) if isinstance(text, str)]
    for key in ("rank_pattern", "alpha_pattern"):
        patterns += config[key] if isinstance(config.get(key), dict) else ()
    called = config.get("alora_invocation_tokens") or []  # a wrong one only shows once the model is used
    if not isinstance(called, list) or any(type(token) is not int or not 0 <= token < 1 << 31 for token in called):
        raise FormatError(f"{folder / ADAPTER_CONFIG}: alora_invocation_tokens: expected a list of token ids")
    layers = config.get("layers_pattern")
    patterns += [text for text in (layers if isinstance(layers, list) else [layers]) if isinstance(text, str)]
    names = [name for name, _ in model.named_modules()]
    if fault := pattern_fault(patterns, names):
        raise FormatError(f"{folder / ADAPTER_CONFIG}: {fault}")
    keys = {entry.name for entry in read_shard(folder / ADAPTER_FILE).tensors}
    if named := adapter_names(keys):
        raise FormatError(
            f"{folder / ADAPTER_FILE}: PEFT loads no keys with the adapter's name in them (lora_A.{named[0]}.weight); "
            "take it out of them"
        )
    return keys


def _check_whole(folder: Path, report: Mapping[str, Any]) -> None:
    """Raise MismatchError unless every weight was found and every tensor used. report: the library's, on loading."""
    faults = [f"{name}: missing" for name in sorted(report["missing_keys"])]
    unused = sorted(name for name in report["unexpected_keys"] if not name.endswith(_CONSTANTS))
    faults += [f"{name}: not a tensor of this model" for name in unused]
    for name, stored, configured in sorted(report.get("mismatched_keys", ())):
        faults.append(f"{name}: {tuple(stored)}, the config says {tuple(configured)}")
    if faults:
        raise MismatchError(
            join_faults(f"{folder}: config and weights do not fit, so another model would be scored or tuned:", faults)
        )
