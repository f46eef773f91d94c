"""What a caller may put into a fit: an objective in the place of the plain loss, and a say after each epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol


class Objective(Protocol):
    """What a fit minimises in the place of the plain loss of its examples.

    longest: tokens of the longest row that `step` may run.
    """

    @property
    def longest(self) -> int: ...

    def describe(self) -> dict[str, Any]:
        """What the manifest records of it: two objectives are the same when this is equal."""

    def prepare(self, model: Any) -> None:
        """Take what is needed of the loaded model before it changes; called at every start, of a resumed fit too."""

    def release(self) -> None:
        """Let go of what was taken: the fit is over, or begins again with another model because memory ran out."""

    def step(self, model: Any, rows: Sequence[int], epoch: int, micro: int, backward: Callable[[Any], None]) -> Any:
        """Run forward and backward passes of at most `micro` rows for one optimiser step; the loss, detached.

        model: as `prepare` got it, perhaps wrapped. rows: indices of examples; epoch: counted from 0.
        """


class KeptEpochs(NamedTuple):
    """After an epoch: the epochs (counted from 1) whose weights are worth keeping so far, and whether to go on."""

    epochs: frozenset[int]
    go_on: bool = True


class AfterEpoch(Protocol):
    """Decides after each epoch what becomes of its weights."""

    def describe(self) -> Any:
        """What the manifest records of it, JSON-able: it decides alike where this is equal."""

    def __call__(self, model: Any, epoch: int, scores: Path) -> KeptEpochs:
        """model: after so many epochs, in eval mode. scores: a folder for what is found out, kept in the vector's.

        After a stop it is called again for the last epoch, with the folder as it was left and perhaps another model:
        what it says then has to rest on the files.
        """
