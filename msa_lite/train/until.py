"""The rules of an open-ended fit: the loss to reach, when to stop, and at which rate to try again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from msa_lite.data import IGNORE, Example, to_batch
from msa_lite.errors import NotFiniteError
from msa_lite.io.heads import split_model
from msa_lite.io.hub import Source
from msa_lite.io.memory import free_memory
from msa_lite.io.precision import autocast
from msa_lite.train.beginnings import label_states, run_rows

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
