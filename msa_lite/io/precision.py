"""Choose the number formats of models: bf16 or fp16 autocast where the device has it, and 4-bit NF4."""

from __future__ import annotations

from typing import Any, Literal

from msa_lite.errors import UsageError

Compute = Literal["auto", "bf16", "fp32"]
"""The values of a recipe's key. auto: the best of a GPU, exact fp32 on a CPU."""
NumberFormat = Literal["bf16", "fp16", "fp32"]
"""The format of matrix products. Sums, norms and trained weights are in fp32."""

_NOTE = "msa_precision"  # of a model: the precision of its fit


def has_bf16() -> bool:
    """Check whether there is a GPU that computes in bf16. Older ones only emulate it, slower than fp32."""
    import torch

    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def choose_precision(compute: Compute = "auto") -> NumberFormat:
    """Return the precision on this device. Raise UsageError for bf16 on a device that has none."""
    import torch

    if compute == "fp32":
        return "fp32"
    if has_bf16():
        return "bf16"
    if torch.cuda.is_available():
        if compute == "bf16":
            name = torch.cuda.get_device_name()
            raise UsageError(f"compute: {name} has no bf16; leave the key out, and fp16 is taken")
        return "fp16"
    if compute == "auto":
        return "fp32"
    if not _cpu_has_bf16():
        raise UsageError("compute: bf16 on a CPU needs AMX or AVX512-BF16, which this one lacks; leave it out")
    return "bf16"


def has_precision(compute: Compute) -> bool:
    """Check whether this device computes in it."""
    try:
        choose_precision(compute)
    except UsageError:
        return False
    return True


def _cpu_has_bf16() -> bool:
    """Check whether the CPU has instructions for bf16; without them it would be slower than fp32."""
    import torch

    return any(present for name, present in torch.cpu.get_capabilities().items() if name.endswith("bf16"))


def dtype_of(precision: NumberFormat) -> Any:
    """Return torch's dtype."""
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]


def note_precision(model: Any, precision: NumberFormat) -> Any:
    """Note on a model the precision that `autocast` takes for it; return the model."""
    setattr(model, _NOTE, precision)
    return model


def autocast(model: Any) -> Any:
    """Return the context of forward passes that the Trainer does not run, in the model's noted precision.

    Without a note that is the device's best.
    """
    import torch

    precision = getattr(model, _NOTE, None) or choose_precision()
    enabled = precision != "fp32"
    return torch.autocast(model.device.type, dtype_of(precision) if enabled else torch.bfloat16, enabled=enabled)


def nf4(precision: NumberFormat | None = None) -> Any:
    """Return the settings of 4-bit models: NF4 with double quantisation (Dettmers et al., 2023).

    precision: of matrix products; by default the device's best.
    """
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype_of(precision or choose_precision()),
    )
