"""The plain loss of a fit: the mean of −log p over all labels of a step, and how its rows run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate
from typing import Any

from msa_lite.data import Example, group_rows, pass_tokens, to_batch
from msa_lite.io.models.heads import Halves, autocast, split_model
from msa_lite.train.objectives.objective import ALONE, Backward, Division, run_passes, shortest
from msa_lite.train.objectives.rows import (
    Beginning,
    can_pack,
    can_share,
    common_beginning,
    count_labels,
    label_states,
    labelled,
    packing,
    run_packed,
    run_rows,
)

_PADDED_ATTENTION = 16  # of packed rows attention alone is padded, a sixteenth of the work


@dataclass
class PlainLoss:
    """The objective of a fit that was given no other one."""

    examples: Sequence[Example]
    pad: int
    """The token that fills up rows of a batch."""
    _halves: Halves | None = field(default=None, init=False)
    _shares: bool = field(default=False, init=False)
    _packs: bool = field(default=False, init=False)
    _division: Division = field(default=ALONE, init=False)

    @property
    def halves(self) -> Halves:
        """Return the model's body and head, from `prepare` on."""
        assert self._halves is not None, "prepare comes first"
        return self._halves

    @property
    def longest(self) -> int:
        """Return the tokens of the longest row."""
        return max(len(e.ids) for e in self.examples)

    def describe(self) -> dict[str, Any]:
        """Return nothing: a manifest names only objectives in place of this one."""
        return {}

    def prepare(self, model: Any, division: Division = ALONE) -> None:
        """Split the model, and check whether rows may share their beginning, and stand in one sequence.

        They may not if several processes divide them.
        """
        self._division, self._halves = division, split_model(model)
        self._shares = division.is_whole and can_share(self._halves)
        beginning = partial(Beginning.run, self._halves) if self._shares else None
        self._packs = division.is_whole and can_pack(self._halves, beginning)

    def release(self) -> None:
        """Let go of the model."""
        self._halves = None

    def step(self, model: Any, rows: Sequence[int], epoch: int, micro: int, backward: Backward) -> Any:
        """Run the rows of an optimiser step, as `Objective` describes; `micro` of the longest rows fit."""
        import torch

        examples = [self.examples[i] for i in rows if count_labels(self.examples[i])]
        labels = sum(map(count_labels, examples))
        if not self._division.is_whole:
            return self._run_divided(model, examples or self.examples[:1], max(1, labels), micro, backward)
        total = torch.zeros((), device=model.device)
        packs = self._packs and not _has_router_loss(model)
        with packing(self.halves) if packs else nullcontext():
            beginning = self._run_beginning(model, examples)
            start = beginning.tokens if beginning else 0
            budget, per_pass = micro * self.longest - start, pass_tokens(model.device)
            per_pass *= _PADDED_ATTENTION if packs else 1
            for chosen in group_rows([len(e.ids) - start for e in examples], budget, per_pass):
                total += self._run([examples[i] for i in chosen], beginning, labels, packs, backward)
            if beginning:
                beginning.backward()
        return total

    def _run_divided(self, model: Any, examples: Sequence[Example], labels: int, micro: int, backward: Backward) -> Any:
        """Run this process's share of a step's rows. labels: those of the whole step."""
        from torch.nn.functional import cross_entropy

        def loss(rows: Sequence[int]) -> Any:
            chosen = [examples[i] for i in rows]
            batch = to_batch(chosen, self.pad, model.device)
            if _has_router_loss(model):
                return model(**batch, use_cache=False, num_items_in_batch=labels).loss
            with autocast(model):
                states = label_states(run_rows(self.halves, batch), chosen)
                return self.halves.map_logits(partial(cross_entropy, reduction="none"), *states).sum() / labels

        lengths = [len(example.ids) for example in examples]
        passes = self._division.passes(lengths, micro * self.longest, pass_tokens(model.device))
        spare = shortest(examples, [count_labels(example) for example in examples])
        return run_passes(self._division, model, passes, spare, loss, backward)

    def _run_beginning(self, model: Any, examples: Sequence[Example]) -> Beginning | None:
        """Run what all rows begin with, if it is long enough and the model allows it."""
        # Activation checkpointing runs layers again, on a cache that would then hold their keys twice.
        if not self._shares or any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
            return None
        tokens = common_beginning(examples)
        with autocast(model):
            return Beginning.run(self.halves, examples[0].ids[:tokens]) if tokens else None

    def _run(
        self, examples: Sequence[Example], beginning: Beginning | None, labels: int, packs: bool, backward: Backward
    ) -> Any:
        """Run one pass forward and backward; return its share of the loss. labels: those of the whole step."""
        model = self.halves.model
        if _has_router_loss(model):  # the model adds a loss of its router to its own
            batch = to_batch(examples, self.pad, model.device)
            loss = model(**batch, use_cache=False, num_items_in_batch=labels).loss
            backward(loss)
            return loss.detach()
        with autocast(model):
            states = self._packed_states(examples, beginning) if packs else self._padded_states(examples, beginning)
        return backward_of_labels(self.halves, *states, labels, backward)

    def _padded_states(self, examples: Sequence[Example], beginning: Beginning | None) -> tuple[Any, Any]:
        """Return the states that predict the labels of padded rows, and these labels."""
        batch = to_batch(examples, self.pad, self.halves.model.device)
        return label_states(run_rows(self.halves, batch, beginning), examples)

    def _packed_states(self, examples: Sequence[Example], beginning: Beginning | None) -> tuple[Any, Any]:
        """Return the same of rows one after another, each up to the token that predicts its last label."""
        import torch

        start = beginning.tokens if beginning else 0
        ids = [e.ids[start : labelled(e)[-1]] for e in examples]
        states = run_packed(self.halves, ids, beginning)
        firsts = list(accumulate(map(len, ids), initial=-start - 1))
        places = [first + t for first, e in zip(firsts, examples, strict=False) for t in labelled(e)]
        targets = torch.tensor([e.labels[t] for e in examples for t in labelled(e)], device=states.device)
        return states[torch.tensor(places)], targets


