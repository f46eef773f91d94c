"""Protocols for what a caller may add to a fit: an objective in place of the plain loss, and a choice of epochs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol


class Objective(Protocol):
    """A function to minimise in place of the plain loss of the examples."""

    @property
    def longest(self) -> int:
        """Return the tokens of the longest row that `step` may run."""

    def describe(self) -> dict[str, Any]:
        """Return what the manifest records. Two objectives are the same when this is equal."""

    def prepare(self, model: Any) -> None:
        """Keep what is needed of the loaded model before it changes; called at every start, of a resumed fit too."""

    def release(self) -> None:
        """Free what `prepare` kept. The fit is over, or begins again with another model because memory ran out."""

    def step(self, model: Any, rows: Sequence[int], epoch: int, micro: int, backward: Callable[[Any], None]) -> Any:
        """Run the forward and backward passes of one optimiser step; return the detached loss.

        model: as `prepare` got it, perhaps wrapped. rows: indices of examples. epoch: counted from 0. micro: so many of
        the longest rows fit into memory. A pass may hold more rows, but not more tokens, padding included.
        """


class KeptEpochs(NamedTuple):
    """The decision after an epoch."""

    epochs: frozenset[int]
    """Epochs whose weights to keep so far, counted from 1."""
    go_on: bool = True
    """False to end the training."""


class AfterEpoch(Protocol):
    """Choose after each epoch which epochs' weights to keep, and whether to train on."""

    def describe(self) -> Any:
        """Return what the manifest records, JSON-able. Two that decide alike return the same."""

    def __call__(self, model: Any, epoch: int, scores: Path) -> KeptEpochs:
        """Decide from the model after this many epochs, in eval mode. scores: a folder for files, kept in the vector's.

        After a stop it is called again for the last epoch, with the folder as it was left and perhaps another model.
        Then it must decide from the files.
        """
