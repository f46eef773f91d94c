"""Write the update as one PEFT adapter on the target: factors side by side, so nothing is rounded and ranks add up.

Target and adapter together are as good as the merged model. The adapter takes a hundredth of the space and can be
switched off again. It is a way to deliver and to try the update; it removes nothing from the model.

Dtype policy: fp64 arithmetic, rounded once to fp32 on storing. Headers tell all shapes, so factors are
computed and written module by module. Memory is that of the largest module, however many there are.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from threadpoolctl import threadpool_limits

from msa_lite.errors import MismatchError, UsageError, join_faults
from msa_lite.io.console.progress import Progress, readable, silent
from msa_lite.io.files.reading import read_object
from msa_lite.io.files.writing import check_space, json_form, write_json
from msa_lite.io.weights.adapter import ADAPTER_CONFIG, ADAPTER_FILE, LowRank, unwrapped
from msa_lite.io.weights.blocks import Files, read_whole
from msa_lite.io.weights.hub import Source
from msa_lite.io.weights.writer import Sink, file_header
from msa_lite.merger.checked import MAX_MEMORY, RESERVED, CheckedMerge, Precision, check_merge, msa_terms, parse_size
from msa_lite.merger.deltas import Product
from msa_lite.merger.formula import Factors, OneOrSeveral, Term, combine_factors
from msa_lite.merger.inputs import ModelLike, find_inputs
from msa_lite.merger.interference import interference_fact, tell_interference

logger = logging.getLogger(__name__)

_FACTOR_KEYS = {False: "base_model.model.{}.lora_{}.weight", True: "base_model.model.{}.lora_embedding_{}"}


@dataclass(frozen=True)
class MergedAdapter:
    """The result of a merge to an adapter."""

    folder: Path
    """The adapter."""
    modules: int
    """The number of modules that it adapts."""
    rank: int
    """The largest rank of a module."""
    truncation_loss: float
    """The share of the update that truncation to `max_rank` lost."""
    interference: Sequence[dict[str, Any]] = ()
    """The interference of the vectors of several requests, pair by pair, in JSON form."""

    json_keys: ClassVar = {"out": "folder", "**": "change", "interference?": "interference"}
    notes: ClassVar[tuple[str, ...]] = ()  # nothing is rounded

    @property
    def change(self) -> dict[str, Any]:
        """Return the figures for the manifest."""
        return {"modules": self.modules, "rank": self.rank, "truncation_loss": self.truncation_loss}

    def describe(self) -> str:
        """Say in a line what was written."""
        lost = f"; truncation lost {self.truncation_loss:.2%} of the update" if self.truncation_loss else ""
        return f"one adapter on {self.modules} modules, rank {self.rank}{lost}"


def merge_adapters(
    target: ModelLike,
    out: str | Path,
    *,
    forget: OneOrSeveral[ModelLike] | None = None,
    alpha: OneOrSeveral[float] = 1.0,
    retain: OneOrSeveral[ModelLike] | None = None,
    beta: OneOrSeveral[float] | None = None,
    prior: ModelLike | None = None,
    max_rank: int | None = None,
    max_memory: str | int = MAX_MEMORY,
    replace: bool = False,
    progress: Progress = silent,
) -> MergedAdapter:
    """Write −α · forget + β · retain as one fp32 LoRA adapter on the target; arguments and checks as for `merge`.

    max_rank: truncate each module's update to at most this rank, the best one in the Frobenius norm (Eckart and Young),
    by QR of the factors and the SVD of their small core. The result says how much that loses. Raise as `merge` does,
    UsageError when the factors of one module do not fit into `max_memory`, and MismatchError for vectors that are no
    product of factors: checkpoints, DoRA, modules_to_save, biases. A failed attempt leaves nothing to resume.
    """
    terms: list[Term[ModelLike]] = msa_terms(forget, alpha, retain, beta)
    limits: dict[str, Any] = {"max_memory": max_memory, "replace": replace, "progress": progress}
    return merge_terms_to_adapter(target, out, terms, prior, max_rank, **limits)


def merge_terms_to_adapter(
    target: ModelLike,
    out: str | Path,
    terms: Sequence[Term[ModelLike]],
    prior: ModelLike | None,
    max_rank: int | None = None,
    *,
    max_memory: str | int = MAX_MEMORY,
    replace: bool = False,
    progress: Progress = silent,
) -> MergedAdapter:
    """Write Σ weight · vector as one adapter, as `merge_adapters` does, for the terms of MSA or of a baseline."""
    parse_size(max_memory)
    if max_rank is not None and max_rank < 1:
        raise UsageError(f"max_rank is {max_rank}; at least 1 is needed")
    if not any(term.weight for term in terms):
        raise UsageError("this adapter would change nothing; give a vector and a strength above 0")
    inputs = find_inputs(out, "adapter", target, terms, prior, {"max_rank": max_rank}, replace)
    if manifest := inputs.finished:
        return MergedAdapter(inputs.out, **manifest["change"], interference=manifest.get("interference", []))
    # PEFT adapts embedding and head apart, also where they are one matrix.
    checked = check_merge(inputs.target, inputs.terms, inputs.prior, Precision(), untie=None)
    _check_products(checked)
    modules = [_Module(_low_ranks(checked, name), max_rank) for name in checked.touched]
    _check_memory(modules, max_memory)
    needed = sum(module.nbytes for module in modules)
    check_space(inputs.out, needed)
    checked.check_factors()
    pairs = json_form(tell_interference(checked, max_memory))
    with inputs.stage(needed) as (partial, facts, hashes):
        hashes[ADAPTER_FILE], loss = _write_factors(modules, inputs.out, partial / ADAPTER_FILE, progress)
        write_json(partial / ADAPTER_CONFIG, _config(checked, inputs.target, modules))
        merged = MergedAdapter(inputs.out, len(modules), max(module.rank for module in modules), loss, pairs)
        facts |= {"change": merged.change, **interference_fact(pairs)}
    if merged.truncation_loss > 0.01:
        logger.warning("truncation to rank %s lost %.1f%% of the update", max_rank, 100 * merged.truncation_loss)
    return merged


def _check_products(checked: CheckedMerge) -> None:
    """Raise MismatchError for deltas that are no product of factors: no LoRA adapter can hold them."""
    faults = []
    for term in checked.terms:
        if not term.vector.is_adapter:
            faults.append(f"{term.vector.folder}: the {term.name} vector is a full checkpoint")
            continue
        for name, delta in term.vector.deltas.items():
            if not isinstance(delta, Product) or delta.count is not None:
                faults.append(f"{name}: {delta.kind} in the {term.name} vector")
    if faults:
        raise MismatchError(join_faults("only products of factors fit into a LoRA adapter; merge to a model:", faults))


@dataclass(frozen=True)
class _Module:
    """A module of the output, by headers: the factors of all terms side by side, cut to `max_rank` if that is less."""

    terms: Sequence[Term[LowRank]]
    """The terms that change the module, at least one."""
    max_rank: int | None
    """The largest rank allowed."""

    @property
    def low(self) -> LowRank:
        """Return the adapter module after which the output's factors are named and turned."""
        return self.terms[0].vector

    @property
    def name(self) -> str:
        return unwrapped(self.low.module)

    @property
    def stacked(self) -> int:
        """Return the ranks of all terms together."""
        return sum(term.vector.rank for term in self.terms)

    @property
    def is_cut(self) -> bool:
        return self.max_rank is not None and self.stacked > self.max_rank

    @property
    def shape(self) -> tuple[int, int]:
        """Return (out, in) of the delta as PEFT's module has it."""
        return self.low.b.shape[0], self.low.a.shape[1]

    @property
    def rank(self) -> int:
        """Return the rank in the output; after a cut no more than the matrix can have."""
        return min(self.max_rank or 0, *self.shape) if self.is_cut else self.stacked

    @property
    def tensors(self) -> list[tuple[str, str, tuple[int, int], int]]:
        """Return name, dtype, shape and bytes of A and B in the output."""
        (out, into), key = self.shape, _FACTOR_KEYS[self.low.is_embedding]
        shapes = {"A": (self.rank, into), "B": (out, self.rank)}
        return [(key.format(self.name, half), "F32", shape, 4 * math.prod(shape)) for half, shape in shapes.items()]

    @property
    def nbytes(self) -> int:
        return sum(size for *_, size in self.tensors)

    @property
    def memory(self) -> int:
        """Return the most bytes that its arrays take at a time."""
        (out, into), rank = self.shape, self.stacked
        whole, core = rank * (out + into), rank * rank
        needed = 3 * whole + 4 * core  # as read, with strengths, stacked; ranks by ranks for the norms
        if self.is_cut:  # QR holds four copies of a factor, the core's SVD many of the core
            needed = max(needed, whole + rank * out + 4 * rank * max(out, into) + 2 * core, 2 * whole + 16 * core)
        return 8 * needed


