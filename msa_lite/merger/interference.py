"""Compare the vectors of several requests, pair by pair and layer by layer, before they are merged into one sum.

The cosine of two deltas Δ_a and Δ_b says how far one request does what another does, or undoes it. The overlap
‖U_aᵀ U_b‖_F² / min(r_a, r_b), of orthonormal bases of the two column spaces, is the share of the smaller one that lies
in the larger. It is 0 where the two write into different directions, 1 where one space holds the other; random spaces
of dimension d have max(r_a, r_b) / d.

Deltas of LoRA are compared by their factors, in fp64, and their product is never formed. Other deltas (full
checkpoints, DoRA, new values) are read in blocks of rows; they have cosines, but no overlap, since their column space
is nearly all of the space.

A run compares the vectors of its own request with all others. Those of earlier requests were compared when the later of
them was new, and all pairs of n requests would be n² many. Of the pairs, the most alike are kept.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from threadpoolctl import threadpool_limits

from msa_lite.io.console.progress import notices, readable
from msa_lite.io.weights.blocks import Files, Scratch
from msa_lite.io.weights.checkpoint import TensorEntry
from msa_lite.merger.bounds import RESERVED, block_rows, blocks_of, parse_size
from msa_lite.merger.checked import CheckedMerge
from msa_lite.merger.deltas import Delta, Loaded
from msa_lite.merger.fidelity import cosine, factor_product
from msa_lite.merger.formula import Term

logger = logging.getLogger(__name__)

# From here on, more than a quarter of the (squared) length of one update lies along the other, so that a strength that
# was chosen for one request alone is too much, or too little, beside the other. In the quickstart, requests that share
# half of their rows have 0.57, requests on different people 0.01, and forget and retain vectors 0.02.
HIGH_COSINE = 0.5
_SHOWN = 10  # pairs in the log
_KEPT = 20  # pairs in the manifest, and in reports
_LAYERS = 3  # of a pair in the log
_TINY = 1e-6  # of a delta's largest singular value; what is smaller is rounding of stored fp32 factors
_LAYER = re.compile(r"(?:.*?\.)?\d+(?=\.)")

Pair = tuple[str, str]
_PairSums = defaultdict[Pair, float]


@dataclass(frozen=True)
class Likeness:
    """Cosine and overlap of two vectors, in one layer or in all."""

    cosine: float | None
    """The cosine of the deltas, −1 to 1; None where one of them is zero or not there."""
    overlap: float | None
    """The overlap of their column spaces, 0 to 1; None where no tensor has both deltas as LoRA factors."""

    def __str__(self) -> str:
        texts = [f"{name} {value:.2f}" for name, value in vars(self).items() if value is not None]
        return ", ".join(texts) or "nothing in common"


@dataclass(frozen=True)
class Interference:
    """The likeness of two vectors of a merge."""

    one: str
    """The name of a vector ("forget 1")."""
    other: str
    """The name of another."""
    total: Likeness
    """Over all tensors."""
    layers: dict[str, Likeness]
    """By layer ("model.layers.0"), or tensor outside of the layers, where both vectors change something."""

    json_keys: ClassVar = {"one": "one", "other": "other", "**": "total", "layers": "layer_figures"}

    @property
    def layer_figures(self) -> list[dict[str, Any]]:
        """Return the figures of each layer, with its name."""
        return [{"layer": name, **vars(likeness)} for name, likeness in self.layers.items()]

    @property
    def sides(self) -> tuple[str, str]:
        """Return "forget" or "retain" for each of the two."""
        return self.one.partition(" ")[0], self.other.partition(" ")[0]

    @property
    def size(self) -> float:
        """Return the absolute cosine; 0 where there is none."""
        return abs(self.total.cosine or 0.0)

    @property
    def closest_layers(self) -> dict[str, Likeness]:
        """Return the few layers with the largest absolute cosines."""
        order = sorted(self.layers, key=lambda name: -abs(self.layers[name].cosine or 0.0))
        return {name: self.layers[name] for name in order[:_LAYERS]}


def tell_interference(
    checked: CheckedMerge, max_memory: str | int, folders: Collection[Path] | None = None
) -> list[Interference]:
    """Measure and log how the vectors of several requests interfere, with a warning for pairs that are much alike.
    Retain vectors alone are not warned of: requests with one retain set often share its rows.

    folders: of vectors, each of which is compared with all others; None: all pairs. Return the pairs that are most
    alike, the first of them first; nothing for one request, or where the factors do not fit into the memory.
    """
    if len({term.side for term in checked.terms}) == len(checked.terms):
        return []
    needed = RESERVED + max((_factor_memory(checked, name) for name in checked.touched), default=0)
    if needed > parse_size(max_memory):
        logger.warning(
            "how far the requests interfere was not measured: that takes %s of memory, allowed are %s (--max-memory)",
            readable(needed), max_memory,
        )  # fmt: skip
        return []
    pairs = measure_interference(checked, folders)
    places = {term.name: term.vector.folder for term in checked.terms}
    notices.info("one merge of %s", ", ".join(f"{name} ({folder})" for name, folder in places.items()))
    for pair in pairs[:_SHOWN]:
        layers = "; ".join(f"{name}: {likeness}" for name, likeness in pair.closest_layers.items())
        notices.info("  %s and %s: %s; most in %s", pair.one, pair.other, pair.total, layers or "no layer")
    if len(pairs) > _SHOWN:
        notices.info("  … and %d pairs that are less alike", len(pairs) - _SHOWN)
    for pair in (pair for pair in pairs if pair.size >= HIGH_COSINE and "forget" in pair.sides):
        logger.warning("%s", _warning(pair, [str(places[name]) for name in (pair.one, pair.other)]))
    return pairs[:_KEPT]


def interference_fact(pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the entry of a manifest and of `--json`; none for a single request."""
    return {"interference": [dict(pair) for pair in pairs]} if pairs else {}


