"""The plain loss of a fit: the mean of −log p over the labels of an optimiser step.

Rows of similar length run together, and a beginning that all rows of the step share runs once. Logits are made of
labelled positions alone, a block at a time, each with its backward pass. Loss and gradients are those of a plain run of
all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from msa_lite.data import IGNORE, Example, group_rows, pass_tokens, to_batch
from msa_lite.io.heads import Halves, split_model
from msa_lite.io.precision import autocast
from msa_lite.train.beginnings import Beginning, can_share, common_beginning, label_states, run_rows

_Backward: TypeAlias = Callable[[Any], None]


@dataclass
class PlainLoss:
    """The objective of a fit that was given no other one."""

    examples: Sequence[Example]
    pad: int
    """The token that fills up rows of a batch."""
    _halves: Halves | None = field(default=None, init=False)
    _shares: bool = field(default=False, init=False)

    @property
    def longest(self) -> int:
        """Return the tokens of the longest row."""
        return max(len(e.ids) for e in self.examples)

    def describe(self) -> dict[str, Any]:
        """Return nothing: a manifest names only objectives in place of this one."""
        return {}

    def prepare(self, model: Any) -> None:
        """Split the model, and check whether rows may share their beginning."""
        self._halves = split_model(model)
        self._shares = can_share(self._halves)

    def release(self) -> None:
        """Let go of the model."""
        self._halves = None

    def step(self, model: Any, rows: Sequence[int], epoch: int, micro: int, backward: _Backward) -> Any:
        """Run the rows of an optimiser step, as `train.Objective` describes; `micro` of the longest rows fit."""
        import torch

        counts = {i: sum(label != IGNORE for label in self.examples[i].labels[1:]) for i in rows}
        examples, labels = [self.examples[i] for i in rows if counts[i]], sum(counts.values())
        total = torch.zeros((), device=model.device)
        beginning = self._run_beginning(model, examples)
        start = beginning.tokens if beginning else 0
        budget, per_pass = micro * self.longest - start, pass_tokens(model.device)
        for chosen in group_rows([len(e.ids) - start for e in examples], budget, per_pass):
            total += self._run(model, [examples[i] for i in chosen], beginning, labels, backward)
        if beginning:
            beginning.backward()
        return total

    def _run_beginning(self, model: Any, examples: Sequence[Example]) -> Beginning | None:
        """Run what all rows begin with, if it is long enough and the model allows it."""
        # Activation checkpointing runs layers again, on a cache that would then hold their keys twice.
        if not self._shares or any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
            return None
        tokens = common_beginning(examples)
        with autocast(model):
            return Beginning.run(self._halves, examples[0].ids[:tokens]) if self._halves and tokens else None

    def _run(
        self,
        model: Any,
        examples: Sequence[Example],
        beginning: Beginning | None,
        labels: int,
        backward: _Backward,
    ) -> Any:
        """Run one pass forward and backward; return its share of the loss. labels: those of the whole step."""
        halves = self._halves
        assert halves is not None, "prepare comes first"
        batch = to_batch(examples, self.pad, model.device)
        if getattr(model.config, "output_router_logits", False):  # the model adds a loss of its router to its own
            loss = model(**batch, use_cache=False, num_items_in_batch=labels).loss
            backward(loss)
            return loss.detach()
        with autocast(model):
            states = run_rows(halves, batch, beginning)
        return _backward_of_labels(halves, *label_states(states, examples), labels, backward)


def _backward_of_labels(halves: Halves, states: Any, targets: Any, labels: int, backward: _Backward) -> Any:
    """Return Σ −log p of the targets, divided by `labels`, after the backward pass of (n, ·) states.

    Each block of logits has its backward pass to the states before the next one is made; then one pass takes the
    gradients of all states through the body. So the head runs once, and neither logits nor their gradients pile up.
    """
    import torch
    from torch.nn.functional import cross_entropy

    total, gradients = torch.zeros((), device=states.device), []
    for part in halves.blocks(len(states)):
        leaf = states[part].detach().requires_grad_()
        with autocast(halves.model):
            logits = halves.logits(leaf)
        loss = cross_entropy(logits, targets[part], reduction="sum") / labels
        backward(loss)
        total += loss.detach()
        gradients.append(leaf.grad)
        del logits, loss  # of the last block they would stay during the pass through the body
    if states.requires_grad:  # not where the head alone is trained
        states.backward(torch.cat(gradients))
    return total
