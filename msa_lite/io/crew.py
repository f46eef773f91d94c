"""Let the processes that a launcher started work on one run: the first leads, the others do what it orders.

Orders, results and signs of life go through the launcher's store, a small table of keys and texts in the memory of one
process. Nothing of an earlier run can lie in it. Models, records and reports are files in the run's folder, which all
processes see. For a stage that needs collectives, the processes join a torch.distributed group and leave it again.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from types import MappingProxyType
from typing import Any

from msa_lite.errors import MismatchError, MsaError, StageError, UsageError
from msa_lite.io.progress import Step, Watcher
from msa_lite.io.ranks import Ranks

_POLL = 0.05  # seconds
_OFTEN = 0.5  # seconds between two messages on progress
_HANG = timedelta(hours=12)  # of a collective: the first process may write a large model; who dies is noticed earlier

Task = Callable[[str, dict[str, Any]], Any]
"""A follower's function task(name, arguments). It returns a result that JSON can hold."""


class Crew:
    """The processes at work on one run, seen from one of them. A process without a launcher is a crew of one."""

    def __init__(self, ranks: Ranks = Ranks(), store: Any = None) -> None:
        self.ranks = replace(ranks, meeting=self._meet)
        """Number and count, with a barrier of the crew."""
        self.own_gpus = True
        """True if no two processes share a GPU; known to the first process."""
        self._store = store
        self._orders = self._meetings = self._groups = 0
        self._is_busy = False

    @property
    def is_alone(self) -> bool:
        """True for a crew of one."""
        return self.ranks.count == 1

    @property
    def first(self) -> bool:
        """True for the process that leads."""
        return self.ranks.first

    @contextmanager
    def helped(
        self, task: str, arguments: Mapping[str, Any] = MappingProxyType({}), waiting: Callable[[], None] = lambda: None
    ) -> Iterator[list[Any]]:
        """Have the other processes do a task while the block runs, and wait for them at its end.

        Give a list that their results are in afterwards. arguments: JSON-able. waiting: called now and then until they
        are done.
        """
        results: list[Any] = []
        if self.is_alone:
            yield results
            return
        self._orders += 1
        number = self._orders
        self.put(f"order/{number}", {"task": task, "arguments": dict(arguments)})
        yield results
        for rank in range(1, self.ranks.count):
            results.append(self.wait_for(f"done/{number}/{rank}", waiting))

    def follow(self, task: Task) -> None:
        """Do what the first process orders, until it has ended its run."""
        while True:
            number = self._orders + 1
            while not self.has(f"order/{number}"):
                if self.has("ended"):
                    return
                time.sleep(_POLL)
            self._orders = number
            order = self.get(f"order/{number}")
            self._is_busy = True
            result = task(order["task"], order["arguments"])
            self._is_busy = False
            self.put(f"done/{number}/{self.ranks.rank}", result)

    def shared_progress(self) -> Watcher:
        """Return a Progress with which a follower tells the first process how far it is in its task."""
        return _Shared(lambda value: self.put(f"progress/{self._orders}/{self.ranks.rank}", value))

    def progress_of(self, rank: int) -> tuple[int, int, str] | None:
        """Return done, total and note of a follower at the latest task; None before it has any."""
        key = f"progress/{self._orders}/{rank}"
        return tuple(self.get(key)) if self.has(key) else None

    @contextmanager
    def group(self) -> Iterator[None]:
        """Join all processes into a torch.distributed group for one stage, and leave it afterwards.

        Every process has to enter it. After an error the group stays, since leaving it would wait for the others.
        """
        import torch
        from torch import distributed

        self._groups += 1
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=distributed.PrefixStore(f"group/{self._groups}", self._store.clone()),
            rank=self.ranks.rank,
            world_size=self.ranks.count,
            timeout=_HANG,
        )
        yield
        distributed.destroy_process_group()

    def _meet(self) -> None:
        """Wait until every process has come here."""
        self._meetings += 1
        key = f"meeting/{self._meetings}"
        self._store.add(key, 1)
        while self._store.add(key, 0) < self.ranks.count:
            time.sleep(_POLL)

    def wait_for(self, key: str, waiting: Callable[[], None] = lambda: None, limit: float = math.inf) -> Any:
        """Return the value of a key once it is there. Raise a follower's error, and TimeoutError."""

        def is_there() -> bool:
            waiting()
            if not self.has(key) and self.has("failed"):
                raise as_error(self.get("failed"))
            return self.has(key)

        if not comes_true(is_there, limit):
            raise TimeoutError
        return self.get(key)

    def news(self, store: Any) -> str | None:
        """Return why this process has to stop: a follower has failed, or the first process, while a follower works."""
        if self.first:
            return "another process has failed" if store.check(["failed"]) else None
        is_over = self._is_busy and store.check(["ended"])
        return "the first process has ended" if is_over and json.loads(store.get("ended"))["failed"] else None

    def put(self, key: str, value: Any) -> None:
        """Write a value into the store."""
        self._store.set(key, json.dumps(value))

    def get(self, key: str) -> Any:
        """Return a value that is there."""
        return json.loads(self._store.get(key))

    def has(self, key: str) -> bool:
        """Return True if the store has a value for this key."""
        return bool(self._store.check([key]))


class _Shared(Watcher):
    """A follower's progress, sent to the first process now and then."""

    def __init__(self, send: Callable[[tuple[int, int, str]], None]) -> None:
        self._send, self._last, self._note = send, -math.inf, ""

    def __call__(self, label: str, done: int, total: int, note: str = "") -> None:
        """Send how far the task is."""
        self._note = note or self._note
        if done < total and time.monotonic() - self._last < _OFTEN:
            return
        self._last = time.monotonic()
        self._send((done, total, self._note))

    def announce(self, steps: Sequence[Step]) -> None:
        """Announce nothing: the first process has done it."""


def comes_true(condition: Callable[[], bool], limit: float) -> bool:
    """Wait for a condition, so many seconds at most. Return whether it holds."""
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() >= end:
            return False
        time.sleep(_POLL)
    return True


def as_error(message: Mapping[str, Any]) -> MsaError:
    """Return an error like the one that a follower had."""
    kinds: dict[int, type[MsaError]] = {kind.exit_code: kind for kind in (UsageError, MismatchError, StageError)}
    return kinds[message["code"]](message["text"])
