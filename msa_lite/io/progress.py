"""How long work tells how far it is: a plain callback, so that no stage knows about terminals."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called as progress(label, done, total); a label's last call has done == total."""


def silent(label: str, done: int, total: int) -> None:
    """The default: say nothing."""


def readable(nbytes: float) -> str:
    """Bytes for people: "2.47 GB", "18 kB"."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} bytes"


def part_of(progress: Progress, label: str, before: int, total: int) -> Progress:
    """A callback for one part of a longer piece of work, of which `before` steps of `total` come first."""
    return lambda _, done, __: progress(label, before + done, total)
