"""SAGE: another method's change, without what it does to retain inputs. arXiv 2606.18309 (Zhang et al., 2026).

What could be read: the abstract. No code of theirs was found. From it: SAGE takes the final change of any method,
reads real inputs of modules on a few retain rows, keeps their dominant directions, and solves in closed form an
objective that is anchored at that change. Our reading, for a change D (out, in) of a layer and the second moment of
its inputs C ≈ V diag(s) Vᵀ, of which only the largest s with `SHARE` of the energy count:

    D′ = argmin |D′ - D|² + λ tr(D′ V diag(s) Vᵀ D′ᵀ) = D (I - V diag(λs / (1 + λs)) Vᵀ)

Our assumptions: `SHARE`; λ in units of one over the mean eigenvalue of C; the retain rows are those that others learn
from. It is our filter without the forget rows' moment and with a cut spectrum. Of methods we take two: MSA's forget
vector (β = 0), and UNDIAL at the point that its row of the table chose. The grid: both, at λ of 1 and of 10.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.benchmarks.rivals.curvature import measure_factors, reach, save

STRENGTHS, SHARE = (1.0, 10.0), 0.99


def columns(lab: Any, sources: Mapping[str, Any]) -> list[tuple[str, Path]]:
    """Return changes by the name of the method and by λ. sources: the terms of each method's change."""
    lab.put((), 1.0)
    retain = measure_factors(lab, lab.rows["learnt"])
    found = []
    for source, terms in sources.items():
        changes = lab.sum_of(terms)
        for strength in STRENGTHS:
            cleaned = {name: clean(changes[name], a, strength) for name, (a, _) in retain.items() if name in changes}
            file = save(lab, f"sage-{source}-{strength:g}", reach(lab, changes | cleaned))
            found.append((f"{source}, λ = {strength:g}", file))
    return found


def clean(change: Tensor, moment: Tensor, strength: float) -> Tensor:
    """Return D′ of a change D, (out, in), for the moment of the retain inputs, (in, in)."""
    sizes, vectors = torch.linalg.eigh(moment)
    sizes, vectors = sizes.flip(0).clamp(min=0), vectors.flip(1)
    count = int((sizes.cumsum(0) < SHARE * sizes.sum()).sum()) + 1
    sizes, vectors = sizes[:count] / moment.diagonal().mean(), vectors[:, :count]
    return change - (change @ vectors) * (strength * sizes / (1 + strength * sizes)) @ vectors.T
