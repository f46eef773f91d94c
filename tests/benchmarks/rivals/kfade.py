"""K-FADE: a few uphill Gauss-Newton steps by K-FAC. arXiv 2602.10568 (McKinney et al., SaTML 2026).

What could be read: the abstract, and another reader's notes on sections II to IV. No code of theirs was found. From
these: the loss on forget rows is raised under a limit on the retain outputs' KL, which is taken to second order (II-B,
II-C), so that a step is

    θ ← θ + η (F_r + δ)⁻¹ ∇L_f(θ),    F_r ≈ G ⊗ A in each layer (K-FAC), on retain rows.

On TOFU it is one step with δ = 1e-8 and η of 2.5e-3 to 1.1e-2, for weights of another scale than ours.

Our reading: δ goes to both factors, as a share of their mean eigenvalue. Factors are those at the target in each step.
η is the one at which forget rows lose as much as holdout rows, then the table's search goes on from there; of two
steps the first goes half of that way. Layers without K-FAC (embedding, head, norms) stay. The grid: one step with δ of
1, .1 and .01, and two with δ of .1. (More steps were worse: once some answers are gone, the next gradient is theirs.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.benchmarks.rivals.curvature import (
    Changes,
    measure_factors,
    place,
    precondition,
    reach,
    roots,
    run_backwards,
    save,
    uphill,
)

GRID = ((1.0, 1), (0.1, 1), (0.01, 1), (0.1, 2))  # δ, steps


def columns(lab: Any) -> list[tuple[str, Path]]:
    """Return the change of each setting."""
    lab.put((), 1.0)
    retain = measure_factors(lab, lab.rows["learnt"])
    found = []
    for damping, steps in GRID:
        total: Changes = {}
        for step in range(1, steps + 1):
            place(lab, total)
            gradients = run_backwards(lab, lab.rows["forget"], uphill)
            changes = {n: precondition(gradient, roots(retain[n], damping)) for n, gradient in gradients.items()}
            total = reach(lab, changes, step / steps, total)
        found.append((f"δ = {damping:g}, steps: {steps}", save(lab, f"k-fade-{damping:g}-{steps}", total)))
    return found
