"""Notice that another process has failed, ended or died, and stop this one, whatever it is doing."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)

_BEAT = 2.0  # seconds between two signs of life
_SILENCE = 30.0  # seconds without one, after which a process counts as dead
_AGAIN = 0.05  # seconds until a signal that came to nothing is sent again
_GRACE = 15.0  # seconds to stop in order; a process that hangs in a collective is ended then


class Stopped(KeyboardInterrupt):
    """Raised in the main thread to stop its work, as Ctrl-C does. No handler of a library keeps it."""


class Heartbeat(threading.Thread):
    """A thread that gives a sign of life, and watches those of others.

    store: a connection that no other thread uses. news: called as news(store); returns why this process has to stop,
    or None.
    """

    def __init__(self, store: Any, rank: int, others: Collection[int], news: Callable[[Any], str | None]) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._store, self._rank, self._others, self._news = store, rank, others, news
        self._ended = threading.Event()
        self.reason: str | None = None
        """The reason to stop, once there is one."""

    def run(self) -> None:
        """Beat and watch until `end` is called; then, or after a fault, do no more."""
        beats: dict[int, tuple[int, float]] = {}  # the count of beats of the others, and when it last changed
        while not self._ended.wait(_BEAT):
            try:
                self._store.add(f"beat/{self._rank}", 1)
                reason = self._news(self._store) or self._silence(beats)
            except Exception as error:
                reason = f"the launcher's store does not answer any more ({error})"
            if reason and not self._ended.is_set():
                self.reason = reason
                self._stop_main()
                return

    def _silence(self, beats: dict[int, tuple[int, float]]) -> str | None:
        now = time.monotonic()
        for rank in self._others:
            count = self._store.add(f"beat/{rank}", 0)
            if rank not in beats or beats[rank][0] != count:
                beats[rank] = count, now
            if now - beats[rank][1] > _SILENCE:
                return f"process {rank} has given no sign of life for {_SILENCE:.0f} s; it, or its machine, has died"
        return None

    def _stop_main(self) -> None:
        """Stop the main thread; end the process when that does not help."""
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        if not self._ended.wait(_GRACE):
            logger.critical("%s; finished stages stay, the same command resumes", self.reason)
            os._exit(4)

    def end(self) -> None:
        """Stop beating and watching."""
        self._ended.set()


@contextmanager
def stoppable() -> Iterator[None]:
    """Let SIGTERM raise `Stopped` in the block, once. It does so in the main thread alone, where signals arrive.

    Python drops what is raised in a finaliser (`__del__`), where a signal may arrive, too. Then it is sent again.
    """
    main = threading.main_thread()
    if threading.current_thread() is not main:
        yield
        return

    def stop(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a launcher sends it again while this one cleans up
        raise Stopped

    def note_dropped(fault: Any) -> None:
        if not isinstance(fault.exc_value, Stopped):
            hook(fault)
            return
        signal.signal(signal.SIGTERM, stop)
        threading.Timer(_AGAIN, signal.pthread_kill, (main.ident, signal.SIGTERM)).start()

    before, hook = signal.signal(signal.SIGTERM, stop), sys.unraisablehook
    sys.unraisablehook = note_dropped
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        sys.unraisablehook = hook
