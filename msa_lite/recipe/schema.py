"""The recipe: what a user asks for, as a closed schema. Every fault is reported at once, before any work.

Nothing below the pipeline knows of this module: stages take plain values.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

MOST_PEOPLE = 400  # of the demo; it has names for no more


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Columns(_Closed):
    """Names of the columns that rows are read from."""

    question: str = "question"
    """Column of questions, for format qa."""
    answer: str = "answer"
    """Column of answers, for format qa."""
    text: str = "text"
    """Column of documents, for format text."""


class Data(_Closed):
    """A data set: a Hub id, a folder in Hub layout, or a .jsonl, .json, .csv, .parquet or .txt file."""

    path: str
    """Hub id, folder or file."""
    format: Literal["qa", "text"] = "qa"
    """qa: questions with answers, the answers are learnt. text: documents, every token is learnt."""
    name: str | None = None
    """Configuration of a Hub data set or folder."""
    split: str | None = None
    """Split; 'train' when there is one of that name, or the only one."""
    revision: str | None = None
    """Commit, branch or tag of a Hub data set."""
    columns: Columns = Columns()
    """Where rows are read from."""


class RetainData(Data):
    """A retain set, of which the vector may use a sample."""

    sample: Literal["match_forget"] | None = None
    """match_forget: tune on a seeded sample as large as the forget set (as the paper does); null: on all rows."""


Strength = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _check_points(value: float | list[float]) -> float | list[float]:
    if isinstance(value, list) and len(set(value)) != len(value):
        raise ValueError("a value stands twice in the list")
    return value


class Forget(_Closed):
    """The forget set and the strength α that its vector is subtracted with."""

    data: Data
    """The rows to forget."""
    alpha: Strength | Annotated[list[Strength], Field(min_length=1)] = 1.0
    """α ≥ 0; a list is tried on validation rows and the best is chosen."""

    _points = field_validator("alpha")(_check_points)


class Retain(_Closed):
    """The retain set and the strength β that its vector is added with."""

    data: RetainData
    """Rows to keep."""
    beta: Strength | Annotated[list[Strength], Field(min_length=1)] = 1.0
    """β ≥ 0; with 0 no retain vector is fitted and the rows are only scored. A list as for α."""

    _points = field_validator("beta")(_check_points)


class Lora(_Closed):
    """Shape of the adapter."""

    rank: int = Field(32, ge=1)
    """Rank r of the factors."""
    alpha: float = Field(64, gt=0, allow_inf_nan=False)
    """lora_alpha; the delta is scaled by lora_alpha / r."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout before the factors, while tuning."""
    targets: str | list[str] = "all-linear"
    """all-linear, or names of modules."""


class VectorSpec(_Closed):
    """How the prior is tuned to get a vector."""

    mode: Literal["lora", "qlora", "full"] = "lora"
    """lora: an adapter; qlora: an adapter on a 4-bit prior; full: all weights, in fp32."""
    lora: Lora = Lora()
    """Shape of the adapter, for lora and qlora."""
    epochs: int = Field(5, ge=1)
    """Passes over the rows."""
    learning_rate: float = Field(2e-4, gt=0, allow_inf_nan=False)
    """Highest learning rate; it falls linearly to 0 after the warm-up."""
    weight_decay: float = Field(0.01, ge=0, allow_inf_nan=False)
    """AdamW's weight decay."""
    warmup_epochs: float = Field(1.0, ge=0, allow_inf_nan=False)
    """Length of the linear warm-up, in epochs."""
    batch_size: int = Field(32, ge=1)
    """Effective batch: rows of one optimiser step."""
    micro_batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Rows of one forward pass, a divisor of batch_size; auto: as many as fit."""
    max_length: int = Field(512, ge=8)
    """Longest row in tokens; longer ones are cut (qa) or split (text)."""

    @model_validator(mode="after")
    def _divides(self) -> VectorSpec:
        if self.micro_batch_size != "auto" and self.batch_size % self.micro_batch_size:
            raise ValueError(f"micro_batch_size {self.micro_batch_size} does not divide batch_size {self.batch_size}")
        return self


class Prompt(_Closed):
    """How questions and answers become text."""

    kind: Literal["auto", "chat", "plain"] = "auto"
    """auto: the target's chat template where it has one, the plain template otherwise."""
    prompt: str = "Question: {question}\nAnswer:"
    """Plain template up to where the answer begins; holds {question}."""
    answer: str = " {answer}"
    """Plain template of the answer; holds {answer}. The blank belongs here, not at the end of the prompt."""

    @model_validator(mode="after")
    def _holds_fields(self) -> Prompt:
        for key, text in (("question", self.prompt), ("answer", self.answer)):
            try:
                filled = text.format(**{key: "\0"})
            except (KeyError, IndexError, ValueError) as error:
                raise ValueError(f"the plain template has an unknown or broken {{…}} ({error})") from error
            if "\0" not in filled:
                raise ValueError(f"the plain template lacks {{{key}}}")
        return self


