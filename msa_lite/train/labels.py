"""The labels of rows: the tokens that predict them, and their loss, a block of logits at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from msa_lite.data import IGNORE, Example
from msa_lite.io.models.heads import Halves, autocast


def label_states(states: Any, examples: Sequence[Example]) -> tuple[Any, Any]:
    """Return the (n, ·) states that predict the labels of padded examples, and these (n,) labels.

    states: (rows, width, ·), of the last `width` tokens of the padded rows. The places come from the examples, not from
    tensors, so that a GPU need not be waited for.
    """
    import torch

    start = max(len(e.ids) for e in examples) - states.shape[1]
    row_of, position = torch.tensor(label_places(examples, start), device=states.device).T
    targets = [e.labels[t] for e in examples for t in labelled(e)]
    return states[row_of, position], torch.tensor(targets, device=states.device)


def label_places(examples: Sequence[Example], start: int = 0) -> list[tuple[int, int]]:
    """Return (row, position) of the tokens that predict labels, the position counted from `start`."""
    return [(row, t - 1 - start) for row, e in enumerate(examples) for t in labelled(e)]


def labelled(example: Example) -> list[int]:
    """Return the places of the labels that some token predicts."""
    return [t for t, label in enumerate(example.labels) if t and label != IGNORE]


def count_labels(example: Example) -> int:
    """Return the number of labels that some token predicts."""
    return len(labelled(example))


def backward_of_labels(halves: Halves, states: Any, targets: Any, labels: int, backward: Callable[[Any], None]) -> Any:
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
