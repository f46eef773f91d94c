"""The model that is tuned: loaded for its mode, checked, saved; or made from scratch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msa_lite.errors import StageError, UsageError, discarded
from msa_lite.io.console.libraries import without_bars
from msa_lite.io.files.writing import write_json
from msa_lite.io.models.guards import without_reports
from msa_lite.io.models.heads import NumberFormat, choose_precision, dtype_of, layers_path, nf4, note_precision
from msa_lite.io.models.loading import empty_model, load_whole
from msa_lite.io.models.streaming import Placement, check_ram, load_streamed, read_sizes, stream
from msa_lite.io.weights.adapter import ADAPTER_CONFIG, Adapter, read_factors
from msa_lite.io.weights.checkpoint import Checkpoint, TensorEntry, load_checkpoint
from msa_lite.io.weights.hub import Source
from msa_lite.io.weights.vocabulary import AddedRows, cut_adapter, extend, without_added_rows
from msa_lite.train.memory.adapted import speed_up

if TYPE_CHECKING:
    from msa_lite.train.settings import FitSettings


def load_trainable(
    folder: Path, settings: FitSettings, added: AddedRows | None = None, spill: Path | None = None
) -> Any:
    """Load the prior, ready to train in the mode of `settings`; seed the random numbers that initialise adapters.

    Weights go straight to the device. Trained weights are in fp32, and so is all of a fit in fp32. Otherwise frozen
    matrices are held in 16 bits or, for qlora, in 4; products would round them anyway. Norms and biases keep the values
    that are stored, in fp32 for qlora. added: embedding rows for tokens of the target that the prior lacks. spill: a
    folder for layers without room in RAM; it means that all frozen layers stream (`stream`), which a model that is
    stored quantised cannot. Raise StageError then, and as `check_ram`.
    """
    import torch
    from accelerate import PartialState
    from transformers import set_seed

    set_seed(settings.seed)
    precision = choose_precision(settings.compute)
    kwargs: dict[str, Any] = {"dtype": dtype_of("fp32" if settings.mode == "full" else precision)}
    if settings.mode == "qlora":
        kwargs["quantization_config"] = nf4(precision)
    device = PartialState().device if torch.cuda.is_available() else "cpu"
    if spill is None:
        model = load_whole(folder, device_map={"": device}, **kwargs)
    else:
        model = _load_waiting(folder, device, spill, **kwargs)
    note_precision(model, precision).config.use_cache = False
    if added:
        extend(model, added)
    if settings.mode == "full":
        return model
    model.requires_grad_(False)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # of 4-bit layers, whose layout for scoring cannot be trained
            module.support_avx512bf16_for_cpu = False
    if precision != "fp32" and (settings.mode == "qlora" or not _is_stored_in(folder, precision)):
        _widen_vectors(model, folder)
    if precision == "fp16":  # its range is too small for the sum of all layers
        model.get_input_embeddings().register_forward_hook(lambda module, inputs, states: states.float())
    model = speed_up(with_adapter(model, settings, precision))
    if spill is not None:
        stream_fit(model, device, spill)
    return model


def _load_waiting(folder: Path, device: Any, spill: Path, **kwargs: Any) -> Any:
    """Load a model whose layers are to stream: they are in the host's memory, all else on the device."""
    sizes = read_sizes(folder, kwargs["dtype"], "quantization_config" in kwargs)
    if sizes is None or not sizes.layers:
        raise StageError(
            f"{folder}: its layers cannot wait in RAM, since it is stored quantised or has no list of them"
        )
    waiting = sum(sizes.layers.values())
    check_ram(waiting, spill)
    placement = Placement(tuple(sizes.others), tuple(sizes.layers), len(sizes.layers), waiting)
    return load_streamed(folder, placement, device, **kwargs)


def stream_fit(model: Any, device: Any, folder: Path | None = None) -> None:
    """Let the frozen weights of all layers of a model, which is to be fitted, pass through a device.

    folder: see `stream`.
    """
    path = layers_path(model)
    names = [f"{path}.{number}" for number in range(len(model.get_submodule(path)))]
    stream(model, names, device, is_fit=True, folder=folder)


def _is_stored_in(folder: Path, precision: NumberFormat) -> bool:
    """Check whether a checkpoint's matrices are all stored in a precision."""
    dtype = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}[precision]
    entries = load_checkpoint(folder).tensors.values()
    return all(entry.dtype == dtype for entry in entries if entry.is_float and len(entry.shape) > 1)


def _widen_vectors(model: Any, folder: Path) -> None:
    """Hold norms and biases in fp32, with the values that are stored.

    A norm's outputs get the dtype of its inputs. In fp32 they would make all that follows fp32, 4-bit layers too.
    """
    import torch
    from safetensors import safe_open

    stored = load_checkpoint(folder).tensors
    for name, parameter in model.named_parameters():
        if parameter.dim() != 1 or not parameter.is_floating_point():
            continue
        value, entry = parameter.data, stored.get(name)
        if entry is not None and entry.shape == tuple(parameter.shape):
            with safe_open(entry.file, "pt") as file:
                value = file.get_tensor(name)
        parameter.data = value.to(parameter.device, torch.float32)
    for module in model.modules():
        parameters = [*module.parameters(recurse=False)]
        if parameters and all(parameter.dim() == 1 for parameter in parameters):
            module.register_forward_hook(_like_inputs)


