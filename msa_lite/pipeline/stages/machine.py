"""The place where stages run, and how long work takes there: by measured steps where there are some, else estimates."""

from __future__ import annotations

from dataclasses import dataclass

from msa_lite.budget.shape import Shape
from msa_lite.budget.speed import (
    Device,
    Measured,
    Speed,
    fit_seconds,
    optimizer_seconds,
    score_seconds,
    speed_of,
    stream_seconds,
    token_operations,
)
from msa_lite.io.models.devices import host_memory
from msa_lite.train.rungs import Rung

# Times may be off by these factors, either way. Measured ones: by programs beside it, and answers of other lengths.
_OFF_MEASURED, _OFF_ESTIMATED = 1.4, 2.0
_BEGIN = 1.5  # seconds that a stage takes beside loading, work and saving: it hashes, seals, and sets a trainer up
_BATCH = 64  # questions
_SAVED = 5e8  # bytes a second that saves are written at, hashes included
_LOADED = 1e9  # bytes a second that a model is loaded at


@dataclass(frozen=True)
class Machine:
    """The place where stages run."""

    device: Device
    """The device that tunes and scores."""
    processes: int = 1
    """Those that share a fit of all weights."""
    measured: Measured | None = None
    """Times in the place of estimates."""

    @property
    def speed(self) -> Speed:
        """Return the speed of the device."""
        return speed_of(self.device)

    @property
    def host(self) -> int | None:
        """Return the bytes of RAM; None where they are not known, as for another machine's GPU."""
        return host_memory() if self.device.name else None

    def span(self, least: float, most: float | None = None) -> tuple[float, float]:
        """Return the shortest and the longest time of work that should take so many seconds. most: `least` if None."""
        factor = _OFF_MEASURED if self.measured else _OFF_ESTIMATED
        return least / factor, (least if most is None else most) * factor

    def begin_seconds(self, shape: Shape) -> float:
        """Return the seconds that a stage takes before and after its work on a model of this shape."""
        scores = self.measured.scores if self.measured else None
        return _BEGIN + (scores.load if scores else shape.stored / _LOADED)

    def save_seconds(self, nbytes: float) -> float:
        """Return the seconds of saving so many bytes."""
        return nbytes / _SAVED

    def pass_seconds(self, shape: Shape, mode: str, rung: Rung, tokens: float, rows: float, name: str | None) -> float:
        """Return the seconds of forward and backward passes over rows with so many tokens. name: the fit's vector."""
        times = self.measured.fit(name) if self.measured else None
        if times is None:
            passes = -(-rows // rung.micro)
            return fit_seconds(shape, mode, rung.checkpointing, tokens, self.speed, passes)
        assert self.measured is not None
        ratio = token_operations(mode, rung.checkpointing) / token_operations(
            self.measured.mode, times.rung.checkpointing
        )
        return tokens * times.token * ratio

    def step_seconds(self, mode: str, trained: int, name: str | None) -> float:
        """Return the seconds of an optimiser step over so many weights."""
        times = self.measured.fit(name) if self.measured else None
        if self.measured and times and self.measured.mode == mode:
            return times.step
        return optimizer_seconds(trained, self.speed)

    def ask_seconds(self, shape: Shape, questions: float, tokens: float, new_tokens: float, streamed: int = 0) -> float:
        """Return the seconds of scoring questions with so many tokens in all, and of answers with so many in all."""
        if self.measured and (times := self.measured.scores):
            return tokens * times.token + new_tokens * times.new_token
        each, answer = (total / max(1.0, questions) for total in (tokens, new_tokens))
        seconds = score_seconds(shape, questions, each, answer, _BATCH, self.speed)
        return seconds + stream_seconds(streamed, questions, each, answer, _BATCH, self.host)
