"""The plain loss of a fit: the mean of −log p over all labels of a step, and how its rows run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
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


@dataclass(frozen=True)
class LabelTerms:
    """Rows of a step with what a loss wants to know of each of their labels."""

    examples: Sequence[Example]
    targets: Sequence[Any]
    """(n, …) tensors, of the n labels of each row."""
    loss: Callable[[Any, Any], Any]
    """Returns the sum of the loss over the labels of (n, v) fp32 logits and their targets."""
    weight: float = 1.0
    """The factor of the mean over all labels."""

    @property
    def labels(self) -> int:
        """Return the number of labels, at least 1."""
        return max(1, sum(map(len, self.targets)))

    def take(self, rows: Sequence[int]) -> LabelTerms:
        """Return some of the rows, by their places."""
        return replace(self, examples=[self.examples[i] for i in rows], targets=[self.targets[i] for i in rows])

    def join_targets(self, device: Any) -> Any:
        """Return the targets of all rows as one tensor."""
        import torch

        return torch.cat(list(self.targets)).to(device)

    def sum_block(self, logits: Any, targets: Any) -> Any:
        """Return the (1,) summed loss of a block of logits."""
        return self.loss(logits, targets)[None]


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
        examples = [self.examples[i] for i in rows if count_labels(self.examples[i])]
        if not self._division.is_whole:
            examples = examples or [self.examples[0]]
        terms = LabelTerms(examples, [_targets(example) for example in examples], _summed_loss().apply)
        return self.run(model, terms, micro * self.longest, backward, of_model=_has_router_loss(model))

    def run(self, model: Any, terms: LabelTerms, budget: int, backward: Backward, of_model: bool = False) -> Any:
        """Run this process's share of rows, pass by pass, each with its backward pass; return the detached loss.

        budget: the most tokens of a pass, padding included. of_model: take the model's own loss in place of the terms'.
        """
        import torch

        total = torch.zeros((), device=model.device)
        if of_model or not self._division.is_whole:
            return total + self._run_apart(model, terms, budget, backward, of_model)
        packs = self._packs and not _has_router_loss(model)
        with packing(self.halves) if packs else nullcontext():
            beginning = self._run_beginning(model, terms.examples)
            start = beginning.tokens if beginning else 0
            per_pass = pass_tokens(model.device) * (_PADDED_ATTENTION if packs else 1)
            for chosen in group_rows([len(e.ids) - start for e in terms.examples], budget - start, per_pass):
                of_pass = terms.take(chosen)
                with autocast(model):
                    run = self._packed_states if packs else self._padded_states
                    states = run(of_pass.examples, beginning)
                total += backward_of_labels(self.halves, states, of_pass, terms.weight / terms.labels, backward)
            if beginning:
                beginning.backward()
        return total

    def _run_apart(self, model: Any, terms: LabelTerms, budget: int, backward: Backward, of_model: bool) -> Any:
        """Run rows without a beginning of their own, each pass with a loss that can be summed over processes."""

        def loss(rows: Sequence[int]) -> Any:
            of_pass = terms.take(rows)
            if of_model:
                batch = to_batch(of_pass.examples, self.pad, model.device)
                return model(**batch, use_cache=False, num_items_in_batch=terms.labels).loss
            with autocast(model):
                states = self._padded_states(of_pass.examples)
                sums = self.halves.map_logits(of_pass.sum_block, states, of_pass.join_targets(states.device))
                return sums.sum() * terms.weight / terms.labels

        lengths = [len(example.ids) for example in terms.examples]
        passes = self._division.passes(lengths, budget, pass_tokens(model.device))
        spare = shortest(terms.examples, [count_labels(example) for example in terms.examples])
        return run_passes(self._division, model, passes, spare, loss, backward)

    def _run_beginning(self, model: Any, examples: Sequence[Example]) -> Beginning | None:
        """Run what all rows begin with, if it is long enough and the model allows it."""
        # Activation checkpointing runs layers again, on a cache that would then hold their keys twice.
        if not self._shares or any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
            return None
        tokens = common_beginning(examples)
        with autocast(model):
            return Beginning.run(self.halves, examples[0].ids[:tokens]) if tokens else None

    def _padded_states(self, examples: Sequence[Example], beginning: Beginning | None = None) -> Any:
        """Return the states that predict the labels of padded rows."""
        batch = to_batch(examples, self.pad, self.halves.model.device)
        return label_states(run_rows(self.halves, batch, beginning), examples)[0]

    def _packed_states(self, examples: Sequence[Example], beginning: Beginning | None) -> Any:
        """Return the same of rows one after another, each up to the token that predicts its last label."""
        import torch

        start = beginning.tokens if beginning else 0
        ids = [e.ids[start : labelled(e)[-1]] for e in examples]
        states = run_packed(self.halves, ids, beginning)
        firsts = list(accumulate(map(len, ids), initial=-start - 1))
        places = [first + t for first, e in zip(firsts, examples, strict=False) for t in labelled(e)]
        return states[torch.tensor(places)]


def _has_router_loss(model: Any) -> bool:
    return bool(getattr(model.config, "output_router_logits", False))


def _targets(example: Example) -> Any:
    """Return the (n,) labels of a row that some token predicts."""
    import torch

    return torch.tensor([example.labels[t] for t in labelled(example)])


def backward_of_labels(halves: Halves, states: Any, terms: LabelTerms, share: float, backward: Backward) -> Any:
    """Return `share` times the summed loss of the terms, after the backward pass of their (n, ·) states.

    Each block of logits has its backward pass to the states before the next one is made; then one pass takes the
    gradients of all states through the body. So the head runs once, and neither logits nor their gradients pile up.
    """
    import torch

    total, gradients, targets = torch.zeros((), device=states.device), [], terms.join_targets(states.device)
    for block in halves.blocks(len(states)):
        leaf = states[block].detach().requires_grad_()
        with autocast(halves.model):
            logits = halves.logits(leaf)
        loss = terms.loss(logits, targets[block]) * share
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
            log_p = logits.log_softmax(-1)
            ctx.save_for_backward(log_p, targets[:, None])  # which a checkpoint does not keep
            return -log_p.gather(1, targets[:, None]).sum()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            log_p, targets = ctx.saved_tensors
            of_logits = log_p.exp_()
            of_logits.scatter_add_(1, targets, -torch.ones_like(targets, dtype=of_logits.dtype))
            return of_logits.mul_(gradient), None

    return SummedLoss
