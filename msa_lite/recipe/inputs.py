"""The parts of a recipe that name its inputs: data, columns, the prompt, the history of the prior."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from string import Formatter
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationInfo, field_validator, model_validator

from msa_lite.closed import Closed
from msa_lite.counts import TrainingProgress, format_count, named_progress, parse_count

OneValue = TypeVar("OneValue")
_BY_FORM = Discriminator(lambda value: "many" if isinstance(value, list) else "one")
OneOrMore = Annotated[
    Annotated[OneValue, Tag("one")] | Annotated[list[OneValue], Field(min_length=1), Tag("many")], _BY_FORM
]
"""A value, or a list of values. A fault is reported for the form that the user wrote."""


def check_points(value: OneValue) -> OneValue:
    """Raise ValueError for a list in which a value stands twice."""
    if isinstance(value, list) and len(set(value)) != len(value):
        raise ValueError("a value stands twice in the list")
    return value


Tracker = Literal["tensorboard", "wandb", "trackio"]
Trackers = Annotated[Annotated[Tracker, Tag("one")] | Annotated[list[Tracker], Tag("many")], _BY_FORM]
"""A tracker, or a list of trackers, which may be empty."""


def tracker_names(track: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of the trackers, each once."""
    return tuple(dict.fromkeys([track] if isinstance(track, str) else track))


class Columns(Closed):
    """The columns that rows are read from.

    With the defaults, common forms of questions are recognised by their columns: messages (OpenAI), conversations
    (ShareGPT), instruction, input and output (Alpaca), prompt and completion (TRL).
    """

    question: str = "question"
    """The column of questions (format qa)."""
    answer: str = "answer"
    """The column of answers (format qa)."""
    text: str = "text"
    """The column of documents (format text)."""
    messages: str | None = None
    """The column of conversations (format qa), instead of question and answer."""
    subject: str | None = None
    """The column with the subject of a row, such as a person's name. Rows about one person are not independent, and
    intervals take that into account. null: the first of the columns subject, person and author, or id if its values
    repeat."""

    @model_validator(mode="after")
    def _says_one_thing(self) -> Columns:
        if self.messages and (self.question, self.answer) != ("question", "answer"):
            raise ValueError("messages stands in the place of question and answer; name one or the other")
        return self


class Data(Closed):
    """A data set."""

    path: str
    """A Hub id, a folder in Hub layout, or a .jsonl (.ndjson), .json, .csv (.tsv), .parquet or .txt file."""
    format: Literal["qa", "text"] = "qa"
    """qa: questions with answers; the answers are learnt. text: documents; every token is learnt."""
    name: str | None = None
    """The configuration of a Hub data set or folder."""
    split: str | None = None
    """The split. Default: train, or the only one."""
    revision: str | None = None
    """The commit, branch or tag of a Hub data set."""
    columns: Columns | None = None
    """The columns of this data set. Default: the recipe's `columns`."""

    def flat(self, columns: Columns) -> dict[str, Any]:
        """Return the fields of a `DataSource`. columns: the recipe's, for a data set that names none."""
        used = self.columns or columns
        return {**self.model_dump(exclude={"columns", "sample"}), **used.model_dump(exclude_none=True)}


class RetainData(Data):
    """A retain set. The vector may use a sample of it."""

    sample: Literal["match_forget"] | None = None
    """match_forget: the vector learns a seeded sample as large as the forget set, as in the paper; the other rows are
    scored. null: the vector learns all rows."""


class Prompt(Closed):
    """The text around a row of format qa. `msa-lite recipes validate RECIPE --show-prompt` prints one row with it.

    A single word sets its kind, as in `prompt: auto`.
    """

    kind: Literal["default", "chat", "plain", "auto"] = "default"
    """chat: the target's chat template. plain: the plain template below. default: the chat template if there is one,
    else plain; for a published benchmark its own prompt, if nothing else is set here. auto: the run tries several forms
    on some forget rows, and takes the one in which the target gives them the highest probability."""
    system: str | None = None
    """A system message for every row that has none of its own. null: none, but a chat template may add its own."""
    prompt: str = "Question: {question}\nAnswer:"
    """The plain template up to the answer. It holds {question}."""
    answer: str = " {answer}"
    """The plain template of the answer. It holds {answer}. The blank belongs here, not at the end of the prompt."""
    thinking: Literal["answer", "template"] = "answer"
    """The start of answers, if the chat template puts an empty block of thoughts (<think></think>) before them. answer:
    behind the block, which belongs to the prompt. template: at the end of the template's own prompt, so that the block
    is learnt and scored as part of the answer."""

    @model_validator(mode="after")
    def _holds_fields(self) -> Prompt:
        for key, text in (("question", self.prompt), ("answer", self.answer)):
            try:
                fields = [(name, how, kind) for _, name, how, kind in Formatter().parse(text) if name is not None]
            except ValueError as error:
                raise ValueError(f"the plain template has a broken {{…}} ({error})") from error
            if wrong := next((field for field in fields if field != (key, "", None)), None):
                raise ValueError(
                    f"the plain template has an unknown or broken {{{wrong[0]}}}; only {{{key}}} is filled in"
                )
            if not fields:
                raise ValueError(f"the plain template lacks {{{key}}}")
        return self


def _kind_alone(value: object) -> object:
    return {"kind": value} if isinstance(value, str) else value


PromptOrKind = Annotated[
    Prompt, BeforeValidator(_kind_alone, json_schema_input_type=Prompt | Literal["default", "chat", "plain", "auto"])
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


Count = Annotated[int, BeforeValidator(parse_count, json_schema_input_type=int | str)]
Steps = Annotated[int, BeforeValidator(_parse_steps, json_schema_input_type=int | str)]
Counts = Annotated[list[int], BeforeValidator(_parse_counts, json_schema_input_type=int | str | list[int | str])]


class PastCheckpoint(Closed):
    """A checkpoint from the target's training, and when it was saved."""

    checkpoint: str
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
