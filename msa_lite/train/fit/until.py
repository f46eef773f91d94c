"""Open-ended fits: the loss to reach, when to stop, and trying again at another rate."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from msa_lite.data import Example, to_batch
from msa_lite.errors import NotFiniteError, discarded
from msa_lite.io.files.writing import write_json
from msa_lite.io.models.devices import free_memory
from msa_lite.io.models.heads import autocast, split_model
from msa_lite.io.weights.hub import Source
from msa_lite.train.objectives.rows import Beginning, count_labels, label_states, run_rows
from msa_lite.train.settings import FitSettings

logger = logging.getLogger(__name__)


SAMPLE = 64  # the most rows to measure
_FACTOR = 3.0  # between the rates of two attempts
_FAR = 2.0  # times the loss at the start: a fit above that has diverged
_HALF = 0.5  # part of the gap that an attempt must close
NEAR = 0.8  # part of the gap below which a warning is due


@dataclass(frozen=True)
class Until:
    """The goal of an open-ended fit: the prior knows the rows as well as the target does.

    It is reached when the prior's loss on them has fallen to near the target's. The loss is measured after each epoch.
    """

    target: Source
    """The model whose loss is the goal."""
    load: Callable[[], Any] = field(compare=False)
    """Loads the target, ready for a forward pass. Called once; the model is freed before the prior is loaded."""
    least_steps: int = 10
    """No fit ends before this many steps: the loss on a few rows can fall before much is learnt."""
    closed: float = 0.95
    """The part of the gap between the losses of prior and target that must close."""
    tries: int = 1
    """The most fits at different rates. With 1 there is no second try."""

    def describe(self) -> dict[str, Any]:
        """Return what a manifest records: the target, but not its loss, which other processes have not measured."""
        rule = {"least_steps": self.least_steps, "closed": self.closed, "tries": self.tries}
        return {"target": self.target.identity(), "rows": SAMPLE, **rule}


def sample_examples(examples: Sequence[Example], seed: int) -> Sequence[Example]:
    """Return the examples to measure: all of them, or a seeded sample of 64."""
    if len(examples) <= SAMPLE:
        return examples
    chosen = np.random.default_rng(seed).choice(len(examples), SAMPLE, replace=False)
    return [examples[i] for i in sorted(chosen)]


def measure_loss(model: Any, examples: Sequence[Example], pad: int, rows: int = 4) -> float:
    """Return the mean loss per label of the examples, as in training but in eval mode; it may be NaN.

    rows: the most rows of a batch; the micro-batch of training fits here, too.
    """
    import torch
    from torch.nn.functional import cross_entropy

    training, total, count = model.training, 0.0, 0
    model.eval()
    halves = split_model(model)
    with torch.no_grad(), autocast(model):
        ordered = sorted(filter(count_labels, examples), key=lambda e: len(e.ids))  # so that there is little padding
        beginning = Beginning.of_rows(halves, ordered)
        for start in range(0, len(ordered), rows):
            batch = ordered[start : start + rows]
            states, labels = label_states(run_rows(halves, to_batch(batch, pad, model.device), beginning), batch)
            losses = halves.map_logits(partial(cross_entropy, reduction="none"), states, labels)
            total, count = total + float(losses.sum()), count + len(labels)
    model.train(training)
    return total / count


def measure_target(until: Until, examples: Sequence[Example], pad: int) -> float:
    """Return the target's loss on the examples. Raise NotFiniteError where it is not finite."""
    loss = measure_loss(until.load(), examples, pad)
    free_memory()  # the prior is loaded next
    if not math.isfinite(loss):
        raise NotFiniteError(f"{until.target.name}: its loss on the rows is no number ({loss}); its weights are broken")
    return loss


@dataclass(eq=False)  # two of them may have the same rate and losses
class Attempt:
    """One fit at one rate."""

    rate: float
    losses: list[float] = field(default_factory=list)
    """The loss after each epoch."""
    steps: int = 0
    """The number of steps up to the last of these losses."""
    ended: str = ""
    """The reason of its end, a key of _REASONS; empty while it runs."""
    micro: int = 0
    """The micro-batch that fitted into memory."""

    @property
    def loss(self) -> float:
        """Return the loss at the end; infinite for a fit that diverged."""
        return self.losses[-1] if self.losses and self.ended != "diverged" else math.inf


@dataclass
class Course:
    """The losses of an open-ended fit so far."""

    goal: float
    """The target's loss."""
    start: float | None = None
    """The prior's loss before the fit; None until it is measured."""
    attempts: list[Attempt] = field(default_factory=list)

    json_keys: ClassVar = {"goal": "goal", "start": "start", "tries": "attempts"}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Course:
        """Read its JSON form."""
        return cls(value["goal"], value["start"], [Attempt(**attempt) for attempt in value["tries"]])

    @property
    def best(self) -> Attempt:
        """Return the first attempt that came nearest to the goal."""
        return min(self.attempts, key=lambda attempt: max(attempt.loss, self.goal))

    def closed(self, loss: float) -> float:
        """Return the part of the gap that a loss closes: 0 at the prior's loss, 1 at the target's or below it."""
        assert self.start is not None, "the prior is measured first"
        gap = self.start - self.goal
        return 1.0 if loss <= self.goal else (self.start - loss) / gap if gap > 0 else -math.inf


def why_stop(until: Until, course: Course, most: int) -> str:
    """Return why the running attempt ends after its last epoch, or "" when it goes on. most: the most epochs."""
    attempt = course.attempts[-1]
    epoch, loss = len(attempt.losses), attempt.losses[-1]
    if attempt.steps >= until.least_steps:
        if course.closed(loss) >= until.closed:
            return "known"
        if course.start is not None and loss > _FAR * max(course.start, course.goal):
            return "diverged"
    if epoch >= most:
        return "cap"
    # At this pace it will not close half of the gap by the end: try another rate now.
    late = len(course.attempts) < until.tries and 3 * epoch >= most and attempt.steps >= until.least_steps
    return "slow" if late and course.closed(loss) < _HALF / 3 else ""


def next_rate(until: Until, course: Course, rate: float) -> float | None:
    """Return the rate of the next attempt, or None when there is none. rate: that of the first.

    It is higher after one that learnt too little, and lower after one that diverged or did worse than a slower one.
    After both kinds, it lies between the two.
    """
    attempts = course.attempts
    if not attempts:
        return rate
    if len(attempts) >= until.tries or course.closed(course.best.loss) >= _HALF:
        return None
    by_rate = sorted(attempts, key=lambda a: a.rate)
    best = min(by_rate, key=lambda a: a.loss)
    high = [a.rate for a in by_rate if a.ended == "diverged" or (a.rate > best.rate and a.loss > best.loss)]
    low = [a.rate for a in by_rate if a.rate not in high]
    if high and low:
        return _rounded(math.sqrt(max(low) * min(high)))
    return _rounded(min(high) / _FACTOR if high else max(low) * _FACTOR)


def _rounded(rate: float) -> float:
    return float(f"{rate:.1e}")


COURSE = "course.json"

_REASONS = {
    "known": "the prior now knows the rows as well as the target does",
    "cap": "the most epochs were done",
    "slow": "the loss hardly fell",
    "diverged": "the loss rose instead of falling",
}


