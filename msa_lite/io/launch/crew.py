"""Processes that work on one job: who is who, and the orders that the first one gives to the others."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import MappingProxyType
from typing import Any

from msa_lite.errors import MismatchError, MsaError, StageError, UsageError

# The variables that tell a process its place in a group. LOCAL_WORLD_SIZE makes no group: it stays, for `free_ram`.
_GROUP = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Ranks:
    """This process among those that a launcher started."""

    rank: int = 0
    """Its number, from 0."""
    count: int = 1
    """The number of processes."""
    meeting: Callable[[], None] | None = field(default=None, compare=False, repr=False)
    """Waits until every process is here, where `accelerate` does not do it."""

    @classmethod
    def current(cls) -> Ranks:
        """Return the ranks of this process; a single one where nothing launched several, or it stands alone."""
        return cls(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))

    @property
    def first(self) -> bool:
        """True for the process that writes folders and prints."""
        return self.rank == 0

    def wait(self) -> None:
        """Wait until every process is here. Raise UsageError where they do not know of one another."""
        if self.count == 1:
            return
        if self.meeting is not None:
            self.meeting()
            return
        import torch
        from accelerate import PartialState

        # The others wait for as long as the first one asks a judge, which takes up to a day.
        state = PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(days=2))
        if state.num_processes != self.count:
            raise UsageError(
                f"WORLD_SIZE is {self.count}, but {state.num_processes} processes found together; start them with "
                "accelerate launch or torchrun"
            )
        state.wait_for_everyone()

    def check_same(self, inputs: str) -> None:
        """Raise MismatchError, in every process, unless all have the same inputs. inputs: a hash of them."""
        if self.count == 1:
            return
        self.wait()
        from accelerate.utils import gather_object

        others = [rank for rank, other in enumerate(gather_object([inputs])) if other != inputs]
        if others:
            raise MismatchError(
                f"process {self.rank} has another model, or asks other questions, than process "
                f"{' and '.join(map(str, others))}; are command and files the same on all machines?"
            )


def in_group() -> bool:
    """Return True while this process is in a torch.distributed group."""
    distributed = sys.modules.get("torch.distributed")  # without it, no group, and no seconds for the import
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def stand_alone() -> Ranks:
    """Take this process out of the group that a launcher made, for work in which processes meet in their own way.

    Otherwise the first fit would wait for all of them, and spread over them. Each process takes one GPU. It shares the
    GPU only where there are fewer GPUs than processes. Call this before CUDA starts. Return the ranks from before.
    """
    ranks = Ranks.current()
    if ranks.count > 1:
        local = int(os.environ.get("LOCAL_RANK", 0))
        if devices := _devices():
            os.environ["CUDA_VISIBLE_DEVICES"] = devices[local % len(devices)]
        for name in _GROUP:
            os.environ.pop(name, None)
    return ranks


def _devices() -> list[str]:
    """Return the GPUs as CUDA_VISIBLE_DEVICES names them; none where there is none, or the user has hidden them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        import torch

        return [str(number) for number in range(torch.cuda.device_count())]  # asks the driver; CUDA starts later
    return visible.split(",") if visible else []


_POLL = 0.05  # seconds
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
    def helped(self, task: str, arguments: Mapping[str, Any] = MappingProxyType({})) -> Iterator[list[Any]]:
        """Have the other processes do a task while the block runs, and wait for them at its end.

        Give a list that their results are in afterwards. arguments: JSON-able.
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
            results.append(self.wait_for(f"done/{number}/{rank}"))

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

    def wait_for(self, key: str, limit: float = math.inf) -> Any:
        """Return the value of a key once it is there. Raise a follower's error, and TimeoutError."""

        def is_there() -> bool:
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
