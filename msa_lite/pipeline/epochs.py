"""What becomes of the weights of a baseline's epochs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msa_lite.evals.choice import score_into
from msa_lite.evals.qa import Qa
from msa_lite.evals.selection import selection_score, utility
from msa_lite.report import Report
from msa_lite.train import Kept, epoch_folder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BestEpoch:
    """After each epoch: scores the model on validation rows; the best so far is kept, a broken one ends the training.

    reference: what the target scores; keep: see `selection_score`; first: the first epoch that is a candidate.
    """

    validation: Qa
    reference: Report
    keep: float
    first: int = 1

    def describe(self) -> dict[str, Any]:
        """What decides."""
        target = self.reference.values()
        return {"questions": self.validation.describe(), "target": target, "keep": self.keep, "first": self.first}

    def __call__(self, model: Any, epoch: int, scores: Path) -> Kept:
        if epoch < self.first:
            return Kept(frozenset())
        folders = [epoch_folder(scores, number) for number in range(self.first, epoch + 1)]
        found = [score_into(folder, lambda: model, self.validation).values() for folder in folders]
        reference = self.reference.values()
        ranks = [selection_score(values, reference, self.keep) for values in found]
        broken = round(utility(found[-1], reference), 2) == 0
        if broken:
            logger.warning("epoch %d left nothing of the target's retain scores; training ends there", epoch)
        return Kept(frozenset([self.first + ranks.index(max(ranks))]), not broken)


@dataclass(frozen=True)
class EveryEpoch:
    """After each epoch from the `first` on: kept, to be added to the target and scored later."""

    first: int = 1

    def describe(self) -> str:
        """What decides: nothing."""
        return f"every epoch from {self.first}"

    def __call__(self, model: Any, epoch: int, scores: Path) -> Kept:
        return Kept(frozenset(range(self.first, epoch + 1)))