@dataclass
class OpenFit:
    """An open-ended fit: attempts at one rate after another, each measured as it goes on, and ended when it is time."""

    until: Until
    sample: Sequence[Example]
    """The rows to measure."""
    pad: int
    settings: FitSettings
    """Of each attempt, but for the learning rate, which is that of the first."""
    label: str
    partial: Path
    """The vector's folder, while it is written."""
    course: Course

    @classmethod
    def resume(
        cls, until: Until, examples: Sequence[Example], pad: int, settings: FitSettings, label: str, partial: Path
    ) -> OpenFit:
        """Go on from the file of a stopped fit, or measure the target. Raise NotFiniteError for one that is broken."""
        sample, file = sample_examples(examples, settings.seed), partial / COURSE
        if file.exists():
            course = Course.from_json(json.loads(file.read_text("utf-8")))
        else:
            course = Course(measure_target(until, sample, pad))
        return cls(until, sample, pad, settings, label, partial, course)

    def next_attempt(self) -> tuple[float, Path, str] | None:
        """Return the rate, folder and label of the attempt to resume, or of a new one; None when the fit is done.

        What runs it has to call `begin` and `after_epoch`, and then `end_attempt`.
        """
        attempts = self.course.attempts
        if not attempts or attempts[-1].ended:
            for worse in attempts:  # in full mode each folder holds a whole model
                if worse is not self.course.best:
                    shutil.rmtree(self._folder(worse), ignore_errors=True)
            rate = next_rate(self.until, self.course, self.settings.learning_rate)
            if rate is None:
                return None
            if attempts:
                last = attempts[-1]
                reason = _REASONS[last.ended]
                logger.warning("%s: at a learning rate of %g %s; trying %g", self.label, last.rate, reason, rate)
            attempts.append(Attempt(rate))
        folder, number = self._folder(attempts[-1]), len(attempts)
        folder.mkdir(exist_ok=True)
        return attempts[-1].rate, folder, self.label if number == 1 else f"{self.label}, try {number}"

    def end_attempt(self, error: NotFiniteError | None = None) -> None:
        """Note the end of the running attempt. error: of a fit that diverged."""
        course = self.course
        if error is not None:
            logger.info("%s", error)
            course.attempts[-1].ended = "diverged"
        self._write()

    def finish(self) -> dict[str, Any]:
        """Move the best attempt's files up; return facts for the manifest. Raise NotFiniteError if all diverged."""
        course = self.course
        best = course.best
        if best.loss == math.inf:
            rates = " and ".join(f"{attempt.rate:g}" for attempt in course.attempts)
            raise discarded(
                NotFiniteError(
                    f"{self.label}: the loss rose, or was no number, at a learning rate of {rates}; nothing was kept. "
                    "Try a lower learning_rate"
                )
            )
        _move_up(self._folder(best), self.partial)
        self._warn()
        return {
            "micro_batch_size": best.micro,
            "fit": {
                "ended": best.ended,
                "reason": _REASONS[best.ended],
                "epochs": len(best.losses),
                "steps": best.steps,
                "learning_rate": best.rate,
                "rates": [attempt.rate for attempt in course.attempts],
                "rows_measured": len(self.sample),
                "loss": {"prior": course.start, "target": course.goal, "tuned": best.loss},
            },
        }

    def begin(self, model: Any, epoch: int, steps: int, micro: int) -> None:
        """Measure the prior unless that is done; drop losses measured after the epoch that the fit resumes from.

        micro: rows that fit into memory at a time.
        """
        attempt = self.course.attempts[-1]
        attempt.micro, attempt.ended = micro, ""
        attempt.losses, attempt.steps = attempt.losses[:epoch], steps
        if self.course.start is None:
            self.course.start = measure_loss(model, self.sample, self.pad, micro)
        self._write()

    def after_epoch(self, model: Any, epoch: int, steps: int) -> bool:
        """Measure the model; return whether the fit goes on. Raise NotFiniteError where the loss is no number."""
        attempt = self.course.attempts[-1]
        loss = measure_loss(model, self.sample, self.pad, attempt.micro)
        if not math.isfinite(loss):
            raise NotFiniteError(f"the loss on the rows is {loss} after epoch {epoch}")
        attempt.losses.append(loss)
        attempt.steps = steps
        self._write()  # without the reason of the end, which counts only once the weights are written
        attempt.ended = why_stop(self.until, self.course, self.settings.epochs)
        logger.info("loss after %d steps: %.3g; loss of the target: %.3g", steps, loss, self.course.goal)
        return not attempt.ended

    def _write(self) -> None:
        write_json(self.partial / COURSE, self.course)

    def _folder(self, attempt: Attempt) -> Path:
        return self.partial / f"try-{self.course.attempts.index(attempt) + 1}"

    def _warn(self) -> None:
        """Warn when the fit stays far from the target's loss, or when the target knows no more than the prior."""
        course, loss = self.course, self.course.best.loss
        assert course.start is not None
        if course.goal >= course.start:
            logger.warning(
                "%s: the target's loss on these rows (%.3g) is no lower than the prior's (%.3g), so the target seems "
                "not to have learnt them; check rows, prompt and models",
                self.label,
                course.goal,
                course.start,
            )
        elif course.closed(loss) < NEAR:
            logger.warning(
                "%s: the prior has not learnt the rows as well as the target knows them. Its loss on them was %.3g and "
                "is %.3g; the target's is %.3g. Unlearning may fall short; try %s",
                self.label,
                course.start,
                loss,
                course.goal,
                fit_remedies(self.settings),
            )


def fit_remedies(settings: FitSettings) -> str:
    """Return what may help a fit that fell short. A full fit has no rank, and trains all weights already."""
    adapter = "" if settings.mode == "full" else "a higher vector.lora.rank, vector.mode full, or "
    return f"{adapter}another vector.learning_rate"


def _move_up(folder: Path, partial: Path) -> None:
    """Move the files of an attempt into the vector's folder; after a kill half-way, a rerun moves the rest."""
    if folder.exists():
        for path in folder.iterdir():
            os.replace(path, partial / path.name)
        folder.rmdir()
