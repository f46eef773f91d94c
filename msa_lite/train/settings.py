"""The settings of a fit, those that follow from rows, model and mode, and what a caller may add to it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from msa_lite.io.models.heads import Compute, choose_precision


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

    @property
    def scheduler(self) -> str:
        """Return transformers' name of the schedule."""
        return {"linear": "linear", "constant": "constant_with_warmup"}[self.schedule]

    def steps_per_epoch(self, rows: int) -> int:
        """Return the optimiser steps of an epoch."""
        return math.ceil(rows / self.batch_size)

    def count_warmup(self, steps_per_epoch: int) -> int:
        """Return the steps of the warm-up."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return math.floor(self.warmup_epochs * steps_per_epoch)

    def describe(self) -> dict[str, Any]:
        """Return what a manifest records: all that decides the result."""
        values = {k: v for k, v in asdict(self).items() if self.mode != "full" or not k.startswith("lora_")}
        values = {k: v for k, v in values.items() if k not in ("optimizer", "compute") or v != "auto"}
        del values["warmup_epochs" if self.warmup_steps is not None else "warmup_steps"]
        return values


LEAST_BATCH, MOST_BATCH = 4, 32
_STEPS = 5  # of an epoch that a batch should leave at least

WARMUP_STEPS = 4  # of an open-ended fit
TRIES = 3  # of an open-ended fit whose rate is chosen here
EPOCHS = 5  # of a fit that is not open-ended: a baseline's

_MOST_PASSES, _LEAST_PASSES = 60, 5
_MOST_STEPS = 600
_ONE_PASS = 200  # steps of a retain vector; more of them only where a single pass takes more


def auto_batch(rows: int) -> int:
    """Return the rows of one step: the largest power of two from 4 to 32 that leaves five steps an epoch, or 4."""
    return next((size for size in (32, 16, 8) if math.ceil(rows / size) >= _STEPS), LEAST_BATCH)


def most_epochs(rows: int, batch: int, retain: bool = False) -> int:
    """Return the most epochs of an open-ended fit.

    That is 60, or as many as 600 steps make, but at least 5. For a retain set it is as many as 200 steps make, but at
    least 1: in a large retain set, seeing each row once is enough.
    """
    steps = math.ceil(rows / batch)
    if retain:
        return max(1, min(_MOST_PASSES, _ONE_PASS // steps))
    return max(_LEAST_PASSES, min(_MOST_PASSES, _MOST_STEPS // steps))


def auto_rate(mode: Literal["lora", "qlora", "full"], weights: int, lora_alpha: float = 64) -> float:
    """Return the learning rate for a model with this many weights, to two digits.

    1e-4 · (1.8M / weights)^¼ in full mode; for adapters ten times that, times 64 / lora_alpha.
    """
    rate = 1e-4 * (1.8e6 / weights) ** 0.25 * (1 if mode == "full" else 10 * 64 / lora_alpha)
    return float(f"{rate:.1e}")


class KeptEpochs(NamedTuple):
    """The decision after an epoch."""

    epochs: frozenset[int]
    """Epochs whose weights to keep so far, counted from 1."""
    go_on: bool = True
    """False to end the training."""


class AfterEpoch(Protocol):
    """Choose after each epoch which epochs' weights to keep, and whether to train on."""

    def describe(self) -> Any:
        """Return what the manifest records, JSON-able. Two that decide alike return the same."""

    def __call__(self, model: Any, epoch: int, scores: Path) -> KeptEpochs:
        """Decide from the model after this many epochs, in eval mode. scores: a folder for files, kept in the vector's.

        The weights of the epochs that are kept, and of this one, lie in folders beside it (`epoch_folder`).
        After a stop it is called again for the last epoch, with the folder as it was left and perhaps another model.
        Then it must decide from the files.
        """
