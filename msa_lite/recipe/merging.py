"""The parts of a recipe about the result: the form and dtype of the merge, and the repository that it is sent to."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from msa_lite.closed import Closed
from msa_lite.recipe.training import Rate

FilterForm = Annotated[
    Annotated[Literal["auto", "off"], Tag("word")] | Annotated[Rate, Tag("number")],
    Discriminator(lambda value: "word" if value in ("auto", "off") else "number"),
    BeforeValidator(lambda value: "off" if value is False else value),  # as YAML reads off
]
"""auto, off or λ > 0. A fault is reported for the form that the user wrote."""


class Merge(Closed):
    """The merge of target and vectors into the unlearned model."""

    model_config = ConfigDict(serialize_by_alias=True)

    dtype: Literal["same", "bfloat16", "float16", "float32"] = "same"
    """The stored dtype. same: the target's, file by file."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """The rounding to the stored dtype. stochastic: unbiased, for updates that are small beside the weights."""
    # SmolLM2, three histories: the distance to the ideal fell from 0.17 to 0.07, with the hold to 0.05.
    filter: FilterForm = "auto"
    """The filter of the forget vector, which protects rows to keep; not in the paper. A number: its strength λ. auto: λ
    is chosen with α; off if α is given. Without retain rows it uses holdout rows; without these, auto is off. off: the
    vector as it was fitted. For a baseline that trains, a number filters the change of the chosen epoch; auto is
    off."""
    form: Literal["model", "adapter"] = Field("model", alias="as")
    """model: a whole checkpoint. adapter: one adapter on the target, in fp32."""

    @model_validator(mode="after")
    def _adapters_are_fp32(self) -> Merge:
        if self.form == "adapter" and (self.dtype, self.rounding) != ("same", "nearest"):
            raise ValueError("an adapter is always fp32; leave out dtype and rounding")
        return self


class Publish(Closed):
    """The repository on the Hugging Face Hub that gets the model or adapter at the end of the run.

    No key here changes a result.
    """

    repo: str | None = None
    """ACCOUNT/NAME, or NAME for the account of the token. null: nothing is sent. A model with a FAIL is not sent
    either, unless you accept it (`--accept`, or `verdict: off`)."""
    private: bool = True
    """true: only its owner sees it. false: everybody does."""
    license: str | None = None
    """The licence's identifier, such as apache-2.0, if the target's card names none."""

    @model_validator(mode="after")
    def _needs_a_repository(self) -> Publish:
        if self.repo is None and self != Publish.model_construct():
            raise ValueError("settings without a repo to send to; give publish.repo, or leave publish out")
        return self
