"""The modules of an adapter that holds an update: factors side by side; of other changes the best product of a rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from msa_lite.errors import MismatchError, join_faults
from msa_lite.io.models.loading import empty_model
from msa_lite.io.models.places import linear_paths, module_paths
from msa_lite.io.weights.adapter import unwrapped
from msa_lite.io.weights.blocks import Files, Scratch
from msa_lite.io.weights.checkpoint import TensorEntry
from msa_lite.io.weights.factors import BareParameter, ExpertShare, LowRank
from msa_lite.io.weights.tied_head import ties_head
from msa_lite.io.weights.vocabulary import is_head
from msa_lite.merger.checks.checked import CheckedMerge
from msa_lite.merger.checks.memory import block_rows, blocks_of
from msa_lite.merger.fidelity import factor_product
from msa_lite.merger.formula import Factors, Term, combine_factors
from msa_lite.merger.vectors.deltas import Delta, Product, Stacked

_FACTOR_KEYS = {False: "base_model.model.{}{}.lora_{}.weight", True: "base_model.model.{}{}.lora_embedding_{}"}
OVERSAMPLED = 8  # columns of the sketch beyond the rank
_ITERATIONS = 2  # of the power method: singular values of updates fall slowly
ReadRows = Callable[[], Iterable[tuple[slice, np.ndarray]]]
"""Yields a matrix by rows; called once for each pass."""
Computed = tuple[np.ndarray, np.ndarray, Iterable[float]]
"""A and B of a module of the output in fp32, as PEFT keeps them; and the squared norms of the update, of its terms
(summed), and of what was cut."""


@dataclass(frozen=True, kw_only=True)
class _OutputModule:
    """A module of the output, by headers."""

    path: str
    """The name that PEFT's config has for it: of the module, or of its parameter."""
    key: str
    """The name of A and B in the file, with {} for the one or the other."""
    shape: tuple[int, int]
    """(out, in) of the delta as PEFT's module has it."""
    rank: int
    """The rank in the output, of each of its matrices."""
    stacked: int
    """The ranks of all terms together."""
    experts: int = 1
    """The number of matrices that it stands for."""
    is_parameter: bool = False
    """True where it adapts a bare parameter of a module."""
    is_turned: bool = False
    """True where the target stores the weight of the module as (in, out)."""

    @property
    def tensors(self) -> list[tuple[str, str, tuple[int, int], int]]:
        """Return name, dtype, shape and bytes of A and B in the output."""
        rank = self.rank * self.experts
        shapes = {"A": (rank, self.shape[1]), "B": (self.shape[0], rank)}
        return [(self.key.format(half), "F32", sides, 4 * math.prod(sides)) for half, sides in shapes.items()]

    @property
    def nbytes(self) -> int:
        """Return the bytes of A and B."""
        return sum(size for *_, size in self.tensors)


