"""The recipe: what a user asks for, as a closed schema. Every fault is reported at once, before any work.

Nothing below the pipeline knows of this module: stages take plain values.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from msa_lite.benchmarks import BENCHMARKS, OWN
from msa_lite.recipe.history import History, choose_prior
from msa_lite.recipe.inputs import Closed, Columns, Data, OneOrMore, Prompt, PromptOrKind, RetainData
from msa_lite.recipe.scores import Evaluate, ProbeKeys, Select
from msa_lite.recipe.training import MOST, SEEDS, Epochs, Positive, Rate, Tuning, check_micro_batch, no_truth

MOST_PEOPLE = 400  # of the demo; it has names for no more


Strength = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(no_truth)]
AUTO: Literal["auto"] = "auto"
Strengths = Annotated[
    Annotated[Literal["auto"], Tag("auto")]
    | Annotated[Strength, Tag("one")]
    | Annotated[list[Strength], Field(min_length=1), Tag("many")],
    Discriminator(lambda value: AUTO if value == AUTO else "many" if isinstance(value, list) else "one"),
]
"""auto, a value or a list of such. What is wrong with it is said of the one that it is meant to be."""
V = TypeVar("V")


def _check_points(value: V) -> V:
    if isinstance(value, list) and len(set(value)) != len(value):
        raise ValueError("a value stands twice in the list")
    return value


class Forget(Closed):
    """The forget set and the strength α that its vector is subtracted with."""

    data: Data
    """The rows to forget."""
    alpha: Strengths = AUTO
    """α ≥ 0; auto: searched on validation rows, from 1/16 to 8; a list: all are tried there and the best is chosen."""

    _points = field_validator("alpha")(_check_points)


class Retain(Closed):
    """The retain set and the strength β that its vector is added with."""

    data: RetainData
    """Rows to keep."""
    beta: Strengths = AUTO
    """β ≥ 0; with 0 no retain vector is fitted and the rows are only scored. auto: 0, α/2 and α are tried where it
    matters; a list as for α."""

    _points = field_validator("beta")(_check_points)


class Lora(Closed):
    """Shape of the adapter."""

    rank: int = Field(32, ge=1, le=65536)
    """Rank r of the factors."""
    alpha: float = Field(64, gt=0, allow_inf_nan=False)
    """lora_alpha; the delta is scaled by lora_alpha / r."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout before the factors, while tuning."""
    targets: str | list[str] = "all-linear"
    """all-linear, or names of modules."""


class VectorSpec(Tuning):
    """How the prior is tuned to get a vector."""

    epochs: Positive | Literal["auto"] = "auto"
    """Passes over the rows; auto: until the prior knows them as well as the target does."""
    learning_rate: Rate | Literal["auto"] = "auto"
    """Highest learning rate; after the warm-up it falls linearly to 0, and with epochs auto it stays. auto: by mode,
    size of the model and lora.alpha, and with epochs auto others are tried where it does not do."""
    batch_size: Positive | Literal["auto"] = "auto"
    """Effective batch: rows of one optimiser step; auto: 4 to 32, by the number of rows."""
    warmup_epochs: Epochs | Literal["auto"] = "auto"
    """Length of the linear warm-up, in epochs; auto: one epoch, and with epochs auto a few steps."""
    mode: Literal["lora", "qlora", "full"] = "lora"
    """lora: an adapter; qlora: an adapter on a 4-bit prior; full: all weights, in fp32."""
    lora: Lora = Lora()
    """Shape of the adapter, for lora and qlora."""

    @model_validator(mode="after")
    def _divides(self) -> VectorSpec:
        check_micro_batch(self.micro_batch_size, self.batch_size)
        return self


