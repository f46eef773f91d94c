"""The settings of a fit."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class FitSettings:
    """How a prior is tuned. Defaults follow the paper's TOFU runs (App. "Obtaining Forget and Retain Vectors").

    batch_size: rows of one optimiser step; micro_batch_size: rows of one forward pass, a divisor of it, or "auto".
    epochs: those of an open-ended fit at most. warmup_epochs: length of the linear warm-up, in the place of which
    warmup_steps may say it in steps; afterwards the rate falls linearly to 0, or is constant, as `schedule` says.
    Gradients are clipped to norm 1; the optimiser is AdamW. lora_targets: "all-linear" or names of modules.
    """

    mode: Literal["lora", "qlora", "full"] = "lora"
    lora_rank: int = 32
    lora_alpha: float = 64
    lora_dropout: float = 0.0
    lora_targets: str | tuple[str, ...] = "all-linear"
    epochs: int = 5
    learning_rate: float = 2e-4
    weight_decay: float = 0.01
    warmup_epochs: float = 1.0
    batch_size: int = 32
    micro_batch_size: int | Literal["auto"] = "auto"
    schedule: Literal["linear", "constant"] = "linear"
    seed: int = 0
    warmup_steps: int | None = None

    def count_warmup(self, steps_per_epoch: int) -> int:
        """Return the steps of the warm-up."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return math.floor(self.warmup_epochs * steps_per_epoch)

    def describe(self) -> dict[str, Any]:
        """What a manifest records: all that decides the result."""
        said = {k: v for k, v in asdict(self).items() if self.mode != "full" or not k.startswith("lora_")}
        if self.schedule == "linear":  # what was made before there was a choice stays known
            del said["schedule"]
        del said["warmup_epochs" if self.warmup_steps is not None else "warmup_steps"]
        return said