def _like_inputs(module: Any, inputs: tuple[Any, ...], states: Any) -> Any:
    """Return a norm's outputs in the dtype of its inputs."""
    return states.to(inputs[0].dtype) if inputs and hasattr(states, "to") else states


_MAMBA = {"mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h"}  # `_check_lora_target_modules_mamba` of PEFT


def with_adapter(model: Any, settings: FitSettings, precision: NumberFormat, name: str = "default") -> Any:
    """Put a fresh adapter on the model, in fp32, beside those that are on it already.

    Of a vision-language model only the text model gets one: rows of text teach the rest nothing. Raise UsageError for
    targets that the model lacks.
    """
    from peft import LoraConfig, PeftModel, get_peft_model

    targets = settings.lora_targets
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        exclude_modules=_excluded(model, targets),
    )
    try:
        if isinstance(model, PeftModel):
            model.add_adapter(name, config)
        else:
            model = get_peft_model(model, config, adapter_name=name)
    except ValueError as error:
        raise discarded(UsageError(f"vector.lora.targets: {error}")) from error
    if precision != "fp32":  # autocast takes the inputs as they are; PEFT would keep a copy of each in fp32
        for module in model.modules():
            if hasattr(module, "cast_input_dtype_enabled"):
                module.cast_input_dtype_enabled = False
    return model


def _excluded(model: Any, targets: str | Sequence[str]) -> str | None:
    """Return a pattern of the modules that get no adapter, or None: what is not of the text model.

    Of Mamba's families, nor does out_proj with all-linear: PEFT refuses it, since their kernels read its weight.
    """
    if text := _text_path(model):
        return rf"(?!(.*\.)?{re.escape(text)}\.).*"
    is_mamba = getattr(model.config, "model_type", None) in _MAMBA
    return r".*\.out_proj" if is_mamba and str(targets).lower() == "all-linear" else None


def _text_path(model: Any) -> str:
    """Return the path of the text model inside a vision-language model; "" for a model of text alone."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if "text_config" not in getattr(inner.config, "sub_configs", {}):
        return ""
    decoder = inner.get_decoder()
    return next(name for name, module in inner.named_modules() if module is decoder)


def planned_adapter(prior: Checkpoint, settings: FitSettings) -> Adapter:
    """Return the adapter that a fit on a prior would write: its names and shapes, without a weight.

    Raise UsageError as `with_adapter`, and as `empty_model`.
    """
    from peft.utils import get_peft_model_state_dict

    with without_reports():
        model = with_adapter(empty_model(prior), settings, "fp32")
    config = model.peft_config["default"].to_dict()
    config |= {key: [*config[key]] for key in ("target_modules", "target_parameters") if isinstance(config[key], set)}
    place = Path("the adapter that this recipe fits")
    shapes = {
        name: tuple(value.shape)
        for name, value in get_peft_model_state_dict(model, save_embedding_layers=False).items()
    }
    entries = [TensorEntry(name, place, "F32", shape, 0, 4 * math.prod(shape)) for name, shape in shapes.items()]
    return read_factors(place, config, entries)


def copy_trained(model: Any) -> dict[str, Any]:
    """Copy the trained weights into the host's memory, by name."""
    return {name: p.detach().to("cpu", copy=True) for name, p in model.named_parameters() if p.requires_grad}


def restore_trained(model: Any, weights: dict[str, Any]) -> None:
    """Put the copies of `copy_trained` back."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in weights:
                parameter.copy_(weights[name])


def broken_weight(model: Any) -> str | None:
    """Return the name of a trained weight that holds NaN or infinity, if there is one."""
    import torch

    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    return next((name for name, p in trained if not torch.isfinite(p).all()), None)


def save_model(model: Any, source: Source, partial: Path, tokenizer: Any, settings: FitSettings) -> None:
    """Write the trained weights, as a checkpoint or as an adapter of the prior on disk."""
    cached, model.config.use_cache = model.config.use_cache, True  # training may go on, without a cache
    with without_bars():
        if settings.mode == "full":
            with without_added_rows(model, source.added) as options:
                model.save_pretrained(partial, **options)
        else:  # with added rows, PEFT would save the whole embedding along
            model.save_pretrained(partial, **({"save_embedding_layers": False} if source.added else {}))
    model.config.use_cache = cached
    if settings.mode == "full":
        tokenizer.save_pretrained(partial)
        return
    if source.added:
        cut_adapter(partial, source.added)
    (partial / "README.md").unlink(missing_ok=True)  # PEFT's empty model card
    config = json.loads((partial / ADAPTER_CONFIG).read_text("utf-8"))
    config["base_model_name_or_path"] = source.name.partition("@")[0]
    config["revision"] = None if source.revision.startswith("sha256:") else source.revision
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()  # PEFT writes a set, in an order that changes from run to run
    write_json(partial / ADAPTER_CONFIG, dict(sorted(config.items())))
