"""WIN-U: one Newton step by Woodbury's identity. arXiv 2604.13438 (Zhao, Amiri and Magdon-Ismail, 2026).

What could be read: the abstract and the beginning of the introduction. No code of theirs was found. From these: the
step needs no retain rows, but the second-order information H of the finished model on all its data, kept from its
training; the forget rows' curvature is a generalised Gauss-Newton one, JᵀΛJ. Our reading, with sums and not means:

    θ ← θ + (H - JᵀΛJ)⁻¹ ∇L_f(θ),    (H - UUᵀ)⁻¹ = H⁻¹ + H⁻¹U (I - UᵀH⁻¹U)⁻¹ UᵀH⁻¹   (Woodbury)

Our assumptions: H is K-FAC on forget rows and those rows to keep that others learn from, as if kept from training: the
step itself sees forget rows alone. (Without a kept H it is a step of gradient ascent.) JᵀΛJ is drawn: a column of U is
a forget row run backwards from random signs at its logits, so that UUᵀ is right on average. Layers are apart, as in
K-FAC. H is only about right, so UᵀH⁻¹U can have eigenvalues above 1, and the step would turn round: they end at `MOST`.
α = 1 is not the Newton step but the multiple of it at which forget rows lose as much as holdout rows. The grid:
damping of 1, .1 and .01, as a share of the factors' mean eigenvalues. (`MOST` of .5 changed nothing.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from tests.benchmarks.rivals.curvature import (
    Changes,
    measure_factors,
    positions,
    random_signs,
    reach,
    roots,
    run_backwards,
    save,
    uphill,
)

DAMPINGS, MOST = (1.0, 0.1, 0.01), 0.9


def columns(lab: Any) -> list[tuple[str, Path]]:
    """Return a step by damping."""
    lab.put((), 1.0)
    rows = lab.rows["forget"]
    whole = [*rows, *lab.rows["learnt"]]
    factors = measure_factors(lab, whole)
    gradients = run_backwards(lab, rows, uphill)
    read: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {name: [] for name in factors}
    run_backwards(lab, rows, random_signs, lambda name, *values: read[name].append(values))
    found = []
    for damping in DAMPINGS:
        changes: Changes = {}
        for name, gradient in gradients.items():
            inputs, outputs, owners = (torch.cat(values) for values in zip(*read[name], strict=True))
            triangles = roots(factors[name], damping)
            changes[name] = newton(gradient, inputs, outputs, owners, triangles, positions(whole))
        found.append((f"damping {damping:g}", save(lab, f"win-u-{damping:g}", reach(lab, changes))))
    return found


def newton(
    gradient: Tensor, inputs: Tensor, outputs: Tensor, owners: Tensor, triangles: tuple[Tensor, Tensor], count: int
) -> Tensor:
    """Return (H - UUᵀ)⁻¹ ∇, (out, in), for H = count · G ⊗ A with the triangles of A and G.

    inputs, (n, in), and outputs, (n, out): of positions of the rows `owners`; a column of U is a row's Σ output inputᵀ.
    """
    left, right = (solve_triangular(half, values.T, upper=False).T for half, values in
                   zip(triangles, (inputs, outputs), strict=True))  # fmt: skip
    columns = torch.stack([right[owners == i].T @ left[owners == i] for i in owners.unique()]).flatten(1)
    columns /= count**0.5
    goal = solve_triangular(triangles[1], gradient, upper=False)
    goal = solve_triangular(triangles[0], goal.T, upper=False).T.flatten() / count**0.5
    sizes, vectors = torch.linalg.eigh(columns @ columns.T)
    taken = sizes.clamp(max=MOST)
    weights = vectors @ ((vectors.T @ (columns @ goal)) * taken / (sizes.clamp_min(1e-12) * (1 - taken)))
    step = (goal + weights @ columns).view_as(gradient)
    step = solve_triangular(triangles[1].T, step, upper=True)
    return solve_triangular(triangles[0].T, step.T, upper=True).T / count**0.5
