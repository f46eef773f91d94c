"""A fit that is held: it learns its rows, and may not change what the model says on other rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from msa_lite.data import Example, hash_ids, pass_tokens
from msa_lite.io.models.heads import split_model
from msa_lite.train.labels import count_labels
from msa_lite.train.plain import PlainLoss
from msa_lite.train.reference import answer_logits, kl_divergence, make_batch, reference_of
from msa_lite.train.share import ALONE, StepShare, run_passes, shortest


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
    _share: StepShare = field(default=ALONE, init=False)
    _model: Any = field(default=None, init=False)
    _frozen: Any = field(default=None, init=False)
    _halves: Any = field(default=None, init=False)
    _reference: Any = field(default=None, init=False)

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

    def prepare(self, model: Any, share: StepShare = ALONE) -> None:
        """Get the reference ready, before the model changes."""
        self._plain.prepare(model, share)
        self._model, self._share, self._halves = model, share, split_model(model)
        self._frozen = share.freeze(model) if self.full else None
        self._reference = split_model(self._frozen) if self.full else self._halves

    def release(self) -> None:
        """Let go of the models."""
        self._plain.release()
        self._model = self._frozen = self._halves = self._reference = None

    def step(self, model: Any, rows: Sequence[int], epoch: int, micro: int, backward: Callable[[Any], None]) -> Any:
        """Run the rows of a step, then rows to keep, as `train.Objective` describes."""
        total = self._plain.step(model, rows, epoch, micro, backward)
        drawn = [self.retain[i] for i in self._draw(epoch)[list(rows)]]
        counts = [count_labels(example) for example in drawn]

        def loss(rows: Sequence[int]) -> Any:
            part = sum(counts[i] for i in rows) / sum(counts)
            return self._divergence([drawn[i] for i in rows]) * (self.weight * part)

        # The reference's logits beside the model's own take as much memory as a second row does.
        budget = max(1, micro // 2) * self.longest
        passes = self._share.passes([len(example.ids) for example in drawn], budget, pass_tokens(model.device))
        return total + run_passes(self._share, model, passes, shortest(drawn, counts), loss, backward)

    def _draw(self, epoch: int) -> np.ndarray:
        """Draw a row to keep for each row to learn, uniformly with replacement, anew in each epoch."""
        return np.random.default_rng((self.seed, epoch)).integers(len(self.retain), size=len(self.examples))

    def _divergence(self, examples: Sequence[Example]) -> Any:
        """Return the mean KL over the labels of some rows."""
        batch = make_batch(examples, self.pad, self._model.device)
        context = partial(reference_of, self._model, self._frozen)
        reference, _ = answer_logits(self._reference, batch, reference=context)
        logits, _ = answer_logits(self._halves, batch)
        return kl_divergence(logits, reference, logits.mask)
