"""Choose the prior of a history: the latest checkpoint that was saved before the forget data came in.

MSA takes "the exact checkpoint immediately preceding" the unlearning targets (MSA paper, §Experimental Setup). If the
targets came in several times, the first time counts. Checkpoints that have seen them do worse, however much was learnt
since (App. "Unlearning Targets Introduced Many Tokens Before the Final Checkpoint" and "Repeated Exposure").
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from msa_lite.counts import TrainingProgress, format_count, named_progress, parse_count
from msa_lite.recipe.inputs import Closed


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
    """The tokens that it had seen, such as 20M. Default: the number in its name."""
    step: Steps | None = None
    """Its training step, in the place of seen_tokens. Default: the number in its name. All checkpoints use one unit."""

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
    In a list, the first point counts."""

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
