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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from threadpoolctl import threadpool_limits

from msa_lite.errors import MismatchError, UsageError, join_faults
from msa_lite.io.console.progress import Progress, readable, silent
from msa_lite.io.files.reading import read_object
from msa_lite.io.files.writing import check_space, json_form, write_json
from msa_lite.io.models.loading import empty_model
from msa_lite.io.models.places import module_paths
from msa_lite.io.weights.adapter import ADAPTER_CONFIG, ADAPTER_FILE, LowRank, Parameter, Share, unwrapped
from msa_lite.io.weights.blocks import Files
from msa_lite.io.weights.hub import Source
from msa_lite.io.weights.writer import Sink, file_header
from msa_lite.merger.checked import MAX_MEMORY, RESERVED, CheckedMerge, Precision, check_merge, msa_terms, parse_size
from msa_lite.merger.deltas import Product, Stacked
from msa_lite.merger.formula import Factors, OneOrSeveral, Term, combine_factors
from msa_lite.merger.inputs import ModelLike, find_inputs
from msa_lite.merger.interference import interference_fact, tell_interference

logger = logging.getLogger(__name__)

_FACTOR_KEYS = {False: "base_model.model.{}{}.lora_{}.weight", True: "base_model.model.{}{}.lora_embedding_{}"}


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
    checked = check_merge(inputs.target, inputs.terms, inputs.prior, Precision())
    _check_products(checked)
    modules = _modules(checked, max_rank)
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
            if not isinstance(delta, (Product, Stacked)) or (isinstance(delta, Product) and delta.count is not None):
                faults.append(f"{name}: {delta.kind} in the {term.name} vector")
    for name in [] if faults else checked.touched:
        if len({bool(term.vector.parameter) for term in _low_ranks(checked, name)}) > 1:
            faults.append(f"{name}: adapted with all experts of its layer in one vector, on its own in another")
    if faults:
        raise MismatchError(join_faults("only products of factors fit into a LoRA adapter; merge to a model:", faults))


@dataclass(frozen=True)
class _Module:
    """A module of the output, by headers: the factors of all terms side by side, cut to `max_rank` if that is less."""

    terms: Sequence[Term[LowRank]]
    """The terms that change the module, at least one."""
    name: str
    """The module's name, as transformers has it."""
    wrappers: int
    """How many wrappers PEFT puts around this one, for other parameters of the module."""
    max_rank: int | None
    """The largest rank allowed."""

    @property
    def low(self) -> LowRank:
        """Return the adapter module after which the output's factors are turned."""
        return self.terms[0].vector

    @property
    def path(self) -> str:
        """Return the name that PEFT's config has for it: of the module, or of its parameter."""
        return f"{self.name}.{self.low.parameter.name}" if self.low.parameter else self.name

    @property
    def experts(self) -> int:
        """Return the number of matrices that it stands for."""
        return self.low.share.count if self.low.share else 1

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
        (out, into), rank = self.shape, self.rank * self.experts
        key, inner = _FACTOR_KEYS[self.low.is_embedding], ".base_layer" * self.wrappers
        shapes = {"A": (rank, into), "B": (out, rank)}
        return [(key.format(self.name, inner, h), "F32", shape, 4 * math.prod(shape)) for h, shape in shapes.items()]

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
        held = self.nbytes + sum(term.vector.held_bytes for term in self.terms) if self.low.share else 0
        return 8 * needed + held


def _low_ranks(checked: CheckedMerge, name: str) -> list[Term[LowRank]]:
    """Return the factors that change a tensor; of a stacked one those of its first expert."""
    products = [(t, t.vector.slices[0] if isinstance(t.vector, Stacked) else t.vector) for t in checked.deltas(name)]
    return [term.with_vector(delta.low) for term, delta in products if isinstance(delta, Product)]


def _modules(checked: CheckedMerge, max_rank: int | None) -> list[_Module]:
    """Return the modules of the output, under the names that transformers loads the target with today.

    All tensors of a parameter of stacked experts belong to one.
    """
    terms: dict[tuple[str, Parameter | None], dict[str, Term[LowRank]]] = {}
    names, unknown = _todays_names(checked), []
    for name in checked.touched:
        for term in _low_ranks(checked, name):
            low = term.vector
            module = low.module if low.parameter else names.get(name, "") if names else unwrapped(low.module)
            terms.setdefault((module, low.parameter), {}).setdefault(term.name, term)
            if not module:
                unknown.append(f"{name}: {low.module} in the {term.name} vector")
    if unknown:
        headline = "transformers holds these weights in no module of their own, so PEFT cannot; merge to a model:"
        raise MismatchError(join_faults(headline, unknown))
    return [
        _Module(list(by_name.values()), module, _later(module, parameter, terms), max_rank)
        for (module, parameter), by_name in terms.items()
    ]


