"""The epochs of a baseline that are kept: the best one by its scores, or all of them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msa_lite.choose.rules import Rank
from msa_lite.choose.validation import Validation
from msa_lite.report import load_report
from msa_lite.train import KeptEpochs, epoch_folder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BestEpoch:
    """Score the model after each epoch on validation rows, and keep the best so far. A broken epoch ends training."""

    validation: Validation
    reference: Path
    """The folder of the target's scores."""
    first: int = 1
    """The first epoch that is a candidate."""

    def describe(self) -> dict[str, Any]:
        """Return all that decides which epochs are kept, for a manifest."""
        target = load_report(self.reference).values()
        return {**self.validation.describe(), **self.validation.describe_rule(), "target": target, "first": self.first}

    def __call__(self, model: Any, epoch: int, scores: Path) -> KeptEpochs:
        if epoch < self.first:
            return KeptEpochs(frozenset())
        scores.mkdir(exist_ok=True)
        ranks = {}
        for number in range(self.first, epoch + 1):
            folder = epoch_folder(scores, number)
            self.validation.score_into(folder, lambda: model, {"epoch": number})
            ranks[number] = self.validation.rank(folder, self.reference)
        if isinstance(ranks[epoch], str):
            logger.warning("epoch %d is broken (%s); training ends there", epoch, ranks[epoch])
        whole = {number: rank for number, rank in ranks.items() if isinstance(rank, Rank)}
        best = max(whole, key=lambda number: whole[number]) if whole else epoch
        return KeptEpochs(frozenset([best]), isinstance(ranks[epoch], Rank))


@dataclass(frozen=True)
class EveryEpoch:
    """Keep each epoch from the `first` on, to be added to the target and scored later."""

    first: int = 1

    def describe(self) -> str:
        """Return all that decides which epochs are kept, for a manifest."""
        return f"every epoch from {self.first}"

    def __call__(self, model: Any, epoch: int, scores: Path) -> KeptEpochs:
        return KeptEpochs(frozenset(range(self.first, epoch + 1)))