def _warning(pair: Interference, folders: Sequence[str]) -> str:
    """Return what a large cosine means for the sum, by the sides of the two vectors and the cosine's sign."""
    alike = (pair.total.cosine or 0.0) > 0
    if pair.sides[0] == pair.sides[1]:
        effect = "do much the same, so together they may go too far" if alike else "undo much of each other"
    else:
        effect = "are much alike, so one puts back what the other removes" if alike else "push the same way"
    return (
        f"{pair.one} ({folders[0]}) and {pair.other} ({folders[1]}) {effect} (cosine {pair.total.cosine:.2f}); "
        "strengths that were chosen without the other may no longer fit: choose alpha and beta anew, on all together"
    )


def measure_interference(checked: CheckedMerge, folders: Collection[Path] | None = None) -> list[Interference]:
    """Return the likeness of each two vectors of a merge, the largest absolute cosine first.

    folders: those of which one is in each pair; None: all pairs.
    """
    names, layers = [term.name for term in checked.terms], dict[str, _Sums]()
    wanted = None if folders is None else {folder.resolve() for folder in folders}
    own = {term.name for term in checked.terms if wanted is None or term.vector.folder.resolve() in wanted}
    compared = [pair for pair in combinations(names, 2) if own.intersection(pair)]
    with threadpool_limits(1, user_api="blas"), np.errstate(over="ignore", invalid="ignore"):
        files = Files()
        for name in checked.touched:
            layers.setdefault(layer_of(name), _Sums()).add(
                _measure(files, checked, checked.target.tensors[name], compared)
            )
    whole = _Sums()
    for sums in layers.values():
        whole.add(sums)
    pairs = []
    for pair in compared:
        common = {name: sums.likeness(pair) for name, sums in layers.items() if sums.has_both(pair)}
        pairs.append(Interference(*pair, whole.likeness(pair), common))
    return sorted(pairs, key=lambda pair: -pair.size)


def layer_of(tensor: str) -> str:
    """Return the layer that a tensor is in, "model.layers.3"; its own name without .weight if it is in none."""
    match = _LAYER.match(tensor)
    return match[0] if match else tensor.removesuffix(".weight")


