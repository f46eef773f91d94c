"""Define the part of a recipe about attacks: which of them, on how many rows, with which settings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, field_validator

from msa_lite.attack_names import ATTACKS
from msa_lite.errors import nearest
from msa_lite.recipe.inputs import Closed, Data
from msa_lite.recipe.scores import JudgeKeys


def _check_attack(value: object) -> object:
    if not isinstance(value, str) or value not in ATTACKS:
        raise ValueError(f"no attack of this name{nearest(str(value), ATTACKS)}; choose from {', '.join(ATTACKS)}")
    return value


AttackName = Annotated[str, BeforeValidator(_check_attack), WithJsonSchema({"enum": [*ATTACKS], "type": "string"})]


class SampleKeys(Closed):
    """The attack that draws many answers at random."""

    samples: int | None = Field(None, ge=1, le=100_000)
    """Answers to each question. Default: 200 on a GPU, as published, and 16 on a CPU."""


class PromptKeys(Closed):
    """The attack by other prompts."""

    rewordings: list[Data] = []
    """Other wordings of the forget rows' questions, in other languages perhaps: one row for each forget row, in the
    same order."""
    judge: JudgeKeys = JudgeKeys()
    """A model that rewords each question in three ways. It gets the questions, and not the answers."""

    @field_validator("judge")
    @classmethod
    def _rewords(cls, judge: JudgeKeys) -> JudgeKeys:
        if judge.separate:
            raise ValueError("separate is for scores; leave it out here")
        return judge


class QuantiseKeys(Closed):
    """The attack that rounds the weights."""

    forms: list[Literal["nf4", "int8", "int4"]] = Field(["nf4", "int8", "int4"], min_length=1)
    """The forms of quantisation."""


class RelearnKeys(Closed):
    """The attack that trains the model a little."""

    branches: list[Literal["forget", "part", "retain", "unrelated"]] = []
    """The rows to train on: forget: all forget rows; part: half of them, and the other half is scored; retain: rows to
    keep; unrelated: short texts of msa-lite. Default: all that the run's rows allow."""
    strengths: list[Literal["matched", "published"]] = Field(["matched", "published"], min_length=1)
    """matched: 48 steps at a rate that fits the size of the model. published: the settings of the publications, which
    change next to nothing in a small model."""


class AttackKeys(Closed):
    """The attacks on the unlearned model, and on target and ideal beside it."""

    attacks: list[AttackName] = []
    """The attacks that a run ends with, none by default; `msa-lite attack` makes these, or all where none are named."""
    rows: int | None = Field(None, ge=1, lt=2**63)
    """Attack at most this many forget rows, a seeded sample. Default: 40 on a CPU, 400 on a GPU."""
    sample: SampleKeys = SampleKeys()
    """Draw many answers at random."""
    prompt: PromptKeys = PromptKeys()
    """Ask in other ways."""
    quantise: QuantiseKeys = QuantiseKeys()
    """Round the weights."""
    relearn: RelearnKeys = RelearnKeys()
    """Train the model a little."""

    @field_validator("attacks")
    @classmethod
    def _once(cls, names: list[str]) -> list[str]:
        if len(set(names)) != len(names):
            raise ValueError("an attack stands twice in the list")
        return names

    def settings(self, name: str) -> dict[str, Any]:
        """Return the settings of an attack that are not its defaults; without data, which belongs to the rows."""
        keys = {"sample": self.sample, "quantise": self.quantise, "relearn": self.relearn}.get(name)
        values = keys.model_dump(exclude_none=True) if keys else {}
        return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
