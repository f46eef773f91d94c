"""The plain loss of a fit: the mean of −log p over the labels of an optimiser step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msa_lite.data import IGNORE, Example, to_batch


@dataclass(frozen=True)
class PlainLoss:
    """The objective of a fit that was given no other one."""

    examples: Sequence[Example]
    pad: int
    """The token that fills up rows of a batch."""

    @property
    def longest(self) -> int:
        """Return the tokens of the longest row."""
        return max(len(e.ids) for e in self.examples)

    def describe(self) -> dict[str, Any]:
        """Return nothing: a manifest names only objectives in place of this one."""
        return {}

    def prepare(self, model: Any) -> None:
        """Keep nothing of the model before training."""

    def release(self) -> None:
        """Let go of nothing."""

    def step(self, model: Any, rows: Sequence[int], epoch: int, micro: int, backward: Callable[[Any], None]) -> Any:
        """Run the rows of an optimiser step, as `train.Objective` describes."""
        labels = sum(label != IGNORE for i in rows for label in self.examples[i].labels[1:])
        total: Any = 0.0
        for start in range(0, len(rows), micro):
            batch = to_batch([self.examples[i] for i in rows[start : start + micro]], self.pad, model.device)
            loss = model(**batch, use_cache=False, num_items_in_batch=labels).loss
            backward(loss)
            total = total + loss.detach()
        return total