@dataclass
class _Sums:
    """Sums over tensors, by pairs of vectors."""

    products: _PairSums = field(default_factory=lambda: defaultdict(float))
    """Scalar products; those of a vector with itself are its squared norms."""
    shared: _PairSums = field(default_factory=lambda: defaultdict(float))
    """‖U_aᵀ U_b‖_F²."""
    ranks: _PairSums = field(default_factory=lambda: defaultdict(float))
    """min(r_a, r_b)."""

    def add(self, other: _Sums) -> None:
        """Add the sums of other tensors."""
        for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True):
            for pair, value in theirs.items():
                mine[pair] += value

    def has_both(self, pair: Pair) -> bool:
        """Check whether both vectors change something."""
        return all(self.products[name, name] > 0 for name in pair)

    def likeness(self, pair: Pair) -> Likeness:
        """Return cosine and overlap of a pair."""
        first, second = pair
        angle = cosine(self.products[pair], self.products[first, first], self.products[second, second])
        return Likeness(angle, min(1.0, self.shared[pair] / self.ranks[pair]) if self.ranks[pair] else None)


def _measure(files: Files, checked: CheckedMerge, entry: TensorEntry, compared: Sequence[Pair]) -> _Sums:
    """Return the sums of one tensor. compared: the pairs of vectors."""
    terms = [term.with_vector(term.vector.load(files, np.float64)) for term in checked.deltas(entry.name)]
    factors = {term.name: (d.left, d.right) for term in terms if isinstance(d := term.vector, Loaded)}
    sums, present = _Sums(), {term.name for term in terms}
    compared = [pair for pair in compared if present.issuperset(pair)]
    products = [*compared, *((name, name) for name in present)]
    if len(factors) == len(terms):
        for first, second in products:
            sums.products[first, second] = factor_product(factors[first], factors[second])
    else:
        _add_rows(files, entry, terms, products, sums)
    bases = {name: column_basis(*pair) for name, pair in factors.items()} if len(factors) > 1 else {}
    for first, second in (pair for pair in compared if bases.keys() >= {*pair}):
        sums.shared[first, second] = float(np.sum((bases[first].T @ bases[second]) ** 2))
        sums.ranks[first, second] = min(bases[first].shape[1], bases[second].shape[1])
    return sums


def _add_rows(
    files: Files, entry: TensorEntry, terms: Sequence[Term[Delta]], products: Sequence[Pair], sums: _Sums
) -> None:
    """Add the scalar products of deltas that are not all factors, in blocks of rows."""
    common = Scratch()
    buffers = [Scratch(common) for _ in terms]
    for start, stop in blocks_of(entry):
        blocks = {
            term.name: term.vector.rows(files, start, stop, np.float64, buffer).reshape(-1)
            for term, buffer in zip(terms, buffers, strict=True)
        }
        for first, second in products:
            sums.products[first, second] += float(np.dot(blocks[first], blocks[second]))


def column_basis(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return an orthonormal basis of the column space of left · right, (rows, its dimension), without the product.

    left: (rows, r), right: (r, columns). With left = Q R and G = right · rightᵀ, it is that of Q (R G^½).
    """
    basis, core = np.linalg.qr(left)
    values, vectors = np.linalg.eigh(right @ right.T)
    core = core @ (vectors * np.sqrt(np.maximum(values, 0.0)))
    directions, sizes, _ = np.linalg.svd(core, full_matrices=False)
    used = sizes > _TINY * sizes[0] if sizes.size else np.zeros(0, bool)
    return np.asarray(basis @ directions[:, used])


def _factor_memory(checked: CheckedMerge, name: str) -> int:
    """Return the bytes that comparing a tensor takes: factors in fp64, bases, and the copies that QR makes."""
    entry, factors = checked.target.tensors[name], checked.factor_bytes(name)
    in_fp64 = factors if checked.precision.work(entry) is np.float64 else 2 * factors
    block = 0 if checked.is_low_rank(name) else 32 * block_rows(entry) * entry.matrix_shape[1]
    return 4 * in_fp64 + block * len(checked.deltas(name))
