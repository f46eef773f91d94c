"""The part of a step's rows that one process runs: all rows in a fit by one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from msa_lite.data import Example, group_rows
from msa_lite.train.reference import freeze_copy

_T = TypeVar("_T")


@dataclass(frozen=True)
class StepShare:
    """The part of a step that this process runs. Here there is one process, which runs all; several have a
    `shards.ShardShare` each."""

    rank: int = 0
    """The number of the process, from 0."""
    count: int = 1
    """The number of processes."""

    @property
    def is_whole(self) -> bool:
        """True where the process has the whole model, and runs all rows."""
        return True

    def passes(self, lengths: Sequence[int], budget: int, per_pass: int) -> list[list[int]]:
        """Return the passes of this process over a step's rows, as places in `lengths`.

        lengths, budget, per_pass: as in `group_rows`. All processes have equally many passes: some may be empty.
        """
        if self.is_whole:
            return group_rows(lengths, budget, per_pass)
        return deal(range(len(lengths)), lengths, self.count, budget, per_pass)[self.rank]

    def forward(self, model: Any, work: Callable[[], _T]) -> _T:
        """Run forward passes of the model, up to a loss for one backward pass; return what `work` returns."""
        return work()

    def freeze(self, model: Any, layers: int | None = None) -> Any:
        """Copy the model as it is now, or only its first layers, to be a reference."""
        return freeze_copy(model, layers)

    def in_first(self, work: Callable[[], _T]) -> _T:
        """Run the work in the first process; return its result in all of them."""
        return work()


ALONE = StepShare()


def deal(
    rows: Sequence[int], lengths: Sequence[int], count: int, budget: int, per_pass: int = 0
) -> list[list[list[int]]]:
    """Return the passes of each process for a step's rows, equally many for all; an empty one has no row to run.

    lengths: tokens of each row of the data. budget, per_pass: as in `group_rows`. The rows go round the processes by
    length, so that all have about the same work.
    """
    by_length = sorted(rows, key=lambda row: -lengths[row])
    passes = []
    for rank in range(count):
        hand = by_length[rank::count]
        groups = group_rows([lengths[row] for row in hand], budget, per_pass)
        passes.append([[hand[i] for i in group] for group in groups])
    most = max(1, *map(len, passes))
    return [[*hand, *([] for _ in range(most - len(hand)))] for hand in passes]


def run_passes(
    share: StepShare,
    model: Any,
    passes: Sequence[Sequence[int]],
    spare: int,
    loss: Callable[[Sequence[int]], Any],
    backward: Callable[[Any], None],
) -> Any:
    """Run passes, each forward and backward; return their summed, detached loss.

    loss: takes the rows of a pass; returns their part of the step's loss. spare: the row of an empty pass, which counts
    for nothing, but all processes have to make equally many passes.
    """
    total: Any = 0.0
    for rows in passes:
        value = share.forward(model, lambda rows=rows: loss(rows or [spare]))  # type: ignore[misc]
        value = value if rows else 0 * value
        backward(value)
        total = total + value.detach()
    return total


def shortest(examples: Sequence[Example], labels: Sequence[int]) -> int:
    """Return the place of the shortest example that has labels; 0 where none has. labels: of each example."""
    labelled = [place for place, count in enumerate(labels) if count]
    return min(labelled, key=lambda place: len(examples[place].ids), default=0)
