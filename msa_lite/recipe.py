"""The recipe: what a user asks for, as a closed schema. Every fault is reported at once, before any work.

Nothing below the pipeline knows of this module: stages take plain values.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from msa_lite.errors import RecipeError, UsageError, join_faults, nearest

OUTPUT_VARIABLE = "$output"
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
    """How the merged model is written."""

    dtype: Literal["same", "bfloat16", "float16", "float32"] = "same"
    """Stored dtype; same: as the target has it, file by file."""


class Evaluate(_Closed):
    """What is scored, and beside which ideal."""

    benchmark: Literal["qa"] = "qa"
    """qa: probability, ROUGE-L recall, extraction strength, exact memorization and accuracy on each set."""
    forget: Data | None = None
    """Questions about the forget set; default: forget.data, when its format is qa."""
    retain: Data | None = None
    """Questions about the retain set; default: retain.data, when its format is qa."""
    holdout: Data | None = None
    """Questions that no model was trained on."""
    ideal: str | None = None
    """A model that never saw the forget set, to be shown beside the unlearned one."""
    limit: int | None = Field(None, ge=1)
    """Score at most so many rows of each set (a seeded sample)."""
    max_new_tokens: int = Field(200, ge=1)
    """Length limit of generated answers."""


class Select(_Closed):
    """How a point (α, β) is chosen when there are several."""

    validation: float = Field(0.15, gt=0, lt=1)
    """Share of the forget and retain rows that the choice is made on; the final scores are on the others."""
    keep: float = Field(0.95, gt=0, le=1)
    """The point that forgets most is chosen among those that leave this share of the target's retain scores."""


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
    """How (α, β) is chosen."""
    demo: Demo | None = None
    """Make the models and the data first; for a try without any download."""
    output: str
    """Folder of the run."""
    seed: int = Field(0, ge=0)
    """Seed of every random choice."""

    @model_validator(mode="after")
    def _points_need_adapters(self) -> Recipe:
        if len(self.points) > 1 and self.vector.mode == "full":
            raise ValueError("several values of alpha or beta need vector.mode lora or qlora; give one each for full")
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


def load_recipe(source: str | Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe from a YAML file, the name of a shipped recipe, or a mapping; then apply `key.sub=value`.

    `$output` at the start of a path stands for the run's folder. Raises RecipeError with one line for every fault,
    UsageError when there is no such file.
    """
    name = "recipe"
    if isinstance(source, Mapping):
        values: Any = dict(source)
    else:
        path = find_recipe(str(source))
        name = str(path)
        try:
            values = yaml.safe_load(path.read_text())
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise RecipeError(f"{path}: not YAML ({error})") from error
        if not isinstance(values, dict):
            raise RecipeError(f"{path}: a recipe is a mapping of keys to values, this is {type(values).__name__}")
    for override in overrides:
        values = _override(values, override)
    values = _fill_output(values, values.get("output"))
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise RecipeError(join_faults(f"{name}: {error.error_count()} faults:", _explain(error), limit=50)) from error


def _override(values: dict[str, Any], override: str) -> dict[str, Any]:
    key, equals, text = override.partition("=")
    if not equals or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", key):
        raise UsageError(f"'{override}': an override is key.sub=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"'{override}': the value is not YAML ({error})") from error
    *parents, last = key.split(".")
    result = dict(values)
    place = result
    for parent in parents:
        below = place.get(parent)
        if below is not None and not isinstance(below, dict):
            raise UsageError(f"'{override}': {parent} holds {below!r}, which has no keys below it")
        place[parent] = dict(below or {})
        place = place[parent]
    place[last] = value
    return result


def _fill_output(value: Any, output: Any) -> Any:
    if isinstance(value, dict):
        return {key: _fill_output(item, output) for key, item in value.items()}
    if isinstance(value, str) and isinstance(output, str) and value.startswith(OUTPUT_VARIABLE + "/"):
        return output.rstrip("/") + value.removeprefix(OUTPUT_VARIABLE)
    return value


def _explain(error: ValidationError) -> list[str]:
    lines: dict[str, list[str]] = {}
    for item in error.errors():
        path, model = _walk(item["loc"])
        text = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            text = f"unknown key{nearest(str(item['loc'][-1]), model.model_fields if model else ())}"
        elif item["type"] == "missing":
            text = "is missing"
        elif not isinstance(item["input"], dict):
            text = f"{text[0].lower()}{text[1:]}, got {item['input']!r}"
        lines.setdefault(path or "recipe", []).append(text)
    # A union reports each of its members; they belong in one line.
    return [f"{path}: {'; or '.join(dict.fromkeys(texts))}" for path, texts in lines.items()]


def _walk(location: Sequence[int | str]) -> tuple[str, type[BaseModel] | None]:
    """The dotted path of a fault without the names of union members, and the model its last key belongs to."""
    model: type[BaseModel] | None = Recipe
    keys: list[str] = []
    for i, part in enumerate(location):
        if model is None and isinstance(part, str):
            continue
        keys.append(str(part))
        if i == len(location) - 1:
            break
        field = model.model_fields.get(str(part)) if model else None
        model = _model_in(field.annotation) if field else None
    return ".".join(keys), model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    members = (
        typing.get_args(annotation)
        if typing.get_origin(annotation) in (typing.Union, types.UnionType)
        else (annotation,)
    )
    return next((m for m in members if isinstance(m, type) and issubclass(m, BaseModel)), None)


def dump_recipe(recipe: Recipe) -> str:
    """YAML with every default filled in; `load_recipe` reads it back to an equal recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def shipped_recipes() -> dict[str, Path]:
    """Recipes that come with the package, by name (`quickstart`, `tofu/forget10`, …)."""
    package = Path(__file__).parent
    folder = next((f for f in (package / "shipped_recipes", package.parent / "recipes") if f.is_dir()), None)
    if folder is None:
        return {}
    return {str(path.relative_to(folder).with_suffix("")): path for path in sorted(folder.rglob("*.yaml"))}


def find_recipe(name: str) -> Path:
    """A recipe file, or a shipped recipe by its name. Raises UsageError when it is neither."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    shipped = shipped_recipes()
    key = name.removeprefix("recipes/").removesuffix(".yaml")
    if key in shipped:
        return shipped[key]
    raise UsageError(f"{name}: no such recipe{nearest(key, shipped)}; shipped are {', '.join(shipped) or 'none'}")


def title_of(path: Path) -> str:
    """The first comment line of a recipe file: what it is for."""
    first = path.read_text().partition("\n")[0]
    return first.lstrip("# ").strip() if first.startswith("#") else ""
