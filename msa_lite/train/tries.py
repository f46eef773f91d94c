"""An open-ended fit: measure the target, tune the prior until it knows the rows as well, or try again at another rate.

Each try has its own folder in the vector's partial folder; only the best so far keeps its weights. The measured losses
lie beside them in course.json, so a rerun after a kill measures nothing twice and decides alike.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msa_lite.data import Example
from msa_lite.errors import NotFiniteError
from msa_lite.io.files import write_json
from msa_lite.io.manifest import discarded
from msa_lite.train.settings import FitSettings
from msa_lite.train.until import (
    NEAR,
    Course,
    Try,
    Until,
    measure_loss,
    measure_target,
    next_rate,
    sample_examples,
    why_stop,
)

logger = logging.getLogger(__name__)

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
