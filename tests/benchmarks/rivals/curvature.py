"""What the rivals share: the curvature of linear layers by K-FAC, and how far a change goes.

K-FAC (Martens and Grosse, arXiv 1503.05671): the curvature of a layer's weights W (out, in) is about G ⊗ A, for the
second moments A (in, in) of its inputs and G (out, out) of the gradients at its outputs, so that an inverse times a
gradient is G⁻¹ ∇W A⁻¹. Both moments are means over the labelled positions of rows, at the target, in fp32. Gradients
are those of Σ_v √p_v s_v (e_v - p) at the logits, with a random sign s_v for each token of the vocabulary: its second
moment is the curvature of the cross-entropy in the logits, diag(p) - p pᵀ, so no label is drawn (ibid. draws labels).

How far a change goes (`reach`) was once in units of the forget vector's effect on the forget rows. With these K-FADE
destroyed a model of 135M weights at each point of its grid, so they were replaced after those scores had been seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from msa_lite.data import IGNORE, Example, to_batch

Changes = dict[str, Tensor]
"""Changes of weights, (out, in), by the names of the weights."""
Factors = dict[str, tuple[Tensor, Tensor]]
"""A and G, by the same names."""
See = Callable[[str, Tensor, Tensor, Tensor], None]
"""Called with the name of a layer, its inputs (n, in), the gradients at its outputs (n, out), and which row (n) each of
the n labelled positions of a batch is from."""
SIZE = 8  # rows of a batch


def uphill(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of the summed loss in the logits, (n, vocabulary)."""
    slope = logits.softmax(-1)
    slope[torch.arange(len(labels)), labels] -= 1
    return slope


def random_signs(logits: Tensor, labels: Tensor) -> Tensor:
    """Return a random vector for each position, (n, vocabulary), whose second moment is the loss's curvature there."""
    shares = logits.softmax(-1)
    signed = shares.sqrt() * (torch.randint(2, logits.shape, dtype=logits.dtype) * 2 - 1)
    return signed - shares * signed.sum(-1, keepdim=True)


def run_backwards(
    lab: Any, rows: Sequence[Example], slope: Callable[[Tensor, Tensor], Tensor], see: See | None = None
) -> Changes:
    """Run rows backwards from `slope` at the logits of labelled positions; return the summed gradients of the layers.

    The random numbers begin anew in each call.
    """
    torch.manual_seed(0)
    layers = {
        f"model.{path}.weight": m for path, m in lab.model.model.named_modules() if isinstance(m, torch.nn.Linear)
    }
    hooks, known, owners = [], torch.empty(0), torch.empty(0)
    for name, layer in layers.items() if see else ():

        def watch(_: Any, inputs: Any, output: Tensor, name: str = name) -> None:
            read = inputs[0][known].detach()
            output.register_hook(lambda gradient: see(name, read, gradient[known], owners))  # type: ignore[misc]

        hooks.append(layer.register_forward_hook(watch))
    lab.model.zero_grad(set_to_none=True)
    for first in range(0, len(rows), SIZE):
        batch = to_batch(rows[first : first + SIZE], lab.pad, "cpu")
        labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE)
        known = labels != IGNORE
        owners = known.nonzero()[:, 0] + first
        logits = lab.model.lm_head(lab.model.model(batch["input_ids"], batch["attention_mask"])[0][known])
        logits.backward(slope(logits.detach(), labels[known]))
    for hook in hooks:
        hook.remove()
    gradients = {name: layer.weight.grad.clone() for name, layer in layers.items()}
    lab.model.zero_grad(set_to_none=True)
    return gradients


def measure_factors(lab: Any, rows: Sequence[Example]) -> Factors:
    """Return A and G of each layer, of the model as it is."""
    sums: dict[str, list[Tensor]] = {}

    def add(name: str, inputs: Tensor, gradients: Tensor, _: Tensor) -> None:
        squares = inputs.T @ inputs, gradients.T @ gradients
        sums[name] = [old + new for old, new in zip(sums[name], squares, strict=True)] if name in sums else [*squares]

    run_backwards(lab, rows, random_signs, add)
    count = positions(rows)
    return {name: (a / count, g / count) for name, (a, g) in sums.items()}


def positions(rows: Sequence[Example]) -> int:
    """Return how many labelled positions rows have."""
    return sum(label != IGNORE for row in rows for label in row.labels[1:])


def roots(factors: tuple[Tensor, Tensor], damping: float) -> tuple[Tensor, Tensor]:
    """Return the triangles L of A and G, each M + damping · tr(M) / n · I = L Lᵀ (n: its size)."""
    damped = (m + damping * m.diagonal().mean() * torch.eye(len(m), dtype=m.dtype) for m in factors)
    left, right = (torch.linalg.cholesky(m) for m in damped)
    return left, right


def precondition(gradient: Tensor, triangles: tuple[Tensor, Tensor]) -> Tensor:
    """Return G⁻¹ ∇W A⁻¹, with the triangles of both."""
    inputs, outputs = triangles
    return torch.cholesky_solve(torch.cholesky_solve(gradient, outputs).T, inputs).T


@torch.no_grad()
def place(lab: Any, changes: Changes) -> None:
    """Set the model to the target and changes of some weights."""
    for name, value in lab.model.named_parameters():
        value.copy_(lab.before[name] + changes[name] if name in changes else lab.before[name])


def reach(lab: Any, changes: Changes, share: float = 1.0, before: Changes | None = None) -> Changes:
    """Return `before` plus changes, these times the factor at which the loss of the forget rows is where it should be.

    That is `share` of the way from the target's mean loss on them to its loss on holdout rows, the control that the
    choice by parity has as well. The factor is found by doubling and halving, right within 3 %.
    """
    before, (start, end) = before or {}, (lab.target[part]["loss"].mean() for part in ("forget", "holdout"))
    norms = [math.sqrt(sum(float((v[n] ** 2).sum()) for n in changes)) for v in (lab.before, changes)]
    factor, ratio, rose, fell = 1e-3 * norms[0] / norms[1], 2.0, False, False

    def after() -> Changes:
        return before | {n: factor * c + before[n] if n in before else factor * c for n, c in changes.items()}

    for _ in range(24):
        place(lab, after())
        is_short = lab.score("forget")["loss"].mean() < start + share * (end - start)
        rose, fell = rose or is_short, fell or not is_short
        if rose and fell:
            ratio **= 0.5
        if ratio < 1.03:
            break
        factor *= ratio if is_short else 1 / ratio
    if not (rose and fell):
        raise RuntimeError("no factor up to 2^24 brings the forget rows' loss to that of holdout rows")
    return after()


def save(lab: Any, name: str, changes: Changes) -> Path:
    """Write changes where the variants find them."""
    file: Path = lab.out / f"{name}.safetensors"
    save_file({name: change.contiguous() for name, change in changes.items()}, file)
    return file