class Merge(Closed):
    """How target and vectors become the unlearned model."""

    model_config = ConfigDict(serialize_by_alias=True)

    dtype: Literal["same", "bfloat16", "float16", "float32"] = "same"
    """Stored dtype; same: as the target has it, file by file."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """nearest, or stochastic: unbiased, for updates that are small beside the weights."""
    form: Literal["model", "adapter"] = Field("model", alias="as")
    """model: a whole checkpoint; adapter: one adapter on the target, in fp32."""

    @model_validator(mode="after")
    def _adapters_are_fp32(self) -> Merge:
        if self.form == "adapter" and (self.dtype, self.rounding) != ("same", "nearest"):
            raise ValueError("an adapter is always fp32; leave out dtype and rounding")
        return self


def _as_number(value: object) -> object:
    """YAML reads 1e-5 as a string; and true is no number, though Python has it for one."""
    if isinstance(value, bool):
        raise ValueError("a number or a word is wanted")
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _within_reason(value: float | str) -> float | str:
    if not isinstance(value, str) and not abs(value) <= 1e12:
        raise ValueError("a number within reason is wanted")
    return value


Parameter = Annotated[int | float | str, BeforeValidator(_as_number), AfterValidator(_within_reason)]


class Baseline(Closed):
    """How `msa-lite baseline METHOD` trains. What is not said here is as in `vector`, so that methods compare."""

    start: Literal["target", "prior"] = "target"
    """target: the method is run on the target; prior: on the prior, and the change is then added to the target."""
    scale: OneOrMore[Rate] = 1.0
    """With start prior: what the change is multiplied by; of a list, the best is chosen on validation rows."""
    epochs: int | None = Field(None, ge=1, le=MOST)
    """Passes over the forget rows, each of them a candidate on validation rows; default: vector.epochs, or 5 where that
    is auto."""
    learning_rate: Rate | None = None
    """Of the methods that have none of their own below; default: vector.learning_rate."""
    alternatives: Data | None = None
    """dpo: what to answer in the place of forget rows, one answer a line (format text); default: a few of our own."""
    compat: list[Literal["open-unlearning"]] = []
    """Deviations of published code to repeat: open-unlearning's in the losses of undial and rmu."""
    methods: dict[str, dict[str, OneOrMore[Parameter]]] = {}
    """Parameters by method, as npo: {retain_weight: [2, 4], learning_rate: 1e-5}; lists are tried in all combinations
    and the best is chosen on validation rows."""

    _points = field_validator("scale")(_check_points)

    @model_validator(mode="after")
    def _scales_a_change_of_the_prior(self) -> Baseline:
        if self.start == "target" and self.scale != 1.0:
            raise ValueError("scale: only with start: prior")
        return self


class Demo(Closed):
    """Make a small model history of fictional people in `$output/history` first: prior, target, ideal and data."""

    prior: int = Field(240, ge=2)
    """People that the prior knows."""
    retain: int = Field(48, ge=2)
    """People that target and ideal know."""
    forget: int = Field(8, ge=2)
    """People that only the target knows."""
    holdout: int = Field(8, ge=2)
    """People that no model knows."""
    hidden_size: int = Field(256, ge=16, le=8192, multiple_of=8)
    """Width of the Llama."""
    layers: int = Field(2, ge=1, le=256)
    """Its layers."""
    vocabulary: int = Field(512, ge=300, le=MOST)
    """Size of the tokenizer that is trained on the prior's people."""
    prior_epochs: int = Field(9, ge=1, le=MOST)
    """Epochs that make the prior out of random weights."""
    tuning_epochs: int = Field(20, ge=1, le=MOST)
    """Epochs that make target and ideal out of the prior."""
    prior_learning_rate: float = Field(2e-3, gt=0, allow_inf_nan=False)
    """Learning rate of the prior."""
    tuning_learning_rate: float = Field(5e-4, gt=0, allow_inf_nan=False)
    """Learning rate of target and ideal."""
    batch_size: int = Field(32, ge=1, le=MOST)
    """Rows of one step."""

    @model_validator(mode="after")
    def _enough_names(self) -> Demo:
        count = self.prior + self.retain + self.forget + self.holdout
        if count > MOST_PEOPLE:
            raise ValueError(f"{count} people are too many, there are names for {MOST_PEOPLE}")
        return self


