"""How a recipe says that models are tuned; and the recipe of a training in stages, as closed as that of a run."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationInfo, field_validator, model_validator

from msa_lite.recipe.history import Count
from msa_lite.recipe.inputs import Closed, Columns, Data, OneOrMore, Prompt, PromptOrKind

MOST = 1_000_000  # rows of a batch, epochs, tokens of a row: beyond, a number is a slip
SEEDS = 2**32  # of numpy


def no_truth(value: object) -> object:
    """Return the value unless it is true or false, which Python has for numbers."""
    if isinstance(value, bool):
        raise ValueError("a number is wanted")
    return value


Rate = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(no_truth)]
Positive = Annotated[int, Field(ge=1, le=MOST), BeforeValidator(no_truth)]
"""A whole number from 1 on."""
Epochs = Annotated[float, Field(ge=0, le=MOST, allow_inf_nan=False), BeforeValidator(no_truth)]
"""A length in epochs, perhaps of none or of a part of one."""


class Tuning(Closed):
    """The settings of any tuning, apart from its length and rate."""

    weight_decay: float = Field(0.01, ge=0, allow_inf_nan=False)
    """AdamW's weight decay."""
    micro_batch_size: Positive | Literal["auto"] = "auto"
    """Rows of one forward pass, a divisor of batch_size; auto: as many as fit."""
    max_length: int = Field(512, ge=8, le=MOST)
    """Longest row in tokens; longer ones are cut (qa) or split (text)."""


def check_micro_batch(micro: int | Literal["auto"], batch: int | Literal["auto"]) -> None:
    """Raise ValueError for a micro-batch of which no whole number makes the batch, where both are given."""
    if micro != "auto" and batch != "auto" and batch % micro:
        raise ValueError(f"micro_batch_size {micro} does not divide batch_size {batch}")


class Training(Tuning):
    """How all weights are trained. Defaults are those of the paper's TOFU models."""

    epochs: Positive = 5
    """Passes over the rows."""
    learning_rate: Rate = 1e-5
    """Highest learning rate, which the warm-up leads to."""
    warmup_epochs: Epochs = 1.0
    """Length of the linear warm-up, in epochs."""
    batch_size: Positive = 32
    """Effective batch: rows of one optimiser step."""
    schedule: Literal["linear", "constant"] = "linear"
    """linear: after the warm-up the rate falls to 0; constant: it stays."""

    @model_validator(mode="after")
    def _divides(self) -> Training:
        check_micro_batch(self.micro_batch_size, self.batch_size)
        return self


class Stage(Training):
    """A stage of training. What it does not say is as `training` has it."""

    name: str | None = Field(None, pattern=r"^\w[\w.-]*$", max_length=200)
    """Its folder is NUMBER-NAME; default: after the data."""
    data: OneOrMore[Data]
    """Rows to learn; a list of data sets is learnt together."""
    tokens: Annotated[Count, Field(ge=1)] | None = None
    """So many tokens, such as 20M, from the beginning of the data (format text), which is read no further; default: all
    of it. Epochs are passes over them."""

    @property
    def sets(self) -> list[Data]:
        """The data sets, be it one or several."""
        return self.data if isinstance(self.data, list) else [self.data]

    @property
    def title(self) -> str:
        """The name, or one made from the data's."""
        last = PurePosixPath(self.sets[0].path).name
        return self.name or re.sub(r"[^\w.-]+", "-", last.partition(".")[0].lower())[:200].strip("-.") or "stage"

    @model_validator(mode="after")
    def _counts_tokens_of_one_text(self) -> Stage:
        if self.tokens is not None and [data.format for data in self.sets] != ["text"]:
            raise ValueError("tokens: counted are those of one data set of format text; questions are learnt whole")
        return self


class NewTokenizer(Closed):
    """A byte-level BPE tokenizer that is trained on the rows of the first stage."""

    vocabulary: int = Field(ge=300, le=MOST)
    """Its size at most; of a few rows, it comes to less."""


class NewModel(Closed):
    """A model of random weights, to start from nothing."""

    config: dict[str, Any]
    """What transformers' config of the model holds: model_type (llama, gpt2, …) and, of the rest, what shall not be as
    usual. vocab_size and the numbers of special tokens come from the tokenizer."""
    tokenizer: Annotated[
        Annotated[str, Tag("name")] | Annotated[NewTokenizer, Tag("new")],
        Discriminator(lambda value: "name" if isinstance(value, str) else "new"),
    ]
    """A folder or repo[@revision] that has one, or {vocabulary: 2048} for one that is trained here."""

    @field_validator("config")
    @classmethod
    def _has_a_type(cls, value: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(value.get("model_type"), str):
            raise ValueError("model_type is missing, as in {model_type: llama, …}")
        return value


class TrainingRecipe(Closed):
    """Training in stages: makes targets, ideals and the checkpoints before them (`msa-lite train`)."""

    model: Annotated[
        Annotated[str, Tag("name")] | Annotated[NewModel, Tag("new")],
        Discriminator(lambda value: "name" if isinstance(value, str) else "new"),
    ]
    """Where training starts: a folder, repo[@revision], or {config, tokenizer} for a model from nothing."""
    training: Training = Training()
    """What holds for all stages that say nothing else."""
    stages: list[Stage] = Field(min_length=1, max_length=1000)
    """What is learnt, one after the other. Every stage has an optimiser and a schedule of its own."""
    columns: Columns = Columns()
    """The columns of all data sets that name none of their own."""
    prompt: PromptOrKind = Prompt()
    """The prompt of rows of format qa; not auto, since no model knows the rows yet."""
    keep: Literal["each", "last"] = "each"
    """each: the models of all stages; last: that of the last alone, the others go when the next one is there."""
    output: str
    """Folder of the models."""
    seed: int = Field(0, ge=0, lt=SEEDS - 1000)
    """Seed of every random choice: this one of the start model and of stage 1, one more of each stage after it, since
    equally many rows are shuffled alike by one seed."""

    @field_validator("stages", mode="before")
    @classmethod
    def _fill(cls, stages: object, info: ValidationInfo) -> object:
        if not isinstance(stages, list) or "training" not in info.data:
            return stages
        defaults = info.data["training"].model_dump()
        return [defaults | stage if isinstance(stage, dict) else stage for stage in stages]

    @field_validator("prompt")
    @classmethod
    def _has_a_form(cls, value: Prompt) -> Prompt:
        if value.kind == "auto":
            raise ValueError("auto: only in a run, whose target knows the rows; choose default, chat or plain")
        return value
