"""A fit that is held: it learns its rows, and may not change what the model says on other rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msa_lite.data import Example, hash_ids
from msa_lite.train.objectives.objective import ALONE, Backward, Division, LossTerm, draw_rows
from msa_lite.train.objectives.plain import PlainLoss
from msa_lite.train.objectives.reference import FitReference, answer_logits, kl_divergence, make_batch
from msa_lite.train.objectives.rows import count_labels


@dataclass
class HeldLoss:
    """The plain loss of some rows, plus `weight` · KL(reference ‖ fitted) on other rows.

    The reference is the model where the fit starts: an adapter switched off, or with all weights a second copy. KL is
    in nats, the mean over the labels of as many rows to keep as the step has others; each epoch draws them anew. The
    divergence is that of Maini et al. (2024, KL minimization); it is not in the MSA paper.
    """

    examples: Sequence[Example]
    """The rows to learn."""
    retain: Sequence[Example]
    """The rows to draw from, whose outputs are to stay."""
    weight: float
    """> 0."""
    pad: int
    seed: int
    full: bool = False
    """True where all weights are trained."""
    _plain: PlainLoss = field(init=False)
    _division: Division = field(default=ALONE, init=False)
    _reference: FitReference | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._plain = PlainLoss(self.examples, self.pad)
        self.retain = [example for example in self.retain if count_labels(example)]

    @property
    def longest(self) -> int:
        """Return the tokens of the longest row."""
        return max(len(example.ids) for example in (*self.examples, *self.retain))

    def describe(self) -> dict[str, Any]:
        """Return what the manifest records."""
        return {"hold": self.weight, "retain": hash_ids(self.retain), "seed": self.seed}

    def prepare(self, model: Any, division: Division = ALONE) -> None:
        """Get the reference ready, before the model changes."""
        self._plain.prepare(model, division)
        self._division = division
        self._reference = FitReference.of(model, self._plain.halves, division.freeze(model) if self.full else None)

    def release(self) -> None:
        """Let go of the models."""
        self._plain.release()
        self._reference = None

    def step(self, model: Any, rows: Sequence[int], epoch: int, micro: int, backward: Backward) -> Any:
        """Run the rows of a step, then rows to keep, as `Objective` describes."""
        total = self._plain.step(model, rows, epoch, micro, backward)
        drawn = draw_rows(len(self.examples), len(self.retain), self.seed, epoch)[list(rows)].tolist()
        # The reference's logits beside the model's own take as much memory as a second row does.
        kept = LossTerm(self.retain, self.weight, count_labels, self._divergence, passes=2)
        return total + kept.run(model, drawn, micro, self.longest, backward, self._division)

    def _divergence(self, model: Any, rows: Sequence[int]) -> Any:
        """Return the mean KL over the labels of some rows to keep."""
        assert self._reference is not None, "prepare comes first"
        batch = make_batch([self.retain[i] for i in rows], self.pad, model.device)
        reference = self._reference.logits(batch)
        logits, _ = answer_logits(self._plain.halves, batch)
        return kl_divergence(logits, reference, logits.mask)
