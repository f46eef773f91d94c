"""How long work tells how far it is: a plain callback, so that no stage knows about terminals."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called as progress(label, done, total); a label's last call has done == total."""


def silent(label: str, done: int, total: int) -> None:
    """The default: say nothing."""
