"""Open-ended fits: the loss to reach, when to stop, and trying again at another rate."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from msa_lite.data import IGNORE, Example, to_batch
from msa_lite.errors import NotFiniteError
from msa_lite.io.files.writing import write_json
from msa_lite.io.finished.manifest import discarded
from msa_lite.io.models.devices import free_memory
from msa_lite.io.models.heads import autocast, split_model
from msa_lite.io.weights.hub import Source
from msa_lite.train.plain import label_states, run_rows
from msa_lite.train.settings import FitSettings

logger = logging.getLogger(__name__)


SAMPLE = 64  # the most rows to measure
_FACTOR = 3.0  # between the rates of two tries
_FAR = 2.0  # times the loss at the start: a fit above that has diverged
_HALF = 0.5  # part of the gap that a try must close
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
        for batch in _batches(examples, rows):
            states, labels = label_states(run_rows(halves, to_batch(batch, pad, model.device)), batch)
            losses = halves.map_logits(partial(cross_entropy, reduction="none"), states, labels)
            total, count = total + float(losses.sum()), count + len(labels)
    model.train(training)
    return total / count


def _batches(examples: Sequence[Example], rows: int) -> Iterator[list[Example]]:
    """Yield batches of examples with labels, those of similar length together, so that there is little padding."""
    ordered = sorted((e for e in examples if any(x != IGNORE for x in e.labels[1:])), key=lambda e: len(e.ids))
    return (ordered[i : i + rows] for i in range(0, len(ordered), rows))


def measure_target(until: Until, examples: Sequence[Example], pad: int) -> float:
    """Return the target's loss on the examples. Raise NotFiniteError where it is not finite."""
    loss = measure_loss(until.load(), examples, pad)
    free_memory()  # the prior is loaded next
    if not math.isfinite(loss):
        raise NotFiniteError(f"{until.target.name}: its loss on the rows is no number ({loss}); its weights are broken")
    return loss


@dataclass
class Try:
    """One fit at one rate."""

    rate: float
    losses: list[float] = field(default_factory=list)
    """The loss after each epoch."""
    steps: int = 0
    """The number of steps up to the last of these losses."""
    ended: str = ""
    """The reason of its end: "known", "cap", "slow" or "diverged"; empty while it runs."""
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
    tries: list[Try] = field(default_factory=list)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Course:
        """Read what `as_json` returned."""
        return cls(value["goal"], value["start"], [Try(**one) for one in value["tries"]])

    def as_json(self) -> dict[str, Any]:
        """Return all of it, JSON-able."""
        return asdict(self)

    @property
    def best(self) -> int:
        """Return the index of the try that came nearest to the goal."""
        return min(range(len(self.tries)), key=lambda i: max(self.tries[i].loss, self.goal))

    def closed(self, loss: float) -> float:
        """Return the part of the gap that a loss closes: 0 at the prior's loss, 1 at the target's or below it."""
        assert self.start is not None, "the prior is measured first"
        gap = self.start - self.goal
        return 1.0 if loss <= self.goal else (self.start - loss) / gap if gap > 0 else -math.inf


def why_stop(until: Until, course: Course, most: int) -> str:
    """Return why the running try ends after its last epoch, or "" when it goes on. most: the most epochs."""
    attempt = course.tries[-1]
    epoch, loss = len(attempt.losses), attempt.losses[-1]
    if attempt.steps >= until.least_steps:
        if course.closed(loss) >= until.closed:
            return "known"
        if course.start is not None and loss > _FAR * max(course.start, course.goal):
            return "diverged"
    if epoch >= most:
        return "cap"
    # At this pace it will not close half of the gap by the end: try another rate now.
    late = len(course.tries) < until.tries and 3 * epoch >= most and attempt.steps >= until.least_steps
    return "slow" if late and course.closed(loss) < _HALF / 3 else ""


def next_rate(until: Until, course: Course, rate: float) -> float | None:
    """Return the rate of the next try, or None when there is none. rate: that of the first.

    It is higher after a try that learnt too little, and lower after a try that diverged or did worse than a slower one.
    After both kinds of try, it lies between the two.
    """
    tries = course.tries
    if not tries:
        return rate
    if len(tries) >= until.tries or course.closed(tries[course.best].loss) >= _HALF:
        return None
    by_rate = sorted(tries, key=lambda t: t.rate)
    best = min(by_rate, key=lambda t: t.loss)
    high = [t.rate for t in by_rate if t.ended == "diverged" or (t.rate > best.rate and t.loss > best.loss)]
    low = [t.rate for t in by_rate if t.rate not in high]
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
class Gauge:
    """Measure the loss on the rows as a fit goes on, and end the fit when it has learnt enough."""

    until: Until
    course: Course
    file: Path
    examples: Sequence[Example]
    """The rows to measure."""
    pad: int
    most: int
    """The most epochs."""
    ended: str = ""
    """A key of _REASONS once the fit has ended."""
    micro: int = 1
    """Rows that fit into memory at a time."""

    def begin(self, model: Any, epoch: int, steps: int, micro: int) -> None:
        """Measure the prior unless that is done; drop losses measured after the epoch that the fit resumes from."""
        attempt = self.course.tries[-1]
        self.micro = micro
        attempt.losses, attempt.steps = attempt.losses[:epoch], steps
        if self.course.start is None:
            self.course.start = measure_loss(model, self.examples, self.pad, self.micro)
        self._write()

    def after_epoch(self, model: Any, epoch: int, steps: int) -> bool:
        """Measure the model; return whether the fit goes on. Raise NotFiniteError where the loss is no number."""
        attempt = self.course.tries[-1]
        loss = measure_loss(model, self.examples, self.pad, self.micro)
        if not math.isfinite(loss):
            raise NotFiniteError(f"the loss on the rows is {loss} after epoch {epoch}")
        attempt.losses.append(loss)
        attempt.steps = steps
        self._write()  # without the reason of the end, which counts only once the weights are written
        self.ended = why_stop(self.until, self.course, self.most)
        logger.info("loss after %d steps: %.3g; loss of the target: %.3g", steps, loss, self.course.goal)
        return not self.ended

    def likely_steps(self, per_epoch: int) -> int:
        """Estimate the steps of the whole fit, as if the gap closed evenly; always more than are done."""
        attempt, most = self.course.tries[-1], self.most * per_epoch
        closed = self.course.closed(attempt.losses[-1]) if attempt.losses else 0.0
        likely = attempt.steps / closed if closed > 0 else most
        return max(attempt.steps + per_epoch + 1, min(most, math.ceil(likely)))

    def _write(self) -> None:
        write_json(self.file, self.course.as_json())