class Recipe(Closed):
    """θ_u = θ_D − α (θ_1 − θ_0) + β (θ_2 − θ_0): which models, which data, how strong, and what to score."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": ["prior"]}, {"required": ["history"]}]})

    target: str
    """θ_D, the finished model to unlearn from: a folder or repo[@revision]."""
    history: History | None = None
    """Earlier checkpoints, of which the right one is taken as the prior; in the place of `prior`."""
    prior: str | None = Field(None, validate_default=True)
    """θ_0, an earlier checkpoint from before the target saw the forget set."""
    tokenizer: str | None = None
    """Folder or repo[@revision] with the tokenizer, for a target that was saved without one (the prior's, say); the
    unlearned model gets its files."""
    forget: Forget
    """What to forget."""
    retain: Retain | None = None
    """What to keep; optional."""
    vector: VectorSpec = VectorSpec()
    """How the vectors are fitted."""
    columns: Columns = Columns()
    """The columns of all data sets that name none of their own."""
    prompt: PromptOrKind = Prompt()
    """How rows of format qa become text."""
    merge: Merge = Merge()
    """How the result is written."""
    evaluate: Evaluate | None = Evaluate()
    """What is scored; null: nothing."""
    select: Select = Select()
    """How (α, β), or a baseline's epoch, is chosen."""
    probe: ProbeKeys = ProbeKeys()
    """What tells whether a prior has already seen the forget set (`msa-lite probe`)."""
    baseline: Baseline = Baseline()
    """How the methods that MSA is compared with are run (`msa-lite baseline METHOD`)."""
    verdict: bool = True
    """off: a run that forgets nothing exits with 0 all the same, and checks before it (does the target know the rows?)
    warn and do not stop it."""
    demo: Demo | None = None
    """Make the models and the data first; for a try without any download."""
    output: str
    """Folder of the run."""
    seed: int = Field(0, ge=0, lt=SEEDS)
    """Seed of every random choice."""

    @field_validator("prior")
    @classmethod
    def _prior_or_history(cls, prior: str | None, info: ValidationInfo) -> str | None:
        if prior is not None and info.data.get("history") is not None:
            raise ValueError("stands beside a history, from which the prior is chosen; leave out one, or set it null")
        if prior is None and info.data.get("history", "faulty") is None:
            raise PydanticCustomError("missing", "is missing; name it, or give a history from which it is chosen")
        return prior

    @model_validator(mode="after")
    def _points_need_scores(self) -> Recipe:
        if self.evaluate is None and AUTO in (self.forget.alpha, self._beta):
            raise ValueError(
                "alpha and beta are auto, and that needs scores to choose by: give forget.alpha (and retain.beta) a "
                "number, 1.0 for a start, or do not set evaluate to null"
            )
        if self.evaluate is None and self.has_choice:
            raise ValueError("several values of alpha or beta need scores to choose by; do not set evaluate to null")
        return self

    @property
    def prior_checkpoint(self) -> str:
        """θ_0 by name: the prior that is given, or that of the history."""
        if self.history is not None:
            return choose_prior(self.history).checkpoint
        assert self.prior is not None
        return self.prior

    @property
    def prior_reason(self) -> str | None:
        """Why it is this checkpoint, in a sentence; None where the prior is given."""
        return choose_prior(self.history).why if self.history is not None else None

    @property
    def validation(self) -> float:
        """The share of a benchmark's questions that a choice by its own score is made on."""
        if not isinstance(self.select.validation, str):
            return self.select.validation
        return BENCHMARKS[self.evaluate.benchmark if self.evaluate else OWN].validation

    @property
    def alphas(self) -> list[float] | None:
        """The α asked for; None where they are searched."""
        return _listed(self.forget.alpha)

    @property
    def betas(self) -> list[float] | None:
        """The β asked for, 0 without a retain set; None where they are searched."""
        return _listed(self._beta)

    @property
    def _beta(self) -> float | list[float] | Literal["auto"]:
        return self.retain.beta if self.retain else 0.0

    @property
    def is_searched(self) -> bool:
        """Check whether α or β is auto: searched by scores, so that no list of points is known before."""
        return self.alphas is None or self.betas is None

    @property
    def has_choice(self) -> bool:
        """Check whether there is more than one point (α, β) to choose from."""
        return self.is_searched or len(self.points) > 1

    @property
    def points(self) -> list[tuple[float, float]]:
        """All (α, β) asked for; β is 0 without a retain set. Empty where one of them is searched."""
        return [(alpha, beta) for alpha in self.alphas or [] for beta in self.betas or []]


def _listed(value: float | list[float] | Literal["auto"]) -> list[float] | None:
    if isinstance(value, list):
        return value
    return None if isinstance(value, str) else [value]