class Merge(_Closed):
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


class Judge(_Closed):
    """A language model that says which candidate an answer agrees with (tofu, restor)."""

    kind: Literal["none", "local", "openai"] = "none"
    """none; local: a Hugging Face model on this machine; openai: any server with OpenAI's interface, whose key is
    OPENAI_API_KEY in the environment."""
    model: str | None = None
    """openai: a model of the server, gpt-4o by default; local: a folder or repo[@revision]."""
    base_url: str | None = None
    """The server's address; default: OPENAI_BASE_URL, or OpenAI itself."""
    separate: bool = False
    """acc_forget by a call of its own, in which the ideal's answer is no candidate."""
    batch: bool = False
    """Calls go through OpenAI's Batch API: half the price, up to 24 hours."""
    concurrency: int = Field(8, ge=1)
    """Calls under way at a time."""
    timeout: float = Field(60.0, gt=0, allow_inf_nan=False)
    """Seconds without a sign from the server after which a call is tried again."""
    price: tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]] | None = None
    """USD per million prompt and completion tokens, for the estimate; default: the list price, where it is known."""


class Evaluate(_Closed):
    """What is scored, and beside which ideal."""

    benchmark: Literal["qa", "tofu", "restor", "muse"] = "qa"
    """qa: the forget, retain and holdout questions below; tofu, restor, muse: the published benchmarks."""
    split: str | None = None
    """tofu: forget01, forget05 or forget10; restor: which corruption documents (a0 …)."""
    data: str | None = None
    """The benchmark's data: a folder, or Hub id[@revision]; default: where it was published."""
    forget: Data | None = None
    """Questions about the forget set, for qa and for the choice of α and β; default: forget.data, where it is qa."""
    retain: Data | None = None
    """Questions about the retain set, likewise; default: retain.data, where it is qa."""
    holdout: Data | None = None
    """Questions that no model was trained on."""
    ideal: str | None = None
    """A model that never saw the forget set, to be shown beside the unlearned one; some metrics need it."""
    judge: Judge = Judge()
    """Who judges generated answers."""
    compat: list[str] = []
    """Deviations of published code to repeat: open-unlearning, tofu, muse, restor, or single switches."""
    limit: int | None = Field(None, ge=1)
    """Score at most so many rows of each set (a seeded sample)."""
    max_new_tokens: int = Field(200, ge=1)
    """Length limit of generated answers to qa questions."""

    @model_validator(mode="after")
    def _fits_the_benchmark(self) -> Evaluate:
        if self.benchmark == "qa":
            given = {"split": self.split, "data": self.data, "compat": self.compat, "judge": self.judge.kind != "none"}
            wrong = [name for name, value in given.items() if value]
            if wrong:
                raise ValueError(f"{', '.join(wrong)}: not for benchmark qa; choose tofu, restor or muse")
        if self.benchmark == "muse" and self.judge.kind != "none":
            raise ValueError("judge: nothing in muse is judged; leave it out")
        return self


class Select(_Closed):
    """How a point (α, β) is chosen when there are several."""

    validation: float = Field(0.15, gt=0, lt=1)
    """Share of the forget and retain rows that the choice is made on; the final scores are on the others."""
    keep: float = Field(0.95, gt=0, le=1)
    """The point that forgets most is chosen among those that leave this share of the target's retain scores."""


def _as_number(value: object) -> object:
    """YAML reads 1e-5 as a string; and true is no number, though Python has it for one."""
    if isinstance(value, bool):
        raise ValueError("a number or a word is wanted")
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


