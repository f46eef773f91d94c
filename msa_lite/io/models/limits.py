"""Bound the time and memory of code that comes with a model: chat templates, and patterns of adapters."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SECONDS = 1.0  # of processor time, which other work on the machine does not use up
_MEMORY = 256 << 20  # bytes beyond those that the process has


class OverrunError(Exception):
    """Raised where code under `limited` took too long."""


@contextmanager
def limited(seconds: float = SECONDS) -> Iterator[None]:
    """Raise OverrunError where the block takes more processor time, MemoryError where it takes 256 MB more memory.

    Python can interrupt itself only in the main thread; in others nothing is bounded. Memory is bounded on Linux.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    end = time.thread_time() + seconds

    def check(number: int, frame: FrameType | None) -> None:
        if time.thread_time() > end:  # the signal counts what other threads use as well
            raise OverrunError(f"took more than {seconds:g} s")

    handler = signal.signal(signal.SIGVTALRM, check)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds / 4, seconds / 4)
    bound = _bound_memory()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)
        if bound is not None:
            import resource

            resource.setrlimit(resource.RLIMIT_AS, bound)


def _bound_memory() -> tuple[int, int] | None:
    """Bound the memory of the process; return the bound from before, or None where nothing was changed."""
    try:
        import resource

        with open("/proc/self/statm", encoding="ascii") as stream:
            used = int(stream.read().split()[0]) * resource.getpagesize()
        soft, hard = before = resource.getrlimit(resource.RLIMIT_AS)
        limit = used + _MEMORY
        if any(0 <= bound < limit for bound in (soft, hard)):
            return None
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    except (ImportError, OSError, ValueError):  # no Linux
        return None
    return before
