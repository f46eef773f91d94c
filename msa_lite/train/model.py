"""The model that is tuned: loaded for its mode, checked and saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msa_lite.errors import UsageError
from msa_lite.io.adapter import ADAPTER_CONFIG
from msa_lite.io.added_rows import cut_adapter, extend, without_added_rows
from msa_lite.io.files import write_json
from msa_lite.io.hub import Source
from msa_lite.io.loading import load_whole
from msa_lite.io.manifest import discarded
from msa_lite.io.precision import has_bf16, nf4
from msa_lite.io.quiet import without_bars
from msa_lite.io.vocabulary import AddedRows

if TYPE_CHECKING:
    from msa_lite.train.settings import FitSettings


def load_trainable(folder: Path, settings: FitSettings, added: AddedRows | None = None) -> Any:
    """Load the prior, ready to train in the mode of `settings`; seed the random numbers that initialise adapters.

    added: embedding rows for tokens of the target that the prior lacks.
    """
    import torch
    from transformers import set_seed

    set_seed(settings.seed)
    cuda = torch.cuda.is_available()
    kwargs: dict[str, Any] = {"dtype": torch.float32}
    if settings.mode == "lora" and has_bf16():
        kwargs["dtype"] = "auto"  # frozen weights lose nothing in the dtype they are stored in
    if settings.mode == "qlora":
        compute = torch.bfloat16 if has_bf16() else torch.float32
        kwargs |= {"dtype": compute, "device_map": {"": 0 if cuda else "cpu"}, "quantization_config": nf4()}
    model = load_whole(folder, **kwargs)
    model.config.use_cache = False
    if added:
        extend(model, added)
    if settings.mode == "full":
        return model
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    if settings.mode == "qlora":
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=cuda)
    targets = settings.lora_targets
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise discarded(UsageError(f"vector.lora.targets: {error}")) from error


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
