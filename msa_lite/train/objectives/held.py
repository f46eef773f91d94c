"""A fit that is held: it learns its rows, and may not change what the model says on other rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from msa_lite.data import Example, hash_ids, pass_tokens
from msa_lite.train.objectives.objective import ALONE, Backward, Division, draw_rows
from msa_lite.train.objectives.plain import LabelTerms, PlainLoss
from msa_lite.train.objectives.reference import FitReference, make_batch
from msa_lite.train.objectives.rows import count_labels

REMEMBERED = 2 << 30
"""Bytes of states that are remembered: those of 131,000 labels of an 8B model in fp32."""


@dataclass
class HeldLoss:
    """The plain loss of some rows, plus `weight` · KL(reference ‖ fitted) on other rows.

    The reference is the model where the fit starts: an adapter switched off, or with all weights a second copy. KL is
    in nats, the mean over the labels of as many rows to keep as the step has others; each epoch draws them anew. The
    divergence is that of Maini et al. (2024, KL minimization); it is not in the MSA paper.

    The reference runs once for each row: the states that its head takes are remembered, up to `REMEMBERED` bytes. They
    are as exact as logits, and 30 to 90 times smaller. Rows beyond run in each step. States are made epoch by epoch,
    always in the same batches, so a fit that was stopped has the same.
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
    _states: dict[int, Any] = field(default_factory=dict, init=False)
    """Of retain rows: the reference's (labels, ·) states, on the CPU."""
    _epochs: int = field(default=0, init=False)
    """The epochs whose rows are remembered."""
    _micro: int = field(default=0, init=False)
    """The rows of the batches that they were made in."""
    _room: int = field(default=0, init=False)
    """The bytes that are left for more."""

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
        self._remember(model, epoch, micro)
        drawn = self._draw(epoch)[list(rows)].tolist()
        states = dict(self._states)
        for others in self._run_reference(model, {*drawn} - self._states.keys(), micro):
            states |= others
        terms = LabelTerms([self.retain[i] for i in drawn], [states[i] for i in drawn], self._divergence, self.weight)
        return total + self._plain.run(model, terms, micro * self.longest, backward)

    def _draw(self, epoch: int) -> Any:
        """Return the retain row that goes with each row to learn in an epoch."""
        return draw_rows(len(self.examples), len(self.retain), self.seed, epoch)

    def _remember(self, model: Any, epoch: int, micro: int) -> None:
        """Run the reference on the rows of the epochs up to this one, as far as they are new and find room."""
        if micro != self._micro:  # other batches round otherwise
            self._states, self._epochs, self._micro, self._room = {}, 0, micro, REMEMBERED
        while self._epochs <= epoch and self._room > 0:
            new = {*self._draw(self._epochs).tolist()} - self._states.keys()
            for states in self._run_reference(model, new, micro):
                self._states |= states
                self._room -= sum(of_row.nbytes for of_row in states.values())
                if self._room <= 0:
                    break
            self._epochs += 1

    def _run_reference(self, model: Any, rows: Set[int], micro: int) -> Iterator[dict[int, Any]]:
        """Yield the reference's states at the labels of some retain rows, on the CPU, pass by pass.

        Of several processes, each runs its share, and has all states.
        """
        assert self._reference is not None, "prepare comes first"
        order = sorted(rows)
        lengths = [len(self.retain[i].ids) for i in order]
        for places in self._division.passes(lengths, micro * self.longest, pass_tokens(model.device)) if order else ():
            chosen = [order[place] for place in places] or order[:1]  # as many passes as the other processes have
            batch = make_batch([self.retain[i] for i in chosen], self.pad, model.device)
            states = self._reference.logits(batch).states.cpu()
            parts = states.split([count_labels(self.retain[i]) for i in chosen])
            yield self._division.pool({i: part.clone() for i, part in zip(chosen, parts, strict=True)})

    def _divergence(self, logits: Any, states: Any) -> Any:
        """Return the summed KL of a block of labels. states: the reference's."""
        assert self._reference is not None, "prepare comes first"
        return _summed_divergence().apply(logits, self._reference.head(states))


@cache
def _summed_divergence() -> Any:
    """Return an autograd function of two models' (n, v) logits, Σ KL(second ‖ first) in nats.

    In place as far as it goes, since these are the largest tensors of a fit.
    """
    import torch

    class SummedDivergence(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Any, reference: Any) -> Any:
            log_p, log_q = logits.log_softmax(-1), reference.log_softmax(-1)
            difference = log_q - log_p
            q = log_q.exp_()
            ctx.save_for_backward(log_p.exp_().sub_(q))
            return difference.mul_(q).sum()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return ctx.saved_tensors[0] * gradient, None

    return SummedDivergence