def _has_router_loss(model: Any) -> bool:
    return bool(getattr(model.config, "output_router_logits", False))


def backward_of_labels(halves: Halves, states: Any, targets: Any, labels: int, backward: Backward) -> Any:
    """Return Σ −log p of the targets, divided by `labels`, after the backward pass of (n, ·) states.

    Each block of logits has its backward pass to the states before the next one is made; then one pass takes the
    gradients of all states through the body. So the head runs once, and neither logits nor their gradients pile up.
    """
    import torch

    total, gradients = torch.zeros((), device=states.device), []
    for block in halves.blocks(len(states)):
        leaf = states[block].detach().requires_grad_()
        with autocast(halves.model):
            logits = halves.logits(leaf)
        loss = _summed_loss().apply(logits, targets[block]) / labels
        backward(loss)
        total += loss.detach()
        gradients.append(leaf.grad)
        del logits, loss  # of the last block they would stay during the pass through the body
    if states.requires_grad:  # not where the head alone is trained
        states.backward(torch.cat(gradients))
    return total


@cache
def _summed_loss() -> Any:
    """Return an autograd function of (n, v) logits and (n,) targets: Σ −log p.

    The gradient of the logits takes the place of their log-probabilities, where torch's loss makes two more tensors.
    """
    import torch

    class SummedLoss(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Any, targets: Any) -> Any:
            ctx.targets, ctx.log_p = targets[:, None], logits.log_softmax(-1)
            return -ctx.log_p.gather(1, ctx.targets).sum()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            of_logits, ctx.log_p = ctx.log_p.exp_(), None
            of_logits.scatter_add_(1, ctx.targets, -torch.ones_like(ctx.targets, dtype=of_logits.dtype))
            return of_logits.mul_(gradient), None

    return SummedLoss
