"""This process among those that `accelerate launch` or torchrun started."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

from msa_lite.errors import MismatchError, UsageError

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
