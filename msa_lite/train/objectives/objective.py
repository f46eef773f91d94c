"""What a fit minimises: the interface of objectives, their terms, and the division of a step's rows among processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

from msa_lite.data import Example, group_rows, pass_tokens
from msa_lite.train.objectives.reference import freeze_copy

_T = TypeVar("_T")
Backward: TypeAlias = Callable[[Any], None]
"""Runs the backward pass of a loss."""


@dataclass(frozen=True)
class Division:
    """The division of a step's rows among the processes of a fit.

    Here there is one process, which has the whole model and runs all rows. Several have a `ShardedDivision` each.
    """

    is_whole: bool = True
    """True where this process has the whole model."""

    def passes(self, lengths: Sequence[int], budget: int, per_pass: int) -> list[list[int]]:
        """Return the passes of this process over a step's rows, as places in `lengths`.

        lengths, budget, per_pass: as in `group_rows`. All processes have equally many passes: some may be empty.
        """
        return group_rows(lengths, budget, per_pass)

    def forward(self, model: Any, work: Callable[[], _T]) -> _T:
        """Run forward passes of the model, up to a loss for one backward pass; return what `work` returns."""
        return work()

    def freeze(self, model: Any, layers: int | None = None) -> Any:
        """Copy the model as it is now, or only its first layers, to be a reference."""
        return freeze_copy(model, layers)

    def pool(self, values: dict[int, _T]) -> dict[int, _T]:
        """Return the entries of all processes, which all call this."""
        return values

    def in_first(self, work: Callable[[], _T]) -> _T:
        """Run the work in the first process; return its result in all of them."""
        return work()


ALONE = Division()


class Objective(Protocol):
    """A function to minimise in place of the plain loss of the examples."""

    @property
    def longest(self) -> int:
        """Return the tokens of the longest row that `step` may run."""

    def describe(self) -> dict[str, Any]:
        """Return what the manifest records. Two objectives are the same when this is equal."""

    def prepare(self, model: Any, division: Division = ALONE) -> None:
        """Keep what is needed of the loaded model before it changes; called at every start, of a resumed fit too."""

    def release(self) -> None:
        """Free what `prepare` kept. The fit is over, or begins again with another model because memory ran out."""

    def step(self, model: Any, rows: Sequence[int], epoch: int, micro: int, backward: Backward) -> Any:
        """Run the forward and backward passes of one optimiser step; return the detached loss.

        model: as `prepare` got it, perhaps wrapped. rows: indices of examples. epoch: counted from 0. micro: so many of
        the longest rows fit into memory. A pass may hold more rows, but not more tokens, padding included. Of several
        processes, each gets all rows of the step, runs its share of them, and returns its part of the loss.
        """


@dataclass(frozen=True)
class LossTerm:
    """A part of an objective: `weight` times the mean of a loss over the units of some rows."""

    examples: Sequence[Example]
    weight: float
    count: Callable[[Example], int]
    """Counts a row's units: labels, tokens, or 1 for a mean over rows."""
    loss: Callable[[Any, Sequence[int]], Any]
    """Returns the mean over the units of a pass, from the model and the indices of its rows."""
    passes: int = 1
    """The sequences that one row takes up of a micro-batch."""
    beside: Sequence[Sequence[Example]] = ()
    """Other examples of each row, which run in batches of the same rows."""

    def run(
        self, model: Any, rows: Sequence[int], micro: int, longest: int, backward: Backward, division: Division
    ) -> Any:
        """Run this process's share of `rows`, pass by pass, each with its backward pass; return its detached value.

        longest: the tokens that each of `micro` rows may have.
        """
        examples = [self.examples[i] for i in rows]
        counts = [self.count(example) for example in examples]
        lengths = [max(len(others[i].ids) for others in (self.examples, *self.beside)) for i in rows]
        passes = division.passes(lengths, max(1, micro // self.passes) * longest, pass_tokens(model.device))

        def loss(places: Sequence[int]) -> Any:
            part = sum(counts[i] for i in places) / sum(counts)
            return self.weight * part * self.loss(model, [rows[i] for i in places])

        return run_passes(division, model, passes, shortest(examples, counts), loss, backward)


def run_passes(
    division: Division,
    model: Any,
    passes: Sequence[Sequence[int]],
    spare: int,
    loss: Callable[[Sequence[int]], Any],
    backward: Backward,
) -> Any:
    """Run passes, each forward and backward; return their summed, detached loss.

    loss: takes the rows of a pass; returns their part of the step's loss. spare: the row of an empty pass, which counts
    for nothing, but all processes have to make equally many passes.
    """
    total: Any = 0.0
    for rows in passes:
        value = division.forward(model, lambda rows=rows: loss(rows or [spare]))  # type: ignore[misc]
        value = value if rows else 0 * value
        backward(value)
        total = total + value.detach()
    return total


def shortest(examples: Sequence[Example], counts: Sequence[int]) -> int:
    """Return the place of the shortest example that counts; 0 where none does. counts: of each example."""
    places = [place for place, count in enumerate(counts) if count]
    return min(places, key=lambda place: len(examples[place].ids), default=0)


def draw_rows(count: int, rows: int, seed: int, epoch: int) -> np.ndarray:
    """Draw (count,) of so many retain rows, uniformly with replacement, from a generator of each epoch's own."""
    return np.random.default_rng((seed, epoch)).integers(rows, size=count)