@dataclass(frozen=True, kw_only=True)
class FactorModule(_OutputModule):
    """A module that holds the factors of all terms side by side, cut to its rank where they have more."""

    terms: Sequence[Term[LowRank]]
    """The terms that change the module, at least one. The output's factors are turned as those of the first one."""

    @property
    def is_cut(self) -> bool:
        return self.rank < self.stacked

    @property
    def memory(self) -> int:
        """Return the most bytes that its arrays take at a time."""
        (out, into), rank = self.shape, self.stacked
        whole, core = rank * (out + into), rank * rank
        needed = 3 * whole + 4 * core  # as read, with strengths, stacked; ranks by ranks for the norms
        if self.is_cut:  # QR holds four copies of a factor, the core's SVD many of the core
            needed = max(needed, whole + rank * out + 4 * rank * max(out, into) + 2 * core, 2 * whole + 16 * core)
        if not self.terms[0].vector.share:
            return 8 * needed
        # The results of all experts, and again side by side; each B as it is read, and its columns by expert.
        return 8 * needed + 2 * self.nbytes + 3 * sum(term.vector.held_bytes for term in self.terms)

    def compute(self, files: Files) -> Computed:
        """Return the factors of all its experts. Raise FormatError for NaN or infinities in a vector."""
        sums = np.zeros(3)
        outer, inner = [], []
        for expert in range(self.experts):
            b, a, of_terms = self._combined(files, expert)
            whole, lost = factor_product((b, a), (b, a)), 0.0
            if self.is_cut:
                b, a, lost = truncate(b, a, self.rank)
            outer.append(b.astype(np.float32))
            inner.append(a.astype(np.float32))
            sums += whole, of_terms, lost
        # B (out, rank · experts): a column of each expert in turn, then the next of each (`spread_experts`)
        return np.concatenate(inner), np.stack(outer, axis=-1).reshape(len(outer[0]), -1), sums

    def _combined(self, files: Files, expert: int) -> tuple[np.ndarray, np.ndarray, float]:
        """Return B and A of the update in fp64, and the squared norms of its terms, summed. It keeps no other array."""
        lows = [term.with_vector(_of_expert(term.vector, expert)) for term in self.terms]
        transposed = self.terms[0].vector.transposed
        terms = [low.with_vector(_factors(files, low.vector, transposed)) for low in lows]
        of_terms = sum(term.weight * term.weight * factor_product(term.vector, term.vector) for term in terms)
        return *combine_factors(terms), of_terms


def _of_expert(low: LowRank, expert: int) -> LowRank:
    """Return the factors of an expert, with all its outputs."""
    return replace(low, share=ExpertShare(expert, low.share.count, (0, low.b.shape[0]))) if low.share else low


def _factors(files: Files, low: LowRank, transposed: bool) -> Factors:
    """Return (scale · B, A) in fp64, in PEFT's orientation for a weight that is stored as (in, out) or not."""
    b, a = low.read(files, np.float64)
    b = b * low.scale
    return (b, a) if low.transposed == transposed or low.parameter else (a.T, b.T)


@dataclass(frozen=True, kw_only=True)
class DenseModule(_OutputModule):
    """A module whose update is no product of factors: the output holds the best one of its rank (`approximate`)."""

    terms: Sequence[Term[Delta]]
    """The terms that change the module, at least one."""
    entry: TensorEntry
    """The target's tensor (out, in)."""

    @property
    def memory(self) -> int:
        """Return the most bytes that its arrays take at a time."""
        block = block_rows(self.entry) * self.entry.matrix_shape[1]
        return 8 * (4 * block + 5 * (self.rank + OVERSAMPLED) * sum(self.entry.matrix_shape))

    def compute(self, files: Files) -> Computed:
        """Return the factors of the best product. Raise FormatError for NaN or infinities in a vector."""
        rows = partial(update_rows, files, self.entry, self.terms)
        (b, a), whole, kept = approximate(rows, self.entry.matrix_shape, self.rank)
        # The norms of single terms would take a pass of their own. Terms that cancel out leave an update of zero.
        return a.astype(np.float32), b.astype(np.float32), (whole, whole, max(0.0, whole - kept))


def update_rows(files: Files, entry: TensorEntry, terms: Sequence[Term[Delta]]) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield Σ weight · Δw of a tensor by rows of its matrix view, in fp64."""
    loaded, scratch = [term.with_vector(term.vector.load(files, np.float64)) for term in terms], Scratch()
    for start, stop in blocks_of(entry):
        rows = np.zeros((stop - start, entry.matrix_shape[1]))
        for term in loaded:
            rows += term.weight * term.vector.rows(files, start, stop, np.float64, scratch)
        yield slice(start, stop), rows


# Products of few ranks in the place of matrices: the best ones in the Frobenius norm (Eckart and Young), in fp64


def truncate(b: np.ndarray, a: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Return the best approximation of B A of this rank, never forming the product; and its squared error.

    b: (out, r), a: (r, in). With B = Q_b R_b and Aᵀ = Q_a R_a the singular values are those of R_b R_aᵀ, which is
    at most (r, r).
    """
    left, core_left = np.linalg.qr(b)
    right, core_right = np.linalg.qr(a.T)
    u, s, v = np.linalg.svd(core_left @ core_right.T, full_matrices=False)
    root = np.sqrt(s[:rank])
    return left @ (u[:, :rank] * root), (root[:, None] * v[:rank]) @ right.T, float(np.sum(s[rank:] ** 2))


