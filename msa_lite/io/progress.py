"""How long work tells how far it is: a plain callback, so that no stage knows about terminals."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

notices = logging.getLogger("msa_lite.notices")
"""Lines that everybody is to see, such as the prompt that is used; at level INFO."""

Progress = Callable[[str, int, int], None]
"""Called as progress(label, done, total); a label's last call has done == total."""


@dataclass(frozen=True)
class Step:
    """One step of a longer job, as it is announced at the job's start.

    kind: steps of one kind take as long for each unit of `amount` ("fit": rows · epochs, "score": questions).
    """

    label: str
    kind: str
    amount: float = 1.0


class Watcher(ABC):
    """A Progress that also takes notes, such as the loss, and the steps of a job before it starts."""

    @abstractmethod
    def __call__(self, label: str, done: int, total: int, note: str = "") -> None:
        """Show how far the label is; note: what else there is to say of it by now ("loss 0.31")."""

    @abstractmethod
    def announce(self, steps: Sequence[Step]) -> None:
        """Take the steps that are to come, in their order. Those that are finished already are never called."""


def silent(label: str, done: int, total: int) -> None:
    """The default: say nothing."""


def tell(progress: Progress, label: str, done: int, total: int, note: str) -> None:
    """Call a Progress with a note, which only a Watcher takes."""
    if isinstance(progress, Watcher):
        progress(label, done, total, note)
    else:
        progress(label, done, total)


def announce(progress: Progress, steps: Sequence[Step]) -> None:
    """Announce a job's steps; a Progress that is no Watcher does without."""
    if isinstance(progress, Watcher):
        progress.announce(steps)


def readable(nbytes: float) -> str:
    """Bytes for people: "2.47 GB", "18 kB"."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} bytes"


def duration(seconds: float) -> str:
    """A time for people: "8 s", "3 min", "2 h 5 min"."""
    if round(seconds) < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def part_of(progress: Progress, label: str, before: int, total: int) -> Progress:
    """A callback for one part of a longer piece of work, of which `before` steps of `total` come first."""
    return lambda _, done, __: progress(label, before + done, total)
