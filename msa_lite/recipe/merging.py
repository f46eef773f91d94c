"""Define the part of a recipe about the merge: the form and the dtype of the result, and what is told about it."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field, model_validator

from msa_lite.recipe.inputs import Closed


class Merge(Closed):
    """The merge of target and vectors into the unlearned model."""

    model_config = ConfigDict(serialize_by_alias=True)

    dtype: Literal["same", "bfloat16", "float16", "float32"] = "same"
    """The stored dtype. same: the target's, file by file."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """The rounding to the stored dtype. stochastic: unbiased, for updates that are small beside the weights."""
    form: Literal["model", "adapter"] = Field("model", alias="as")
    """model: a whole checkpoint. adapter: one adapter on the target, in fp32."""
    forecast: list[Literal["nf4", "int4", "int8"]] | None = None
    """The forms of quantisation to forecast: how much of the update is left after rounding, and the share of weights
    whose code differs from the target's. null: nf4, for a whole checkpoint. []: none."""

    @property
    def forms(self) -> tuple[str, ...]:
        """Return the forms of quantisation to forecast."""
        default = ("nf4",) if self.form == "model" else ()
        return default if self.forecast is None else tuple(self.forecast)

    @model_validator(mode="after")
    def _adapters_are_fp32(self) -> Merge:
        if self.form == "adapter" and (self.dtype, self.rounding) != ("same", "nearest"):
            raise ValueError("an adapter is always fp32; leave out dtype and rounding")
        if self.form == "adapter" and self.forecast:
            raise ValueError("an adapter is written without the weights that it is added to; leave out forecast")
        return self
