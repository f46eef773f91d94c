"""Compare the update that a merge computed with what the output dtype kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from msa_lite.errors import FormatError, MismatchError
from msa_lite.io.files.writing import json_form
from msa_lite.io.weights.checkpoint import FLOAT_DTYPES
from msa_lite.merger.formula import Factors, Term, VectorLike

WARN_LOSS = 0.10
_RANKS = 1 << 19  # numbers of a matrix of ranks by ranks at a time, which take 12 MB
NAMES = {key: dtype.name for key, dtype in FLOAT_DTYPES.items()}


@dataclass
class Change:
    """Sums over the weights of a tensor, or of many; norms are squared."""

    weights: int = 0
    """The number of weights."""
    changed: int = 0
    """The number of weights whose stored value changed."""
    weight: float = 0.0
    """The norm of the target's weights."""
    wanted: float = 0.0
    """The norm of the update, Σ weight · delta."""
    stored: float = 0.0
    """The norm of the update that was stored: rounded result minus rounded target."""
    lost: float = 0.0
    """The norm of wanted − stored."""
    cross: float = 0.0
    """The scalar product of two vectors; 0 with one, or with more than two."""
    vectors: dict[str, float] = field(default_factory=dict)
    """The norm of each vector itself, by the name of its term."""
    json_keys: ClassVar = {
        "weights": "weights", "weights_changed": "changed", "changed_share": "changed_share", "norm": "norm",
        "weight_norm": "weight_norm", "relative_size": "relative_size", "rounding_loss": "rounding_loss",
        "update_cosine": "update_cosine", "kept": "kept", "vector_cosine": "vector_cosine",
    }  # fmt: skip

    def add(self, other: Change) -> None:
        """Add the sums of other weights."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name, square in other.vectors.items():
            self.vectors[name] = self.vectors.get(name, 0.0) + square

    @property
    def rounding_loss(self) -> float:
        """Return ‖wanted − stored‖ / ‖wanted‖: the share of the update that the output dtype could not hold."""
        return math.sqrt(self.lost) / math.sqrt(self.wanted) if self.wanted else 0.0

    @property
    def update_cosine(self) -> float | None:
        """Return the cosine between the wanted and the stored update; None where one of them is zero."""
        return cosine((self.wanted + self.stored - self.lost) / 2, self.wanted, self.stored)

    @property
    def kept(self) -> float | None:
        """Return ⟨stored, wanted⟩ / ‖wanted‖²: the part of the update that is left; None for an update of zeros."""
        if not self.wanted:
            return None
        return (self.update_cosine or 0.0) * math.sqrt(self.stored) / math.sqrt(self.wanted)

    @property
    def vector_cosine(self) -> float | None:
        """Return the cosine between forget and retain vector; None unless there are just these two.

        Those of several requests are compared in pairs (`measure_interference`).
        """
        return cosine(self.cross, *self.vectors.values()) if self.vectors.keys() == {"forget", "retain"} else None

    @property
    def changed_share(self) -> float:
        """Return the share of weights whose stored value changed."""
        return self.changed / self.weights if self.weights else 0.0

    @property
    def norm(self) -> float:
        """Return the norm of the wanted update."""
        return math.sqrt(self.wanted)

    @property
    def weight_norm(self) -> float:
        """Return the norm of the target's weights."""
        return math.sqrt(self.weight)

    @property
    def relative_size(self) -> float | None:
        """Return ‖wanted‖ / ‖weight‖; None where the weights are all zero."""
        return self.norm / self.weight_norm if self.weight else None


_SUMS = [item.name for item in fields(Change) if item.name != "vectors"]


def cosine(product: float, square_a: float, square_b: float) -> float | None:
    """Return the cosine of two vectors from their scalar product and squared norms; None where one of them is zero."""
    if not (square_a > 0 and square_b > 0):
        return None
    return max(-1.0, min(1.0, product / (math.sqrt(square_a) * math.sqrt(square_b))))


def total(changes: Iterable[Change]) -> Change:
    """Return the sums over all tensors."""
    result = Change()
    for change in changes:
        result.add(change)
    return result


