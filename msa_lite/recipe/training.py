"""The settings of any tuning: of vectors, baselines, and a training in stages, as closed schemas."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from msa_lite.io.files.schema import Closed
from msa_lite.recipe.inputs import (
    AutoOffOr,
    ColumnNames,
    Count,
    Data,
    NameOr,
    OneOrMore,
    Prompt,
    Trackers,
    check_points,
    no_truth,
)
from msa_lite.settings import Columns, PromptSettings

MOST = 1_000_000  # rows of a batch, epochs, tokens of a row: beyond, a number is a slip
SEEDS = 2**32  # of numpy


Rate = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(no_truth)]
Positive = Annotated[int, Field(ge=1, le=MOST), BeforeValidator(no_truth)]
"""A whole number ≥ 1."""
Hold = Annotated[
    AutoOffOr[Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False), BeforeValidator(no_truth)]],
    AfterValidator(lambda value: 0.0 if value == "off" else value),
]
"""auto, or h ≥ 0; off is 0."""
Epochs = Annotated[float, Field(ge=0, le=MOST, allow_inf_nan=False), BeforeValidator(no_truth)]
"""A length in epochs; 0 and fractions are allowed."""


class Tuning(Closed):
    """The settings of any tuning, apart from its length and rate."""

    weight_decay: float = Field(0.01, ge=0, allow_inf_nan=False)
    """The weight decay of AdamW."""
    micro_batch_size: Positive | Literal["auto"] = "auto"
    """The rows of one forward pass, a divisor of batch_size. auto: as many as fit."""
    max_length: int = Field(512, ge=8, le=MOST)
    """The longest row in tokens. Longer rows are cut (qa) or split (text)."""
    compute: Literal["auto", "bf16", "fp32"] = "auto"
    """The precision of matrix products. auto: bf16 on a GPU (fp16 on one without it), exact fp32 on a CPU. bf16: also
    on CPUs with AMX or AVX512-BF16, where it is faster."""


def check_micro_batch(micro: int | Literal["auto"], batch: int | Literal["auto"]) -> None:
    """Raise ValueError if both are numbers and the micro-batch does not divide the batch."""
    if micro != "auto" and batch != "auto" and batch % micro:
        raise ValueError(f"micro_batch_size {micro} does not divide batch_size {batch}")


class Training(Tuning):
    """The training of all weights. The defaults are those of the paper's TOFU models."""

    epochs: Positive = 5
    """Passes over the rows."""
    learning_rate: Rate = 1e-5
    """The highest learning rate, at the end of the warm-up."""
    warmup_epochs: Epochs = 1.0
    """The length of the linear warm-up, in epochs."""
    batch_size: Positive = 32
    """The rows of one optimizer step."""
    schedule: Literal["linear", "constant"] = "linear"
    """linear: the rate falls to 0 after the warm-up. constant: it stays."""

    @model_validator(mode="after")
    def _divides(self) -> Training:
        check_micro_batch(self.micro_batch_size, self.batch_size)
        return self


class TrainingStage(Training):
    """A stage of training. Keys that it leaves out are those of `training`."""

    name: str | None = Field(None, pattern=r"^\w[\w.-]*$", max_length=200)
    """The name of the stage; its folder is NUMBER-NAME. Default: a name made from the data's."""
    data: OneOrMore[Data]
    """The rows to learn. The data sets of a list are learnt together."""
    tokens: Annotated[Count, Field(ge=1)] | None = None
    """20M: only the first 20 million tokens of the data (format text) are downloaded and learnt. Epochs are passes over
    these. Default: all tokens."""

    @property
    def sets(self) -> list[Data]:
        """The data sets as a list."""
        return self.data if isinstance(self.data, list) else [self.data]

    @property
    def title(self) -> str:
        """The stage's name, or one made from the data's."""
        last = PurePosixPath(self.sets[0].path).name
        return self.name or re.sub(r"[^\w.-]+", "-", last.partition(".")[0].lower())[:200].strip("-.") or "stage"

    @model_validator(mode="after")
    def _counts_tokens_of_one_text(self) -> TrainingStage:
        if self.tokens is not None and [data.format for data in self.sets] != ["text"]:
            raise ValueError("tokens: only for one data set of format text; questions are learnt whole")
        return self


