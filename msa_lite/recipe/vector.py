"""Define the settings of the fits of vectors as closed schemas."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from msa_lite.recipe.inputs import Closed
from msa_lite.recipe.training import Epochs, Positive, Rate, Tuning, check_micro_batch


class Lora(Closed):
    """The shape of an adapter."""

    rank: int = Field(32, ge=1, le=65536)
    """The rank r of the factors."""
    alpha: float = Field(64, gt=0, allow_inf_nan=False)
    """lora_alpha. The delta is scaled by lora_alpha / r."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """The dropout before the factors during a fit."""
    targets: str | list[str] = "all-linear"
    """The modules that get an adapter: all-linear, or a list of names."""


class VectorSpec(Tuning):
    """The fit of a vector: how the prior is tuned."""

    epochs: Positive | Literal["auto"] = "auto"
    """Passes over the rows. auto: as many as the prior needs to know them as well as the target does."""
    learning_rate: Rate | Literal["auto"] = "auto"
    """The highest learning rate. After the warm-up it falls linearly to 0; with epochs auto it stays. auto: a rate by
    mode, model size and lora.alpha. With epochs auto, other rates are tried if that one learns too little."""
    batch_size: Positive | Literal["auto"] = "auto"
    """The rows of one optimiser step. auto: 4 to 32, by the number of rows."""
    warmup_epochs: Epochs | Literal["auto"] = "auto"
    """The length of the linear warm-up, in epochs. auto: one epoch; with epochs auto, a few steps."""
    # full came nearer to the ideal in three histories of three (examples/real_model). lora fits one consumer GPU.
    mode: Literal["lora", "qlora", "full"] = "lora"
    """lora: an adapter. qlora: an adapter on a 4-bit prior. full: all weights, in fp32."""
    lora: Lora = Lora()
    """The shape of the adapter, for lora and qlora."""
    optimizer: Literal["auto", "adamw", "adamw_8bit"] = "auto"
    """adamw_8bit: states of 8 bits, by bitsandbytes, for a quarter of the memory. auto: adamw_8bit for qlora on a GPU,
    else adamw."""

    @model_validator(mode="after")
    def _divides(self) -> VectorSpec:
        check_micro_batch(self.micro_batch_size, self.batch_size)
        return self


class RetainVector(Closed):
    """The fit of the retain vector, where it differs from that of the forget vector. Other keys are those of `vector`.

    The MSA paper tunes on MUSE's forget set for 5 epochs, on its retain set for 3 (App. "Experiments on MUSE-Books").
    """

    epochs: Positive | Literal["auto"] | None = None
    """Passes over the retain rows, or auto. Default: vector.epochs."""
    learning_rate: Rate | Literal["auto"] | None = None
    """The highest learning rate, or auto. Default: vector.learning_rate."""
    weight_decay: float | None = Field(None, ge=0, allow_inf_nan=False)
    """The weight decay of AdamW. Default: vector.weight_decay."""
    batch_size: Positive | Literal["auto"] | None = None
    """The rows of one optimiser step, or auto; vector.micro_batch_size is then a bound. Default: vector.batch_size."""
    warmup_epochs: Epochs | Literal["auto"] | None = None
    """The length of the linear warm-up, in epochs, or auto. Default: vector.warmup_epochs."""

    @model_validator(mode="before")
    @classmethod
    def _shares_the_rest(cls, value: Any) -> Any:
        shared = [key for key in VectorSpec.model_fields if key not in cls.model_fields]
        if isinstance(value, dict) and (own := [key for key in shared if key in value]):
            keys = ", ".join(f"vector.{key}" for key in own)
            raise ValueError(f"{', '.join(own)}: both vectors share this; set {keys} for both")
        return value