def fidelity_report(changes: Mapping[str, Change]) -> dict[str, Any]:
    """Return the manifest's report: figures in total and for each tensor that a vector touches."""
    return json_form({"total": total(changes.values()), "tensors": dict(sorted(changes.items()))})


def warnings(change: Change, dtype: str, stochastic: bool, codes: bool = False) -> list[str]:
    """Return a warning where the output's form lost much of the update.

    dtype: those of the touched tensors, in words. codes: whether the target's weights are codes, and stay so.
    """
    if change.rounding_loss <= WARN_LOSS:
        return []
    if codes:
        kept = f"{change.kept or 0:.0%} of the update is left along its direction"
        if stochastic:
            return [
                f"stored in {dtype}, {kept}, with noise of {change.rounding_loss:.0%} of it on top, from stochastic "
                "rounding. Without noise: bfloat16 (--dtype bfloat16) or an adapter (--as adapter)"
            ]
        return [
            f"stored in {dtype}, {kept}: weights go back to their old codes where the update is less than half a step. "
            "All of it is left in bfloat16 (--dtype bfloat16) or an adapter (--as adapter), on average also with "
            "--rounding stochastic"
        ]
    if stochastic:
        return [
            f"stochastic rounding to {dtype} put noise of {change.rounding_loss:.0%} of the update on top of it; only "
            "its mean is kept. Without noise: float32 (--dtype float32) or an adapter (--as adapter)"
        ]
    return [
        f"rounding to {dtype} lost {change.rounding_loss:.0%} of the update (‖wanted − stored‖ / ‖wanted‖); to keep "
        "it, write float32 (--dtype float32) or an adapter (--as adapter), or keep its mean (--rounding stochastic)"
    ]


@dataclass(frozen=True)
class Merged:
    """The result of a merge: its folder, and figures of the update in total."""

    folder: Path
    """The merged model."""
    tensors_touched: int
    """The number of tensors that a vector changes."""
    weights_touched: int
    """The number of weights in these tensors."""
    weights_changed: int
    """The number of weights whose stored value changed."""
    rounding_loss: float | None = None
    """The share of the update that the output dtype could not hold; None where mergekit merged."""
    relative_size: float | None = None
    """The update's norm over the weights' norm; None where the weights are all zero."""
    update_cosine: float | None = None
    """The cosine between the wanted and the stored update; None where one of them is zero, or mergekit merged."""
    vector_cosine: float | None = None
    """The cosine between forget and retain vector; None unless there are just these two."""
    notes: tuple[str, ...] = ()
    """Warnings for the user, one sentence each."""
    method: str | None = None
    """mergekit's name of the method; None for our own merges."""
    interference: Sequence[dict[str, Any]] = ()
    """The interference of the vectors of several requests, pair by pair."""
    json_keys: ClassVar = {"out": "folder", "**": "change", "interference?": "interference"}

    @classmethod
    def recorded(cls, folder: Path, manifest: Mapping[str, Any]) -> Merged:
        """Return the result of a merge that was made before, from its manifest."""
        change = manifest["change"] | {"notes": tuple(manifest["change"]["notes"])}
        return cls(folder, **change, interference=tuple(manifest.get("interference", ())))

    @property
    def change(self) -> dict[str, Any]:
        """Return the figures for the manifest."""
        left_out = ("folder", "interference") if self.method else ("folder", "interference", "method")
        values = {key: value for key, value in vars(self).items() if key not in left_out}
        return {**values, "notes": list(self.notes)}

    def describe(self) -> str:
        """Say in a few lines how the weights changed."""
        if not self.weights_touched:
            return "the target as it is, no weight changed"
        share = self.weights_changed / self.weights_touched
        lines = [f"{share:.2%} of {self.weights_touched} weights in {self.tensors_touched} tensors changed"]
        update = [] if self.relative_size is None else [f"{self.relative_size:.2e} of the weights' norm"]
        update += [] if self.rounding_loss is None else [f"rounding lost {self.rounding_loss:.2%} of it"]
        lines.append(f"{self.method or 'update'}: {'; '.join(update)}")
        if self.update_cosine is not None:
            lines[-1] += f" (cosine of stored and wanted update {self.update_cosine:.4f})"
        if self.vector_cosine is not None:
            lines.append(f"cosine of forget and retain vector: {self.vector_cosine:.3f}")
        return "\n".join(lines)