class NewTokenizer(Closed):
    """A byte-level BPE tokenizer, trained on the rows of the first stage."""

    vocabulary: int = Field(ge=300, le=MOST)
    """The largest size. A tokenizer of a few rows is smaller."""


class NewModel(Closed):
    """A model of random weights."""

    config: dict[str, Any]
    """The config of the model, with transformers' keys: model_type (llama, gpt2, …), and every key that differs from
    its default. vocab_size and the ids of special tokens come from the tokenizer."""
    tokenizer: NameOr[NewTokenizer]
    """A folder or repo[@revision] that has a tokenizer, or {vocabulary: 2048} to train one here."""

    @field_validator("config")
    @classmethod
    def _has_a_type(cls, value: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(value.get("model_type"), str):
            raise ValueError("model_type is missing, as in {model_type: llama, …}")
        return value


class TrainingRecipe(Closed):
    """A training in stages, which makes targets, ideals and the checkpoints before them (`msa-lite train`)."""

    model: NameOr[NewModel]
    """The model that training starts from: a folder, repo[@revision], or {config, tokenizer} for a new model."""
    training: Training = Training()
    """The default settings of all stages."""
    stages: list[TrainingStage] = Field(min_length=1, max_length=1000)
    """The stages in their order. Each has its own optimizer and schedule."""
    columns: ColumnNames = Columns()
    """The columns of all data sets that do not name their own."""
    prompt: Prompt = PromptSettings()
    """The prompt of rows of format qa. auto is refused, because no model knows the rows yet."""
    track: Trackers = []
    """The trackers that get the loss of each step: tensorboard (files in `$output/tracking`), wandb, trackio or
    mlflow (a file there, or the server of MLFLOW_TRACKING_URI), or a list of them. They get no rows, and change no
    result."""
    output: str
    """The folder of the models."""
    seed: int = Field(0, ge=0, lt=SEEDS - 1000)
    """The seed of every random choice. The start model and stage 1 use this seed, stage 2 this seed + 1, and so on, so
    that stages with the same number of rows are shuffled differently."""

    @property
    def folder(self) -> Path:
        """The folder of the models."""
        return Path(self.output).expanduser()

    @field_validator("stages", mode="before")
    @classmethod
    def _fill(cls, stages: object, info: ValidationInfo) -> object:
        if not isinstance(stages, list) or "training" not in info.data:
            return stages
        defaults = info.data["training"].model_dump()
        return [defaults | stage if isinstance(stage, dict) else stage for stage in stages]

    @field_validator("prompt")
    @classmethod
    def _has_a_form(cls, value: PromptSettings) -> PromptSettings:
        if value.kind == "auto":
            raise ValueError("auto: only in a run, whose target knows the rows; choose default, chat or plain")
        return value


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
    """Passes over the rows. auto: until the prior knows them as well as the target does."""
    learning_rate: Rate | Literal["auto"] = "auto"
    """The highest learning rate. After the warm-up it falls linearly to 0; with epochs auto it stays constant. auto: a
    rate by mode, model size and lora.alpha. With epochs auto, other rates are tried if this one learns too little."""
    batch_size: Positive | Literal["auto"] = "auto"
    """The rows of one optimizer step. auto: 4 to 32, by the number of rows."""
    warmup_epochs: Epochs | Literal["auto"] = "auto"
    """The length of the linear warm-up, in epochs. auto: one epoch; with epochs auto, a few steps."""
    # full came nearer to the ideal in three histories of three (examples/real_model). lora fits one consumer GPU.
    mode: Literal["lora", "qlora", "full"] = "lora"
    """lora: an adapter. qlora: an adapter on a 4-bit prior. full: all weights, in fp32."""
    lora: Lora = Lora()
    """The shape of the adapter, for lora and qlora."""
    optimizer: Literal["auto", "adamw", "adamw_8bit"] = "auto"
    """adamw_8bit: 8-bit states, by bitsandbytes, with a quarter of the memory. auto: adamw_8bit for qlora on a GPU,
    else adamw."""
    # With the filter and a hold of 1, five steps of training brought back 23 of 144 rows; with the filter alone 28.
    hold: Hold = "auto"
    """The weight h of the hold, which protects rows to keep; not in the paper. Each step of the forget vector's fit
    adds h · KL between the outputs on retain rows at the start of the fit and now. 0 or off: none. auto: 1 for a
    filtered adapter with a prior, else 0. A number needs retain rows."""
    start: Literal["prior", "retain"] = "prior"
    """The model that the forget vector is fitted from. prior: θ_0. retain (not in the paper): θ_2, the prior tuned on
    the retain rows; the vector is then θ_12 - θ_2, and there is no β."""

    @model_validator(mode="after")
    def _divides(self) -> VectorSpec:
        check_micro_batch(self.micro_batch_size, self.batch_size)
        return self


class RetainVector(Closed):
    """The fit of the retain vector, where it differs from the forget vector's. Other keys are those of `vector`."""

    epochs: Positive | Literal["auto"] | None = None
    """Passes over the retain rows, or auto. Default: vector.epochs."""
    learning_rate: Rate | Literal["auto"] | None = None
    """The highest learning rate, or auto. Default: vector.learning_rate."""
    weight_decay: float | None = Field(None, ge=0, allow_inf_nan=False)
    """The weight decay of AdamW. Default: vector.weight_decay."""
    batch_size: Positive | Literal["auto"] | None = None
    """The rows of one optimizer step, or auto; vector.micro_batch_size is then a limit. Default: vector.batch_size."""
    warmup_epochs: Epochs | Literal["auto"] | None = None
    """The length of the linear warm-up, in epochs, or auto. Default: vector.warmup_epochs."""

    @model_validator(mode="before")
    @classmethod
    def _shares_the_rest(cls, value: Any) -> Any:
        alone = {"hold", "start"}  # of the forget vector
        shared = [key for key in VectorSpec.model_fields if key not in alone | cls.model_fields.keys()]
        if isinstance(value, dict) and (repeated := [key for key in shared if key in value]):
            keys = ", ".join(f"vector.{key}" for key in repeated)
            raise ValueError(f"{', '.join(repeated)}: both vectors share this; set {keys} for both")
        return value


def _as_number(value: object) -> object:
    """Return a number for a text such as 1e-5, which YAML reads as a string. Raise ValueError for true and false."""
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
    """The training of `msa-lite baseline METHOD`. All other settings are those of `vector`, for a fair comparison;
    `hold` and `start` are for MSA and task_vector only."""

    start: Literal["target", "prior"] = "target"
    """target: the method trains the target. prior: it trains the prior, and the change is then added to the target."""
    scale: OneOrMore[Rate] = 1.0
    """With start: prior, the factor of the change. A list: the best is chosen on validation rows."""
    epochs: int | None = Field(None, ge=1, le=MOST)
    """Passes over the forget rows. The best epoch is chosen on validation rows. Default: vector.epochs, or 5 if that is
    auto."""
    learning_rate: Rate | None = None
    """The learning rate of methods that have none of their own in `methods`. Default: vector.learning_rate."""
    methods: dict[str, dict[str, OneOrMore[Parameter]]] = {}
    """Parameters by method, such as npo: {retain_weight: [2, 4], learning_rate: 1e-5}. All combinations of lists are
    tried, and the best is chosen on validation rows."""

    _points = field_validator("scale")(check_points)

    @model_validator(mode="after")
    def _fits_its_methods(self) -> Baseline:
        if self.start == "target" and self.scale != 1.0:
            raise ValueError("scale: only with start: prior")
        return self
