"""Gather the processes of a launcher, agree on the inputs, and stop when another one has failed, ended or died."""

from __future__ import annotations

import logging
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from msa_lite.errors import MismatchError, MsaError, StageError, UsageError, join_faults
from msa_lite.io.files.writing import digest
from msa_lite.io.launch.crew import Crew, Ranks, as_error, comes_true, stand_alone

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


PREPARE = "prepare"  # the order to prepare the run
_MEET = 600.0  # seconds until all processes have to be there
_LEAVE = 5.0  # seconds that the first process waits for the others at the end
_LISTEN = 60.0  # seconds that a follower that failed waits until the first process has heard of it
_TELL = 2.0  # seconds until a follower that failed has told why
_KILLED = (
    "this process was told to end (SIGTERM); a launcher does that when another of its processes died or was stopped"
)
_RESUME = "finished stages stay, the same command resumes"


@contextmanager
def gathered(inputs: Any) -> Iterator[Crew]:
    """Gather the processes of the launcher for one run. Without a launcher, give a crew of one.

    inputs: what all of them have to start from, JSON-able. In the first process, raise MismatchError where they differ,
    a follower's error where that failed, and StageError where it died. In a follower, an error ends the block, and is
    not raised again: the first process raises it.
    """
    ranks = Ranks.current()
    if ranks.count == 1:
        yield Crew()
        return
    store = _connect()
    stand_alone()
    crew = Crew(ranks, store)
    others = range(1, ranks.count) if crew.first else [0]
    heartbeat = Heartbeat(store.clone(), ranks.rank, others, crew.news)
    with stoppable():
        heartbeat.start()
        try:
            _greet(crew, digest(inputs))
            yield crew
        except BaseException as error:
            heartbeat.end()
            end = _end_first if crew.first else _end_other
            cause = end(crew, error, heartbeat.reason)
            if cause is None:
                return
            if cause is error:
                raise
            raise cause from error
        heartbeat.end()
        _leave(crew)


def agree(crew: Crew, prepare: Callable[[], Mapping[str, Any]]) -> None:
    """Have the other processes prepare the run, too, and compare what all of them prepared.

    prepare: returns what the run starts from, JSON-able, by name. A follower does the same for the order `PREPARE`.
    Raise MismatchError where it differs, in this first process.
    """
    if crew.is_alone:
        return
    with crew.helped(PREPARE) as others:
        own = prepare()
    _check_alike(own, others)


def _check_alike(own: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> None:
    """Raise MismatchError unless the other processes, in the order of their ranks, have the same as this first one."""
    faults = []
    for rank, other in enumerate(others, start=1):
        if differing := [name for name, value in own.items() if other.get(name) != value]:
            faults.append(f"process {rank}: {', '.join(differing)}")
    if faults:
        raise MismatchError(
            join_faults("these processes start from other inputs than the first one:", faults)
            + "\nare the recipe, the files at its paths, and the package versions the same on all machines?"
        )


def _connect() -> Any:
    """Return the launcher's store. Raise UsageError where it cannot be reached."""
    from torch.distributed.rendezvous import rendezvous

    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=_MEET)))
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"WORLD_SIZE says that there are several processes, but their store cannot be reached ({error}); start "
            "them with accelerate launch or torchrun"
        ) from error
    return store


def _greet(crew: Crew, inputs: str) -> None:
    """Tell the first process who is here; there, wait for all, and compare what they start from."""
    import torch

    gpu = os.environ.get("CUDA_VISIBLE_DEVICES") if torch.cuda.device_count() else None
    greeting = {"host": platform.node(), "gpu": gpu, "recipe": inputs}
    if not crew.first:
        crew.put(f"hello/{crew.ranks.rank}", greeting)
        return
    try:
        others = [crew.wait_for(f"hello/{rank}", limit=_MEET) for rank in range(1, crew.ranks.count)]
    except TimeoutError as error:
        raise StageError(f"not all of {crew.ranks.count} processes have come within {_MEET:.0f} s") from error
    gpus = [(member["host"], member["gpu"]) for member in (greeting, *others) if member["gpu"] is not None]
    crew.own_gpus = len(gpus) == len(set(gpus))
    _check_alike({"recipe": inputs}, others)


def _end_first(crew: Crew, error: BaseException, reason: str | None) -> BaseException:
    """End the run of all processes after an error of the first one. Return the error to raise."""
    message: dict[str, Any] | None = None
    with suppress(Exception):  # the store may be what has failed
        # A collective breaks before the follower that failed can tell why.
        if comes_true(lambda: crew.has("failed"), 0.0 if isinstance(error, MsaError) else _TELL):
            message = crew.get("failed")
    _leave(crew, failed=True)
    if isinstance(error, MsaError) or (isinstance(error, KeyboardInterrupt) and not isinstance(error, Stopped)):
        return error
    if message is not None:
        return as_error(message)
    return StageError(f"{reason or _KILLED}; {_RESUME}") if isinstance(error, Stopped) else error


def _end_other(crew: Crew, error: BaseException, reason: str | None) -> BaseException | None:
    """Tell the first process of an error of this one. Return the error to raise here, where that one cannot."""
    if isinstance(error, Stopped):
        with suppress(Exception):
            if crew.has("ended"):
                reason = None
                crew.put(f"bye/{crew.ranks.rank}", True)
        return StageError(f"{reason}; {_RESUME}") if reason else None
    is_known = False
    with suppress(Exception):
        if isinstance(error, Exception):
            crew.put("failed", _as_message(error, crew.ranks.rank))
            is_known = comes_true(lambda: crew.has("ended"), _LISTEN)
        crew.put(f"bye/{crew.ranks.rank}", True)
    return None if is_known else error


def _leave(crew: Crew, failed: bool = False) -> None:
    """End the run for all. The first process waits a moment for the others: it may be the one that holds the store."""
    with suppress(Exception):
        if not crew.first:
            crew.put(f"bye/{crew.ranks.rank}", True)
            return
        crew.put("ended", {"failed": failed})
        comes_true(lambda: all(crew.has(f"bye/{rank}") for rank in range(1, crew.ranks.count)), _LEAVE)


def _as_message(error: Exception, rank: int) -> dict[str, Any]:
    """Return an error of a follower, JSON-able."""
    if isinstance(error, MsaError):
        return {"code": error.exit_code, "text": f"process {rank}: {error}"}
    text = f"process {rank}: {type(error).__name__}: {error} (this was not expected and may be a bug)"
    return {"code": StageError.exit_code, "text": text}
