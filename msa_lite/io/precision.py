"""Choose the number formats of models: bf16 autocast where the device has it, and 4-bit NF4."""

from __future__ import annotations

from typing import Any


def has_bf16() -> bool:
    """Check whether the device computes in bf16."""
    import torch

    return torch.cuda.is_available() and torch.cuda.is_bf16_supported()


def autocast(model: Any) -> Any:
    """Return the context of forward passes that the Trainer does not run: bf16 where the device has it."""
    import torch

    return torch.autocast(model.device.type, torch.bfloat16, enabled=has_bf16())


def nf4() -> Any:
    """Return the settings of 4-bit models: NF4 with double quantisation (Dettmers et al., 2023)."""
    import torch
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if has_bf16() else torch.float32,
    )