def approximate(rows: ReadRows, shape: tuple[int, int], rank: int) -> tuple[Factors, float, float]:
    """Return B (out, rank) and A (rank, in) near a matrix that is only read by rows; its squared norm, and theirs.

    A random sketch finds the range of the largest singular values, and two steps of the power method sharpen it; the
    matrix is read six times. Source: Halko, Martinsson and Tropp (2011), algorithms 4.4 and 5.1. The result depends on
    the matrix alone.
    """
    (out, into), width = shape, min(rank + OVERSAMPLED, *shape)
    sketch = np.random.default_rng(0).standard_normal((into, width))
    whole = 0.0
    for step in range(_ITERATIONS + 1):
        image = np.empty((out, width))
        for part, block in rows():
            image[part] = block @ sketch
            whole += float(np.sum(block * block)) if step == 0 else 0.0
        basis, _ = np.linalg.qr(image)
        seen = np.zeros((into, width))  # Dᵀ Q
        for part, block in rows():
            seen += block.T @ basis[part]
        if step < _ITERATIONS:
            sketch, _ = np.linalg.qr(seen)
    u, s, v = np.linalg.svd(seen.T, full_matrices=False)
    root = np.sqrt(s[:rank])
    return ((basis @ u[:, :rank]) * root, root[:, None] * v[:rank]), whole, float(np.sum(s[:rank] ** 2))


Module = FactorModule | DenseModule


def find_modules(checked: CheckedMerge, max_rank: int | None) -> tuple[list[Module], list[str]]:
    """Return the modules of the output, and the target's tensors whose change it cannot hold.

    A change that is no product of factors gets the best one of `max_rank`, where it is that of a linear layer. Raise
    MismatchError for such changes without `max_rank`, and for vectors that adapt experts in two ways.
    """
    is_product = {name: all(map(_is_product, checked.deltas(name))) for name in checked.touched}
    products = [name for name in checked.touched if is_product[name]]
    faults = [
        f"{name}: adapted with all experts of its layer in one vector, on its own in another"
        for name in products
        if len({bool(term.vector.parameter) for term in first_factors(checked, name)}) > 1
    ]
    if max_rank is None:
        faults += _dense_faults(checked)
    if faults:
        headline = "only products of factors fit into a LoRA adapter; merge to a model, or give --max-rank:"
        raise MismatchError(join_faults(headline, faults))
    modules: list[Module] = [*_factor_modules(checked, products, max_rank)] if products else []
    dense = [name for name in checked.touched if not is_product[name]]
    if not dense or max_rank is None:
        return modules, []
    paths, target = linear_paths(empty_model(checked.target), checked.target.tensors), checked.target.tensors
    is_tied = ties_head(checked.target)
    held = [name for name in dense if name in paths and not (is_tied and is_head(name))]
    for name in held:
        shape, key = target[name].matrix_shape, _FACTOR_KEYS[False].format(paths[name], "", "{}")
        rank = min(max_rank, *shape)
        sides: dict[str, Any] = {"shape": shape, "rank": rank, "stacked": rank}
        modules.append(DenseModule(path=paths[name], key=key, **sides, terms=checked.deltas(name), entry=target[name]))
    return modules, [name for name in dense if name not in held]


def _is_product(term: Term[Delta]) -> bool:
    delta = term.vector
    return isinstance(delta, Stacked) or (isinstance(delta, Product) and delta.count is None)


