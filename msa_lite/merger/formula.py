"""The formula of Model State Arithmetic (paper §3) on one block of one tensor, for deltas and for their factors.

    θ_u = θ_D − α (θ_1 − θ_0) + β (θ_2 − θ_0) = θ_D + Σ weight · vector

The forget vector θ_1 − θ_0 has the weight −α, the retain vector θ_2 − θ_0 the weight β. Several requests are one sum:
each brings a forget vector, and may bring a retain vector. A baseline has a single term, the vector that it trained.

Not of the paper is the filter of a forget vector, `Filter`: it keeps the change of each layer's output on
forget rows, and suppresses that on retain rows. `merge.filter: off` leaves the paper's formula.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


class Filter:
    """The filter of one linear layer, for all strengths λ: D′ = D C_f (C_f + λ C_r)⁻¹ of its change D (out, in).

    That is the D′ which minimises tr (D′ − D) C_f (D′ − D)ᵀ + λ tr D′ C_r D′ᵀ. On forget rows the layer's output is to
    change as D changes it, on retain rows not at all. λ = 0 gives D itself.

    C_f and C_r are the second moments of the layer's inputs over their traces, with `FORGET_RIDGE`/in and
    `RETAIN_RIDGE`/in on the diagonal. So neither scale counts. Everything is in fp64, and on the CPU even where there
    is a GPU, since the merger does without torch. The smaller of two systems is solved: of `in` equations, or of as
    many as both roots have rows (Woodbury). Its products are made once for all λ. Relatives: the covariances of ROME
    and MEMIT (arXiv 2202.05262, 2210.07229), SAGE (arXiv 2606.18309).
    """

    def __init__(self, forget: np.ndarray, retain: np.ndarray) -> None:
        """forget, retain: (k, in) roots X of the second moments XᵀX. Of zeros, only the ridge is left."""
        self._rows = np.concatenate([forget, retain], dtype=np.float64)
        self._forget, drop = self._rows[: len(forget)], self._rows[len(forget) :]
        for root in (self._forget, drop):
            root /= np.linalg.norm(root) or 1.0
        self.inputs, self._is_short = forget.shape[1], len(self._rows) < forget.shape[1]
        self._products = [part @ part.T for part in ([self._rows] if self._is_short else [self._forget.T, drop.T])]

    def outputs(self, change: np.ndarray) -> np.ndarray:
        """Return D K_fᵀ (n, k) for some rows (n, in) of D. Its squares add up to tr D C_f Dᵀ, C_f without its ridge."""
        outputs: np.ndarray = change @ self._forget.T
        return outputs

    def apply(self, change: np.ndarray, strengths: Sequence[float], outputs: bool = False) -> Iterator[np.ndarray]:
        """Yield D′ at each strength λ ≥ 0, for some rows (n, in) of D; D′ K_fᵀ in its place where `outputs` is True."""
        ridge = FORGET_RIDGE / self.inputs
        inner = change @ self._rows.T if self._is_short else change @ self._products[0] + ridge * change
        for strength in strengths:
            both = ridge + strength * RETAIN_RIDGE / self.inputs
            if not self._is_short:
                keep, drop = self._products
                filtered = _solved(keep + strength * drop, both, inner)
                yield self.outputs(filtered) if outputs else filtered
                continue
            share, is_kept = ridge / both, np.arange(len(self._rows)) < len(self._forget)
            weights = np.where(is_kept, 1.0, np.sqrt(strength))
            system = self._products[0] * weights
            system *= weights[:, None]
            solved = _solved(system, both, inner * (is_kept - share) * weights) * weights
            if outputs:  # all products are there
                yield share * inner[:, is_kept] + solved @ self._products[0][:, is_kept]
            else:
                yield share * change + solved @ self._rows

    def left_out(
        self, change: np.ndarray, strengths: Sequence[float], groups: np.ndarray
    ) -> Iterator[tuple[float, float]]:
        """Yield Σ |D′x|² over the rows x of C_r's root, at each λ: by this filter, and by one that never saw x's group.

        groups: (k,) the group of each row; groups of a person's or a question's positions. The second sum is exact but
        for C_r's trace, and needs no other filter: with M = C_f + λ C_r, ridges included, and X_b the rows of a group,
        that filter gives D′ X_bᵀ (I − λ X_b M⁻¹ X_bᵀ)⁻¹ (Woodbury).
        """
        ridge, count = FORGET_RIDGE / self.inputs, len(self._forget)
        drop, places = self._rows[count:], [np.flatnonzero(groups == group) for group in np.unique(groups)]
        onto = self.outputs(change) @ self._forget + ridge * change  # D C_f
        for strength in strengths:
            both = ridge + strength * RETAIN_RIDGE / self.inputs
            if self._is_short:  # M⁻¹ Zᵀ = Zᵀ (Z Zᵀ + both)⁻¹, Z the rows of C_f + λ C_r
                weights = np.repeat([1.0, np.sqrt(strength)], [count, len(drop)])
                inverse = _inverse(self._products[0] * weights * weights[:, None], both)
                outputs = (onto @ self._rows.T * weights) @ inverse[:, count:] / np.sqrt(strength)
                rests = [both * inverse[np.ix_(place + count, place + count)] for place in places]
            else:
                keep, dropped = self._products
                solved = drop @ _inverse(keep + strength * dropped, both)
                outputs = onto @ solved.T
                rests = [np.eye(len(place)) - strength * solved[place] @ drop[place].T for place in places]
            unseen = [np.linalg.solve(rest.T, outputs[:, place].T) for place, rest in zip(places, rests, strict=True)]
            yield float(np.sum(outputs**2)), float(sum(np.sum(values**2) for values in unseen))


def _inverse(system: np.ndarray, ridge: float) -> np.ndarray:
    """Return (system + ridge)⁻¹ of a system, which is changed."""
    system.flat[:: len(system) + 1] += ridge
    inverse: np.ndarray = np.linalg.inv(system)
    return inverse


def _solved(system: np.ndarray, ridge: float, rows: np.ndarray) -> np.ndarray:
    """Return rows · (system + ridge)⁻¹ of a symmetric system, which is changed."""
    system.flat[:: len(system) + 1] += ridge
    solved: np.ndarray = np.linalg.solve(system, rows.T).T
    return solved