Parameter = Annotated[int | float | str, BeforeValidator(_as_number)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Baseline(_Closed):
    """How `msa-lite baseline METHOD` trains. What is not said here is as in `vector`, so that methods compare."""

    start: Literal["target", "prior"] = "target"
    """target: the method is run on the target; prior: on the prior, and the change is then added to the target."""
    scale: Rate | Annotated[list[Rate], Field(min_length=1)] = 1.0
    """With start prior: what the change is multiplied by; of a list, the best is chosen on validation rows."""
    epochs: int | None = Field(None, ge=1)
    """Passes over the forget rows, each of them a candidate on validation rows; default: vector.epochs."""
    learning_rate: Rate | None = None
    """Of the methods that have none of their own below; default: vector.learning_rate."""
    alternatives: Data | None = None
    """dpo: what to answer in the place of forget rows, one answer a line (format text); default: a few of our own."""
    compat: list[Literal["open-unlearning"]] = []
    """Deviations of published code to repeat: open-unlearning's in the losses of undial and rmu."""
    methods: dict[str, dict[str, Parameter | Annotated[list[Parameter], Field(min_length=1)]]] = {}
    """Parameters by method, as npo: {retain_weight: [2, 4], learning_rate: 1e-5}; lists are tried in all combinations
    and the best is chosen on validation rows."""

    _points = field_validator("scale")(_check_points)

    @model_validator(mode="after")
    def _scales_a_change_of_the_prior(self) -> Baseline:
        if self.start == "target" and self.scale != 1.0:
            raise ValueError("scale: only with start: prior")
        return self


class Demo(_Closed):
    """Make a small model history of fictional people in `$output/history` first: prior, target, ideal and data."""

    prior: int = Field(240, ge=2)
    """People that the prior knows."""
    retain: int = Field(48, ge=2)
    """People that target and ideal know."""
    forget: int = Field(8, ge=2)
    """People that only the target knows."""
    holdout: int = Field(8, ge=2)
    """People that no model knows."""
    hidden_size: int = Field(256, ge=16, multiple_of=8)
    """Width of the Llama."""
    layers: int = Field(2, ge=1)
    """Its layers."""
    vocabulary: int = Field(512, ge=300)
    """Size of the tokenizer that is trained on the prior's people."""
    prior_epochs: int = Field(9, ge=1)
    """Epochs that make the prior out of random weights."""
    tuning_epochs: int = Field(20, ge=1)
    """Epochs that make target and ideal out of the prior."""
    prior_learning_rate: float = Field(2e-3, gt=0, allow_inf_nan=False)
    """Learning rate of the prior."""
    tuning_learning_rate: float = Field(5e-4, gt=0, allow_inf_nan=False)
    """Learning rate of target and ideal."""
    batch_size: int = Field(32, ge=1)
    """Rows of one step."""

    @model_validator(mode="after")
    def _enough_names(self) -> Demo:
        count = self.prior + self.retain + self.forget + self.holdout
        if count > MOST_PEOPLE:
            raise ValueError(f"{count} people are too many, there are names for {MOST_PEOPLE}")
        return self


class Recipe(_Closed):
    """θ_u = θ_D − α (θ_1 − θ_0) + β (θ_2 − θ_0): which models, which data, how strong, and what to score."""

    target: str
    """θ_D, the finished model to unlearn from: a folder or repo[@revision]."""
    prior: str
    """θ_0, an earlier checkpoint from before the target saw the forget set."""
    forget: Forget
    """What to forget."""
    retain: Retain | None = None
    """What to keep; optional."""
    vector: VectorSpec = VectorSpec()
    """How the vectors are fitted."""
    prompt: Prompt = Prompt()
    """How rows of format qa become text."""
    merge: Merge = Merge()
    """How the result is written."""
    evaluate: Evaluate | None = Evaluate()
    """What is scored; null: nothing."""
    select: Select = Select()
    """How (α, β), or a baseline's epoch, is chosen."""
    baseline: Baseline = Baseline()
    """How the methods that MSA is compared with are run (`msa-lite baseline METHOD`)."""
    demo: Demo | None = None
    """Make the models and the data first; for a try without any download."""
    output: str
    """Folder of the run."""
    seed: int = Field(0, ge=0)
    """Seed of every random choice."""

    @model_validator(mode="after")
    def _points_need_scores(self) -> Recipe:
        if len(self.points) > 1 and self.evaluate is None:
            raise ValueError("several values of alpha or beta need scores to choose by; do not set evaluate to null")
        return self

    @property
    def points(self) -> list[tuple[float, float]]:
        """All (α, β) asked for; β is 0 without a retain set."""
        alphas = self.forget.alpha if isinstance(self.forget.alpha, list) else [self.forget.alpha]
        beta = self.retain.beta if self.retain else 0.0
        betas = beta if isinstance(beta, list) else [beta]
        return [(alpha, b) for alpha in alphas for b in betas]