def _low_ranks(checked: CheckedMerge, name: str) -> list[Term[LowRank]]:
    return [term.with_vector(delta.low) for term in checked.deltas(name) if isinstance(delta := term.vector, Product)]


def _check_memory(modules: list[_Module], max_memory: str | int) -> None:
    """Raise UsageError with the memory needed when the largest module does not fit."""
    largest = max(modules, key=lambda module: module.memory)
    needed = RESERVED + largest.memory
    if needed > parse_size(max_memory):
        raise UsageError(
            f"{max_memory} of memory is too little: this adapter needs at least {math.ceil(needed / 1e6)}MB "
            f"({largest.stacked} ranks of {largest.name})"
        )
    written = sum(module.nbytes for module in modules)
    logger.info("%s to write, up to %s of memory, one thread", readable(written), readable(needed))


def _write_factors(modules: list[_Module], out: Path, path: Path, progress: Progress) -> tuple[str, float]:
    """Write the factors, module by module. Return the file's hash, and the share of the update that was cut."""
    files = Files()
    sums = np.zeros(3)  # squared norms: of the update, of its terms, of what was cut
    header = file_header((tensor for module in modules for tensor in module.tensors), {"format": "pt"})
    size = len(header) + sum(module.nbytes for module in modules)
    ignored = np.errstate(over="ignore", invalid="ignore")  # what is not finite is looked at on its own
    with threadpool_limits(1, user_api="blas"), Sink(path, size) as sink, ignored:
        sink.append(header)
        for number, module in enumerate(modules):
            sums += _append(sink, files, module)
            progress("merge", number + 1, len(modules))
        update, terms, lost = sums
        if update <= 1e-12 * terms:
            raise MismatchError(
                f"{out}: the vectors are zero or cancel each other out, so the adapter would change nothing"
            )
        return sink.close(), math.sqrt(lost / update)


