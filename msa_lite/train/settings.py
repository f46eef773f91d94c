"""The settings of a fit."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from msa_lite.io.precision import Compute, choose_precision


@dataclass(frozen=True)
class FitSettings:
    """The hyper-parameters. Defaults follow the paper's TOFU runs (App. "Obtaining Forget and Retain Vectors").

    The optimiser is AdamW. Gradients are clipped to norm 1.
    """

    mode: Literal["lora", "qlora", "full"] = "lora"
    lora_rank: int = 32
    lora_alpha: float = 64
    lora_dropout: float = 0.0
    lora_targets: str | tuple[str, ...] = "all-linear"
    """Names of modules, or all linear layers."""
    epochs: int = 5
    """The most epochs, in an open-ended fit."""
    learning_rate: float = 2e-4
    weight_decay: float = 0.01
    warmup_epochs: float = 1.0
    """Length of the linear warm-up."""
    batch_size: int = 32
    """Rows of one optimiser step."""
    micro_batch_size: int | Literal["auto"] = "auto"
    """Rows of one forward pass, a divisor of batch_size."""
    schedule: Literal["linear", "constant"] = "linear"
    """The rate after the warm-up: it falls linearly to 0, or is constant."""
    seed: int = 0
    warmup_steps: int | None = None
    """Length of the warm-up in steps, in place of warmup_epochs."""
    optimizer: Literal["auto", "adamw", "adamw_8bit"] = "auto"
    """adamw_8bit: AdamW of bitsandbytes with 8-bit states, 2 bytes a weight, not 8; on a GPU they are paged, so that
    they give way to the host's memory. auto: adamw_8bit for qlora on a GPU, else adamw."""
    compute: Compute = "auto"
    """The precision of matrix products. auto: the best of a GPU (bf16, or fp16 with loss scaling), fp32 on a CPU."""

    @property
    def has_8bit_states(self) -> bool:
        """Check whether the optimiser's states have 8 bits on this device."""
        import torch

        return self.optimizer == "adamw_8bit" or (
            self.optimizer == "auto" and self.mode == "qlora" and torch.cuda.is_available()
        )

    def trainer_options(self) -> dict[str, Any]:
        """Return the Trainer's options that depend on the device."""
        import torch

        precision, cuda = choose_precision(self.compute), torch.cuda.is_available()
        options: dict[str, Any] = {"bf16": precision == "bf16", "fp16": precision == "fp16"}
        if precision == "bf16" and not cuda:
            options["use_cpu"] = True
        if self.has_8bit_states:
            options["optim"] = "paged_adamw_8bit" if cuda else "adamw_bnb_8bit"
        return options

    def count_warmup(self, steps_per_epoch: int) -> int:
        """Return the steps of the warm-up."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return math.floor(self.warmup_epochs * steps_per_epoch)

    def describe(self) -> dict[str, Any]:
        """Return what a manifest records: all that decides the result."""
        values = {k: v for k, v in asdict(self).items() if self.mode != "full" or not k.startswith("lora_")}
        if self.schedule == "linear":  # the manifests of older runs have no such key
            del values["schedule"]
        values = {k: v for k, v in values.items() if k not in ("optimizer", "compute") or v != "auto"}
        del values["warmup_epochs" if self.warmup_steps is not None else "warmup_steps"]
        return values
