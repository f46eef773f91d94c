"""How long work tells how far it is: a plain callback, so that no stage knows about terminals."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called as progress(label, done, total); a label's last call has done == total."""


def silent(label: str, done: int, total: int) -> None:
    """The default: say nothing."""


def part_of(progress: Progress, label: str, before: int, total: int) -> Progress:
    """A callback for one part of a longer piece of work, of which `before` steps of `total` come first."""
    return lambda _, done, __: progress(label, before + done, total)
