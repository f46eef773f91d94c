"""The processes of one fit: who is who, how they agree, and how a lost one is told."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from msa_lite.errors import MismatchError, MsaError, StageError, join_faults
from msa_lite.io.files.writing import digest
from msa_lite.io.models.devices import is_out_of_memory

_T = TypeVar("_T")

_LOST = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "socket timeout", "tcpstore")


@dataclass(frozen=True)
class Peers:
    """This process among those of a fit.

    Tensors go over the default group of torch.distributed. Decisions of one process go over a second group, on the CPU.
    There the others may wait for hours, and notice at once when a process dies.
    """

    rank: int
    """Its number, from 0. The first one writes the files."""
    count: int
    """The number of processes."""
    device: Any
    """The torch.device of its share of the model."""
    talk: Any
    """The group on the CPU."""

    @classmethod
    def join(cls) -> Peers:
        """Return the peers of this process; all of them call it. torch.distributed must be initialised."""
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        device = torch.device("cpu")
        if "cuda:nccl" in dist.get_backend_config():
            local = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
            device = torch.device("cuda", local % torch.cuda.device_count())
            torch.cuda.set_device(device)
        # Long: the first process may measure a large target, or write a large model.
        talk = dist.new_group(backend="gloo", timeout=timedelta(days=2))
        return cls(dist.get_rank(), dist.get_world_size(), device, talk)

    def leave(self) -> None:
        """Give the CPU's group up."""
        import torch.distributed as dist

        dist.destroy_process_group(self.talk)

    @property
    def first(self) -> bool:
        """True for the process that writes files."""
        return self.rank == 0

    def from_first(self, value: Any = None) -> Any:
        """Return the value that the first process has, in all of them."""
        import torch.distributed as dist

        box = [value if self.first else None]
        dist.broadcast_object_list(box, 0, group=self.talk)
        return box[0]

    def in_first(self, work: Callable[[], _T]) -> _T:
        """Run the work in the first process; return its result, or raise its MsaError, in all of them."""
        result: Any = None
        error: MsaError | None = None
        if self.first:
            try:
                result = work()
            except MsaError as failure:
                error = failure
        result, error = self.from_first((result, error))
        if error is not None:
            raise error
        return result

    def collect(self, value: Any) -> list[Any]:
        """Return the values of all processes, by rank."""
        import torch.distributed as dist

        values = [None] * self.count
        dist.all_gather_object(values, value, group=self.talk)
        return values

    def sum(self, value: Any) -> Any:
        """Return the sum of a tensor over all processes."""
        import torch.distributed as dist

        dist.all_reduce(value)
        return value

    def check_same(self, inputs: Mapping[str, Any]) -> None:
        """Raise MismatchError, in all processes, where their inputs differ."""
        hashes = self.collect({name: digest(value) for name, value in inputs.items()})
        faults = [
            f"{name}: not the same in process {rank} as in process 0"
            for rank, of_rank in enumerate(hashes)
            for name in sorted(hashes[0].keys() | of_rank.keys())
            if hashes[0].get(name) != of_rank.get(name)
        ]
        if faults:
            raise MismatchError(
                join_faults(
                    "the processes of this fit have different inputs; give each machine the same recipe and files:",
                    faults,
                )
            )


@contextmanager
def told_of_losses(label: str) -> Iterator[None]:
    """Raise StageError in the place of the errors that follow the death of another process."""
    import torch.distributed as dist

    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):  # NCCL's words for it name NCCL, too
            raise
        if not (isinstance(error, dist.DistError) or any(word in str(error).lower() for word in _LOST)):
            raise
        raise StageError(
            f"{label}: another process of this fit has stopped, so this one stops too; its own message says why. Run "
            f"the same command again to go on after the last save ({' '.join(str(error).split())[:200]})"
        ) from error
