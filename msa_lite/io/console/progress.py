"""Report how far work has come, through a plain callback, so that no stage knows about terminals."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

notices = logging.getLogger("msa_lite.notices")
"""Lines that everybody should see, such as the prompt in use; at level INFO."""

Progress = Callable[[str, int, int], None]
"""A callback progress(label, done, total). In a label's last call, done equals total."""


@dataclass(frozen=True)
class Step:
    """One step of a run, announced when the run starts."""

    label: str
    purpose: str = ""
    """What it is for, in a clause."""


class Watcher(ABC):
    """A Progress that also takes notes, such as the loss, and the steps of a run before it starts."""

    @abstractmethod
    def __call__(self, label: str, done: int, total: int, note: str = "") -> None:
        """Show how far a label has come. note: a remark on it ("loss 0.31")."""

    @abstractmethod
    def announce(self, steps: Sequence[Step]) -> None:
        """Take the steps to come, in their order. Steps that are finished already are never called.

        A list with steps that were announced before, and have not begun, belongs to the same count.
        """


def silent(label: str, done: int, total: int) -> None:
    """Show nothing: the default."""


def tell(progress: Progress, label: str, done: int, total: int, note: str) -> None:
    """Call a Progress with a note, which only a Watcher takes."""
    if isinstance(progress, Watcher):
        progress(label, done, total, note)
    else:
        progress(label, done, total)


def announce(progress: Progress, steps: Sequence[Step]) -> None:
    """Announce the steps of a run to a Watcher; tell any other Progress nothing."""
    if isinstance(progress, Watcher):
        progress.announce(steps)


def readable(nbytes: float) -> str:
    """Format bytes for people: "2.47 GB", "18 kB"."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} bytes"


def duration(seconds: float) -> str:
    """Format a time for people: "8 s", "3 min", "2 h 5 min"."""
    if round(seconds) < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def about(seconds: float | None) -> str:
    """Format a predicted time for people: "about 20 min"; a question mark for None."""
    return "?" if seconds is None else f"about {duration(max(1.0, seconds))}"


def under(progress: Progress, label: str) -> Progress:
    """Return a callback that shows work under this label, whatever its own."""
    return lambda _, done, total: progress(label, done, total)


def part_of(progress: Progress, label: str, before: int, total: int) -> Progress:
    """Return a callback for one part of longer work, of which `before` of `total` units come first."""
    return lambda _, done, __: progress(label, before + done, total)


@contextmanager
def muted() -> Iterator[None]:
    """Leave out warnings and notices in the block: another part, or the first process, has the same and shows them."""
    levels = [(logger, logger.level) for logger in (logging.getLogger("msa_lite"), notices)]
    for logger, _ in levels:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in levels:
            logger.setLevel(level)