def _dense_faults(checked: CheckedMerge) -> Iterator[str]:
    """Yield the vectors, or their tensors, that no adapter can hold exactly."""
    for term in checked.terms:
        if not term.vector.is_adapter:
            yield f"{term.vector.folder}: the {term.name} vector is a full checkpoint"
            continue
        for name, delta in term.vector.deltas.items():
            if not _is_product(term.with_vector(delta)):
                yield f"{name}: {delta.kind} in the {term.name} vector"


def first_factors(checked: CheckedMerge, name: str) -> list[Term[LowRank]]:
    """Return the factors that change a tensor; of a stacked one those of its first expert."""
    products = [(t, t.vector.slices[0] if isinstance(t.vector, Stacked) else t.vector) for t in checked.deltas(name)]
    return [term.with_vector(delta.low) for term, delta in products if isinstance(delta, Product)]


def _factor_modules(checked: CheckedMerge, products: Sequence[str], max_rank: int | None) -> list[FactorModule]:
    """Return the modules of tensors that products of factors change, under the names that transformers has today.

    All tensors of a parameter of stacked experts belong to one.
    """
    terms: dict[tuple[str, BareParameter | None], dict[str, Term[LowRank]]] = {}
    names, unknown = _todays_names(checked, products), []
    for name in products:
        for term in first_factors(checked, name):
            low = term.vector
            module = low.module if low.parameter else names.get(name, "") if names else unwrapped(low.module)
            terms.setdefault((module, low.parameter), {}).setdefault(term.name, term)
            if not module:
                unknown.append(f"{name}: {low.module} in the {term.name} vector")
    if unknown:
        headline = "transformers holds these weights in no module of their own, so PEFT cannot; merge to a model:"
        raise MismatchError(join_faults(headline, unknown))
    return [
        _factor_module(list(by_name.values()), module, _later(module, parameter, terms), max_rank)
        for (module, parameter), by_name in terms.items()
    ]


def _factor_module(terms: Sequence[Term[LowRank]], name: str, wrappers: int, max_rank: int | None) -> FactorModule:
    """Return a module by its name, as transformers has it.

    wrappers: how many PEFT puts around this one, for other parameters of the module.
    """
    low, stacked = terms[0].vector, sum(term.vector.rank for term in terms)
    shape = low.b.shape[0], low.a.shape[1]
    return FactorModule(
        path=f"{name}.{low.parameter.name}" if low.parameter else name,
        key=_FACTOR_KEYS[low.is_embedding].format(name, ".base_layer" * wrappers, "{}"),
        shape=shape,
        # After a cut, the rank is no more than the matrix can have.
        rank=stacked if max_rank is None or stacked <= max_rank else min(max_rank, *shape),
        stacked=stacked,
        experts=low.share.count if low.share else 1,
        is_parameter=low.parameter is not None,
        is_turned=low.transposed and not (low.is_embedding or low.parameter),
        terms=terms,
    )


def _todays_names(checked: CheckedMerge, products: Sequence[str]) -> dict[str, str]:
    """Return the module's name by tensor, as transformers loads the target today; {} where files and vectors agree.

    It takes transformers, and seconds, so only families are looked up whose modules transformers renames while it loads
    them: those with experts, those with a text model inside, and those whose vectors have other names than the files.
    """
    target = checked.target
    lows = [(name, term.vector) for name in products for term in first_factors(checked, name)]
    is_renamed = "text_config" in target.config or any(".experts." in name for name in target.tensors)
    if not is_renamed and all(name == f"{unwrapped(low.module)}.weight" for name, low in lows):
        return {}
    return module_paths(empty_model(target), target.tensors)


def _later(module: str, parameter: BareParameter | None, others: Iterable[tuple[str, BareParameter | None]]) -> int:
    """Return how many other parameters of a module PEFT wraps after this one."""
    return sum(name == module and bool(other and parameter and other.place > parameter.place) for name, other in others)