def _todays_names(checked: CheckedMerge) -> dict[str, str]:
    """Return the module's name by tensor, as transformers loads the target today; {} where files and vectors agree.

    It takes transformers, and seconds, so only families are looked up whose modules transformers renames while it loads
    them: those with experts, those with a text model inside, and those whose vectors have other names than the files.
    """
    target = checked.target
    lows = [(name, term.vector) for name in checked.touched for term in _low_ranks(checked, name)]
    is_renamed = "text_config" in target.config or any(".experts." in name for name in target.tensors)
    if not is_renamed and all(name == f"{unwrapped(low.module)}.weight" for name, low in lows):
        return {}
    return module_paths(empty_model(target), target.tensors)


def _later(module: str, parameter: Parameter | None, others: Iterable[tuple[str, Parameter | None]]) -> int:
    """Return how many other parameters of a module PEFT wraps after this one."""
    return sum(name == module and bool(other and parameter and other.place > parameter.place) for name, other in others)


def _check_memory(modules: list[_Module], max_memory: str | int) -> None:
    """Raise UsageError with the memory needed when the largest module does not fit."""
    largest = max(modules, key=lambda module: module.memory)
    needed = RESERVED + largest.memory
    if needed > parse_size(max_memory):
        raise UsageError(
            f"{max_memory} of memory is too little: this adapter needs at least {math.ceil(needed / 1e6)}MB "
            f"({largest.stacked} ranks of {largest.path})"
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
    sums = np.zeros(3)
    outer, inner = [], []
    for expert in range(module.experts):
        b, a, of_terms = _combined(files, module, expert)
        whole, lost = _squared_norm(b, a), 0.0
        if module.is_cut:
            b, a, lost = truncate(b, a, module.rank)
        outer.append(b.astype(np.float32))
        inner.append(a.astype(np.float32))
        sums += whole, of_terms, lost
    # B (out, rank · experts): every column of one expert, then every column of the next, in turn (`spread_experts`)
    for stored in (np.concatenate(inner), np.stack(outer, axis=-1).reshape(len(outer[0]), -1)):
        if not np.isfinite(stored).all():
            raise MismatchError(f"{module.path}: the merged factors do not fit fp32; try a smaller alpha or beta")
        sink.append(np.ascontiguousarray(stored).reshape(-1).view(np.uint8).data)
    return sums[0], sums[1], sums[2]


def _combined(files: Files, module: _Module, expert: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Return B and A of the update in fp64, and the squared norms of its terms, summed. It keeps no other array."""
    lows = [term.with_vector(_of_expert(term.vector, expert)) for term in module.terms]
    terms = [low.with_vector(_factors(files, low.vector, module.low.transposed)) for low in lows]
    of_terms = sum(term.weight * term.weight * _squared_norm(*term.vector) for term in terms)
    return *combine_factors(terms), of_terms


def _of_expert(low: LowRank, expert: int) -> LowRank:
    """Return the factors of an expert, with all its outputs."""
    return replaced(low, share=Share(expert, low.share.count, (0, low.b.shape[0]))) if low.share else low


def _factors(files: Files, low: LowRank, transposed: bool) -> Factors:
    """Return (scale · B, A) in fp64, in PEFT's orientation for a weight that is stored as (in, out) or not."""
    b, a = low.read(files, np.float64)
    b = b * low.scale
    return (b, a) if low.transposed == transposed or low.parameter else (a.T, b.T)


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
    ranks = {module.path: module.rank for module in modules}
    parameters = {module.path for module in modules if module.low.parameter}
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
        "target_modules": sorted(ranks.keys() - parameters),
        **({"target_parameters": sorted(parameters)} if parameters else {}),
        "fan_in_fan_out": any(m.low.transposed and not (m.low.is_embedding or m.low.parameter) for m in modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }
