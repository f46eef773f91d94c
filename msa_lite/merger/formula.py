"""The formula of Model State Arithmetic (paper §3) on one block of one tensor, for deltas and for their factors.

    θ_u = θ_D − α (θ_1 − θ_0) + β (θ_2 − θ_0) = θ_D + Σ weight · vector

The forget vector θ_1 − θ_0 has the weight −α, the retain vector θ_2 − θ_0 the weight β. Several requests are one sum:
each brings a forget vector, and may bring a retain vector. A baseline has a single term, the vector that it trained.

Not of the paper is the filter of a forget vector, `layer_filter`: it keeps the change of each layer's output on
forget rows, and suppresses that on retain rows. `merge.filter: off` leaves the paper's formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

Factors = tuple[np.ndarray, np.ndarray]
"""(rows, r) and (r, columns), whose product is a delta."""
VectorLike = TypeVar("VectorLike")
OneOrSeveral: TypeAlias = VectorLike | Sequence[VectorLike]
"""One value, or a list of them."""
VectorLike_co = TypeVar("VectorLike_co", covariant=True)


@dataclass(frozen=True)
class Term(Generic[VectorLike_co]):
    """One summand, weight · vector."""

    name: str
    """The vector's name in messages and manifests: "forget", "retain", or the baseline that trained it. Of several
    forget vectors the names are "forget 1", "forget 2", …"""
    vector: VectorLike_co
    """A folder or repository; from these a source, an opened vector, a delta of one tensor, and its rows."""
    weight: float
    """The strength with its sign. The vector of a weight of 0 is never opened."""

    def with_vector(self, vector: VectorLike) -> Term[VectorLike]:
        """Return the same term with its vector in another form."""
        return Term(self.name, vector, self.weight)

    @property
    def side(self) -> str:
        """Return "forget" or "retain", also for one of several; the name of a baseline's term."""
        return self.name.partition(" ")[0]


def number_terms(terms: Sequence[Term[VectorLike]]) -> list[Term[VectorLike]]:
    """Return the terms, each named after its side; where a side has several, numbered in their order."""
    sides = [term.side for term in terms]
    names = [
        side if sides.count(side) == 1 else f"{side} {sides[: place + 1].count(side)}"
        for place, side in enumerate(sides)
    ]
    return [Term(name, term.vector, term.weight) for name, term in zip(names, terms, strict=True)]


def named_strengths(terms: Sequence[Term[Any]]) -> dict[str, Any]:
    """Return the strengths by their public names: alpha and beta of MSA, also where they are 0; scale of a baseline.

    Where several vectors are on one side, return {"strengths": α or β by the vector's name}.
    """
    weights = {term.name: term.weight for term in terms}
    if weights.keys() <= {"forget", "retain"}:
        return {"alpha": abs(weights.get("forget", 0.0)), "beta": weights.get("retain", 0.0)}
    if {term.side for term in terms} <= {"forget", "retain"}:
        return {"strengths": {name: abs(weight) for name, weight in weights.items()}}
    return {"scale": sum(weights.values())}


def combine(target: np.ndarray, terms: Sequence[Term[np.ndarray]], out: np.ndarray) -> np.ndarray:
    """Return θ_D + Σ weight · delta in `out`, added in the order of the terms.

    target, deltas, out: one block of one shape and dtype, fp32 or fp64. Each delta is left multiplied with its weight.
    """
    np.copyto(out, target)
    for term in terms:
        delta = term.vector
        delta *= term.weight
        out += delta
    return out


def combine_factors(terms: Sequence[Term[Factors]]) -> Factors:
    """Return Σ weight · L R as one product [w_1 L_1 | w_2 L_2] · [R_1 ; R_2]: one multiplication does for all terms."""
    weighted = [(term.vector[0] * term.vector[0].dtype.type(term.weight), term.vector[1]) for term in terms]
    return np.concatenate([left for left, _ in weighted], axis=1), np.concatenate([right for _, right in weighted])


FORGET_RIDGE, RETAIN_RIDGE = 1e-3, 0.1
"""The shares of the mean eigenvalue of C_f and C_r that are added to each of their eigenvalues.

That of C_f makes directions well defined that no forget row takes. That of C_r stands for all rows to keep that were
not measured. Without it, the filter takes any change that the measured ones do not see: on SmolLM2 the update became 23
times as large, and other texts suffered.
"""


@dataclass(frozen=True)
class Filter:
    """The filter of one layer's change D (out, in): D′ = share · D + (D · left) · system⁻¹ · right.

    The system is solved for the rows that are given, which are few for an adapter. `solved` is for many.
    """

    share: float
    left: np.ndarray
    """(in, k)."""
    right: np.ndarray
    """(k, in)."""
    system: np.ndarray | None
    """(k, k), symmetric; None for the identity."""

    def apply(self, rows: np.ndarray) -> np.ndarray:
        """Return D′ for some rows (n, in) of D."""
        inner = rows @ self.left
        if self.system is not None:
            inner = np.linalg.solve(self.system, inner.T).T
        filtered: np.ndarray = self.share * rows + inner @ self.right
        return filtered

    def solved(self) -> Filter:
        """Return the same filter with its system solved once for all rows."""
        if self.system is None:
            return self
        return Filter(self.share, self.left, np.linalg.solve(self.system, self.right), None)


def layer_filter(forget: np.ndarray, retain: np.ndarray, strength: float) -> Filter:
    """Return what makes D′ = D C_f (C_f + λ C_r)⁻¹ of the change D (out, in) of one linear layer.

    That is the D′ which minimises tr (D′ − D) C_f (D′ − D)ᵀ + λ tr D′ C_r D′ᵀ. On forget rows the layer's output is to
    change as D changes it, on retain rows not at all. λ = 0 gives D itself.

    forget, retain: (k, in) roots X of the second moments XᵀX of the layer's inputs; C_f and C_r are these over their
    traces, with `FORGET_RIDGE`/in and `RETAIN_RIDGE`/in on the diagonal. So neither scale counts. strength: λ ≥ 0.
    Everything is in fp64, and on the CPU even where there is a GPU, since the merger does without torch. The smaller of
    two systems is solved: of `in` equations, or of as many as both roots have rows (Woodbury). Relatives: the
    covariances of ROME and MEMIT (arXiv 2202.05262, 2210.07229), SAGE (arXiv 2606.18309).
    """
    inputs = forget.shape[1]
    keep, drop = (np.asarray(root, np.float64) for root in (forget, retain))
    keep = keep / (np.linalg.norm(keep) or 1.0)  # a layer that gets zeros alone is left to the ridges
    drop = drop * (np.sqrt(strength) / (np.linalg.norm(drop) or 1.0))
    ridge = FORGET_RIDGE / inputs
    both = ridge + strength * RETAIN_RIDGE / inputs
    rows = np.concatenate([keep, drop])
    if len(rows) < inputs:
        share, system = ridge / both, rows @ rows.T + both * np.eye(len(rows))
        return Filter(share, np.concatenate([(1 - share) * keep, -share * drop]).T, rows, system)
    moments = keep.T @ keep + ridge * np.eye(inputs)
    return Filter(0.0, moments, np.eye(inputs), rows.T @ rows + both * np.eye(inputs))