def measure(before: np.ndarray, wanted: np.ndarray, stored: np.ndarray, moved: np.ndarray) -> Change:
    """Return the sums of one block; overwrites `stored`.

    before: the weights, rounded to the output dtype. wanted: the update. stored: the result as it is written. All have
    one shape and the dtype that the merge computes in. moved: a buffer of that shape for booleans. Dot products of half
    a million fp32 numbers are good to six digits, enough for shares.
    """
    update = np.subtract(stored, before, out=stored)
    stored_sq = _square(update)
    changed = int(np.count_nonzero(np.not_equal(update, 0, out=moved)))
    lost_sq = _square(np.subtract(update, wanted, out=update))
    return Change(before.size, changed, _square(before), _square(wanted), stored_sq, lost_sq)


def _square(values: np.ndarray) -> float:
    flat = values.reshape(-1)
    return float(np.dot(flat, flat))


def check_update(name: str, wanted: np.ndarray) -> None:
    """Raise FormatError when the update of a tensor is not finite."""
    if not np.isfinite(wanted).all():
        raise FormatError(
            f"{name}: the update is not finite; is there NaN in a checkpoint, or is alpha or beta far too large?"
        )


def measure_carefully(before: np.ndarray, wanted: np.ndarray, stored: np.ndarray) -> Change:
    """Return the sums of a block in fp64, over finite weights alone, where those of `measure` are not finite."""
    old, update, new = (values.astype(np.float64) for values in (before, wanted, stored))
    finite = np.isfinite(old) & np.isfinite(new)
    change = measure(old[finite], update[finite], new[finite], np.empty(int(finite.sum()), bool))
    change.weights = before.size
    return change


def check_overflow(before: np.ndarray, stored: np.ndarray, fault: str) -> None:
    """Raise MismatchError with `fault` where a finite weight is stored as an infinity (or NaN)."""
    finite = np.isfinite(stored.astype(before.dtype))
    if not finite.all() and np.isfinite(before[~finite]).any():
        raise MismatchError(fault)


def measure_deltas(terms: Sequence[Term[np.ndarray]]) -> Change:
    """Return the norms and the scalar product of a block's deltas."""
    return _measure_terms(terms, lambda a, b: float(np.dot(a.reshape(-1), b.reshape(-1))))


def measure_factors(terms: Sequence[Term[Factors]]) -> Change:
    """Return these figures from factors, without the products."""
    return _measure_terms(terms, factor_product)


def _measure_terms(terms: Sequence[Term[VectorLike]], product: Callable[[VectorLike, VectorLike], float]) -> Change:
    cross = product(terms[0].vector, terms[1].vector) if len(terms) == 2 else 0.0
    return Change(cross=cross, vectors={term.name: product(term.vector, term.vector) for term in terms})


def factor_product(first: Factors, second: Factors) -> float:
    """Return ⟨L_1 R_1, L_2 R_2⟩ = Σ (L_1ᵀ L_2) ∘ (R_1 R_2ᵀ), without the products.

    The ranks-by-ranks matrices are made by blocks of rows, so that they take no more memory at high ranks. At ranks
    far above the sides of the weight they take more time than the products; then these are made, by blocks as well.
    """
    (left_1, right_1), (left_2, right_2), total = first, second, 0.0
    (height, rank_1), (rank_2, width) = left_1.shape, right_2.shape
    if (rank_1 + rank_2) * height * width < rank_1 * rank_2 * (height + width):
        step = max(1, _RANKS // width)
        for start in range(0, height, step):
            rows = (left_1[start : start + step] @ right_1).astype(np.float64)
            total += float(np.sum(rows * (left_2[start : start + step] @ right_2)))
        return total
    step = max(1, _RANKS // len(right_2))
    for start in range(0, len(right_1), step):
        rows = (left_1[:, start : start + step].T @ left_2).astype(np.float64)
        total += float(np.sum(rows * (right_1[start : start + step] @ right_2.T)))
    return total