@dataclass
class Tries:
    """The tries of an open-ended fit."""

    until: Until
    examples: Sequence[Example]
    pad: int
    settings: FitSettings
    """Of each try, but for the learning rate, which is that of the first."""
    label: str
    fit: Callable[[float, Path, Gauge, str], int]
    """Called as fit(rate, folder, gauge, label); returns the micro-batch that fitted into memory."""

    def run(self, partial: Path) -> dict[str, Any]:
        """Fit into the folder; return facts for the manifest. Raise NotFiniteError where every try diverged."""
        sample, file = sample_examples(self.examples, self.settings.seed), partial / COURSE
        if file.exists():
            course = Course.from_json(json.loads(file.read_text("utf-8")))
        else:
            course = Course(measure_target(self.until, sample, self.pad))
        while (attempt := self._next_try(course)) is not None:
            number = len(course.tries)
            gauge = Gauge(self.until, course, file, sample, self.pad, self.settings.epochs)
            label = self.label if number == 1 else f"{self.label}, try {number}"
            try:
                attempt.micro = self.fit(attempt.rate, _folder(partial, number), gauge, label)
                attempt.ended = gauge.ended
            except NotFiniteError as error:
                logger.info("%s", error)
                attempt.ended = "diverged"
            write_json(file, course.as_json())
            for i in set(range(len(course.tries))) - {course.best}:  # in full mode each folder holds a whole model
                shutil.rmtree(_folder(partial, i + 1), ignore_errors=True)
        best = course.tries[course.best]
        if best.loss == math.inf:
            raise discarded(NotFiniteError(self._failure(course)))
        _move_up(_folder(partial, course.best + 1), partial)
        self._warn(course)
        return {"micro_batch_size": best.micro, "fit": _facts(course, len(sample))}

    @property
    def remedies(self) -> str:
        """Return what may help a fit that fell short. A full fit has no rank, and trains all weights already."""
        adapter = [] if self.settings.mode == "full" else ["a higher vector.lora.rank, vector.mode full"]
        return ", or ".join([*adapter, "another vector.learning_rate"])

    def _next_try(self, course: Course) -> Try | None:
        """Return the try to resume, or a new one; None when the fit is done."""
        if course.tries and not course.tries[-1].ended:
            return course.tries[-1]
        rate = next_rate(self.until, course, self.settings.learning_rate)
        if rate is None:
            return None
        if course.tries:
            last = course.tries[-1]
            reason = _REASONS[last.ended]
            logger.warning("%s: at a learning rate of %g %s; trying %g", self.label, last.rate, reason, rate)
        course.tries.append(Try(rate))
        return course.tries[-1]

    def _failure(self, course: Course) -> str:
        rates = " and ".join(f"{one.rate:g}" for one in course.tries)
        return (
            f"{self.label}: the loss rose, or was no number, at a learning rate of {rates}; nothing was kept. Try a "
            "lower learning_rate"
        )

    def _warn(self, course: Course) -> None:
        """Warn when the fit stays far from the target's loss, or when the target knows no more than the prior."""
        assert course.start is not None
        loss = course.tries[course.best].loss
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
                self.remedies,
            )


def _folder(partial: Path, number: int) -> Path:
    """Return the folder of a try, counted from 1."""
    return partial / f"try-{number}"


def _move_up(folder: Path, partial: Path) -> None:
    """Move the files of a try into the vector's folder; after a kill half-way, a rerun moves the rest."""
    if folder.exists():
        for path in folder.iterdir():
            os.replace(path, partial / path.name)
        folder.rmdir()


def _facts(course: Course, rows: int) -> dict[str, Any]:
    """Return a summary of the fit for the manifest."""
    best = course.tries[course.best]
    return {
        "ended": best.ended,
        "reason": _REASONS[best.ended],
        "epochs": len(best.losses),
        "steps": best.steps,
        "learning_rate": best.rate,
        "rates": [one.rate for one in course.tries],
        "rows_measured": rows,
        "loss": {"prior": course.start, "target": course.goal, "tuned": best.loss},
    }
