"""The model that is tuned: loaded for its mode, checked and saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msa_lite.errors import UsageError
from msa_lite.io.adapter import ADAPTER_CONFIG
from msa_lite.io.added_rows import cut_adapter, extend, without_added_rows
from msa_lite.io.checkpoint import load_checkpoint
from msa_lite.io.files import write_json
from msa_lite.io.hub import Source
from msa_lite.io.loading import load_whole
from msa_lite.io.manifest import discarded
from msa_lite.io.precision import NumberFormat, choose_precision, dtype_of, nf4, note_precision
from msa_lite.io.quiet import without_bars
from msa_lite.io.vocabulary import AddedRows

if TYPE_CHECKING:
    from msa_lite.train.settings import FitSettings


def load_trainable(folder: Path, settings: FitSettings, added: AddedRows | None = None) -> Any:
    """Load the prior, ready to train in the mode of `settings`; seed the random numbers that initialise adapters.

    Weights go straight to the device. Trained weights are in fp32, and so is all of a fit in fp32. Otherwise frozen
    matrices are held in 16 bits or, for qlora, in 4; products would round them anyway. Norms and biases keep the values
    that are stored, in fp32 for qlora. added: embedding rows for tokens of the target that the prior lacks.
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
    model = note_precision(load_whole(folder, device_map={"": device}, **kwargs), precision)
    model.config.use_cache = False
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
    return with_adapter(model, settings, precision)


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
        own = [*module.parameters(recurse=False)]
        if own and all(parameter.dim() == 1 for parameter in own):
            module.register_forward_hook(_like_inputs)


def _like_inputs(module: Any, inputs: tuple[Any, ...], states: Any) -> Any:
    """Return a norm's outputs in the dtype of its inputs."""
    return states.to(inputs[0].dtype) if inputs and hasattr(states, "to") else states


def with_adapter(model: Any, settings: FitSettings, precision: NumberFormat, name: str = "default") -> Any:
    """Put a fresh adapter on the model, in fp32, beside those that are on it already.

    Raise UsageError for targets that the model lacks.
    """
    from peft import LoraConfig, PeftModel, get_peft_model

    targets = settings.lora_targets
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
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
