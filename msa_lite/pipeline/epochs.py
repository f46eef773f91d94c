"""What becomes of the weights of a baseline's epochs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msa_lite.evals.selection import broken
from msa_lite.evals.validation import Validation
from msa_lite.report import Report
from msa_lite.train import Kept, epoch_folder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BestEpoch:
    """After each epoch: scores the model on validation rows; the best so far is kept, a broken one ends the training.

    reference: what the target scores; first: the first epoch that is a candidate.
    """

    validation: Validation
    reference: Report
    first: int = 1

    def describe(self) -> dict[str, Any]:
        """What decides."""
        return {**self.validation.describe(), "target": self.reference.values(), "first": self.first}

    def __call__(self, model: Any, epoch: int, scores: Path) -> Kept:
        if epoch < self.first:
            return Kept(frozenset())
        folders = [epoch_folder(scores, number) for number in range(self.first, epoch + 1)]
        found = [self.validation.score_into(folder, lambda: model).values() for folder in folders]
        reference, ideal = self.reference.values(), self.validation.ideal_metrics
        ranks = [self.validation.rule.rank(values, reference, ideal) for values in found]
        reason = broken(found[-1], reference)
        if reason:
            logger.warning("epoch %d is broken (%s); training ends there", epoch, reason)
        return Kept(frozenset([self.first + ranks.index(max(ranks))]), not reason)


@dataclass(frozen=True)
class EveryEpoch:
    """After each epoch from the `first` on: kept, to be added to the target and scored later."""

    first: int = 1

    def describe(self) -> str:
        """What decides: nothing."""
        return f"every epoch from {self.first}"

    def __call__(self, model: Any, epoch: int, scores: Path) -> Kept:
        return Kept(frozenset(range(self.first, epoch + 1)))