def _append(sink: Sink, files: Files, module: _Module) -> tuple[float, float, float]:
    """Write A and B of a module. Return the squared norms of its update, of its terms (summed), and of what was cut."""
    b, a, of_terms = _combined(files, module)
    whole, lost = _squared_norm(b, a), 0.0
    if module.is_cut:
        b, a, lost = truncate(b, a, module.rank)
    for factor in (a, b):
        stored = np.ascontiguousarray(factor, np.float32)
        if not np.isfinite(stored).all():
            raise MismatchError(f"{module.name}: the merged factors do not fit fp32; try a smaller alpha or beta")
        sink.append(stored.view(np.uint8).data)
    return whole, of_terms, lost


def _combined(files: Files, module: _Module) -> tuple[np.ndarray, np.ndarray, float]:
    """Return B and A of the update in fp64, and the squared norms of its terms, summed. It keeps no other array."""
    terms = [term.with_vector(_factors(files, term.vector, module.low.transposed)) for term in module.terms]
    of_terms = sum(term.weight * term.weight * _squared_norm(*term.vector) for term in terms)
    return *combine_factors(terms), of_terms


def _factors(files: Files, low: LowRank, transposed: bool) -> Factors:
    """Return (scale · B, A) in fp64, in PEFT's orientation for a weight that is stored as (in, out) or not."""
    b, a = read_whole(files, low.b, np.float64) * low.scale, read_whole(files, low.a, np.float64)
    return (b, a) if low.transposed == transposed else (a.T, b.T)


def _squared_norm(b: np.ndarray, a: np.ndarray) -> float:
    """Return ‖B A‖², without the product."""
    return float(np.sum((b.T @ b) * (a @ a.T)))


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


def _config(checked: CheckedMerge, target: Source, modules: list[_Module]) -> dict[str, Any]:
    """Return PEFT's config: every scale is 1, since strengths and scales are in the factors."""
    ranks = {module.name: module.rank for module in modules}
    rank = max(ranks.values())
    theirs = read_object(checked.vectors[0].folder / ADAPTER_CONFIG)
    # Keys are regular expressions to PEFT, so that dots have to be escaped.
    pattern = {re.escape(module): number for module, number in ranks.items() if number != rank}
    return {
        "peft_type": "LORA",
        "task_type": theirs.get("task_type"),
        "base_model_name_or_path": str(target.folder.resolve()) if target.is_folder else target.name.partition("@")[0],
        "revision": None if target.is_folder else target.revision,
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": pattern,
        "alpha_pattern": pattern,
        "target_modules": sorted(ranks),
        "fan_in_fan_out": any(m.low.transposed and not m.low.is_embedding for m in modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }
