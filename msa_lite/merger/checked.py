"""Check a merge: everything that headers, arguments and the disk tell before the first byte is written."""

from __future__ import annotations

import logging
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from msa_lite.errors import FormatError, UsageError, join_faults, nearest
from msa_lite.io.console.progress import readable
from msa_lite.io.weights.checkpoint import (
    FLOAT_DTYPES,
    INDEX_FILE,
    Checkpoint,
    TensorEntry,
    check_companions,
    companion_files,
    load_checkpoint,
    unnamed_shards,
)
from msa_lite.io.weights.factors import LowRank
from msa_lite.io.weights.hub import Source, tokenizer_files
from msa_lite.io.weights.writer import output_bytes, output_dtype
from msa_lite.merger.deltas import Delta, Dora, Product, Stacked
from msa_lite.merger.fidelity import forecast_bytes
from msa_lite.merger.formula import OneOrSeveral, Term, VectorLike, number_terms
from msa_lite.merger.tied import check_head, untie_fault, untied
from msa_lite.merger.vectors import Vector, load_vector

logger = logging.getLogger(__name__)

DTYPES = {"same": None, "bfloat16": "BF16", "float16": "F16", "float32": "F32"}
ROUNDINGS = ("nearest", "stochastic")
MAX_MEMORY = "512MB"
BLOCK = 1 << 19  # numbers in a block: fp32 weights, update and result stay in a core's share of the cache
RESERVED = 100 << 20  # bytes for Python, numpy and the buffers of the output file
_TENSOR = 1500  # bytes that a tensor's names, places and figures take
_LARGEST = 10**15  # bytes of memory that anybody allows
_THREADS = 1024  # more than any machine has cores; each takes memory, and a billion would take for ever to count
_SEEDS = 2**64
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
# Seconds a byte or number on one core of a 2024 server; only for the estimate that is printed.
_SECONDS_BYTE, _SECONDS_PRODUCT, _SECONDS_DENSE = 1.0e-9, 2.5e-9, 4.0e-9


@dataclass(frozen=True)
class Precision:
    """The arithmetic and the rounding of a merge."""

    dtype: str = "same"
    """The dtype of the output's floats, of `DTYPES`; "same": as the target stores them."""
    rounding: str = "nearest"
    """The rounding, of `ROUNDINGS`; stochastic rounding takes its numbers from `seed`."""
    seed: int = 0
    """The seed of stochastic rounding."""
    exact: bool = False
    """Compute in fp64."""

    @property
    def stored(self) -> str | None:
        """Return the safetensors name of the output's floats; None: as the target stores them."""
        return DTYPES[self.dtype]

    @property
    def is_stochastic(self) -> bool:
        return self.rounding == "stochastic"

    @property
    def record(self) -> dict[str, Any]:
        """Return the settings that decide the result, for a manifest."""
        options = {"dtype": self.dtype, **({"exact": True} if self.exact else {})}
        return options | ({"rounding": self.rounding, "seed": self.seed} if self.is_stochastic else {})

    def work(self, entry: TensorEntry) -> type[np.floating[Any]]:
        """Return the dtype that a tensor is merged in."""
        return np.float64 if self.exact or entry.dtype == "F64" else np.float32

    def output(self, entry: TensorEntry) -> str:
        """Return the dtype that a tensor is stored in, by its safetensors name."""
        return output_dtype(entry, self.stored)

    def faults(self) -> Iterator[str]:
        """Yield what is wrong with the settings."""
        for name, value, choices in (("dtype", self.dtype, DTYPES), ("rounding", self.rounding, ROUNDINGS)):
            if value not in choices:
                yield f"{name} '{value}'{nearest(value, choices)}: choose from {', '.join(choices)}"
        if self.seed < 0:
            yield f"seed is {self.seed}; it must be ≥ 0"
        if self.seed >= _SEEDS:
            yield "seed: below 2^64"


@dataclass(frozen=True)
class CheckedMerge:
    """A merge whose inputs fit: target + Σ weight · vector."""

    target: Checkpoint
    terms: tuple[Term[Vector], ...]
    precision: Precision = Precision()
    forecast: tuple[str, ...] = ()
    """The forms of quantisation to count changed codes for (`forecast`)."""
    is_untied: bool = False
    """True where the output gets a head of its own, which the target ties to its embedding."""

    @property
    def vectors(self) -> list[Vector]:
        """Return the vectors of all terms."""
        return [term.vector for term in self.terms]

    @cached_property
    def touched(self) -> list[str]:
        """Return the target's tensors that a vector changes, in the order of its files."""
        return [name for name in self.target.tensors if any(name in vector.deltas for vector in self.vectors)]

    @cached_property
    def rewritten(self) -> list[str]:
        """Return the target's tensors whose bytes change: those touched, and those stored in another dtype."""
        touched = set(self.touched)
        return [
            name
            for name, entry in self.target.tensors.items()
            if entry.nbytes and (name in touched or self.precision.output(entry) != entry.dtype)
        ]

    def deltas(self, name: str) -> list[Term[Delta]]:
        """Return the terms that change a tensor, each with its delta; none of weight 0."""
        terms = [term for term in self.terms if term.weight and name in term.vector.deltas]
        return [term.with_vector(term.vector.deltas[name]) for term in terms]

    def is_low_rank(self, name: str) -> bool:
        """Check whether only products of factors change a tensor, so that one multiplication does it."""
        return all(isinstance(term.vector, Product) for term in self.deltas(name))

    def notes(self) -> list[str]:
        """Return notes for the user on weights that keep the target's values: tokens and tensors of its own."""
        vectors = [term.vector for term in self.terms if term.weight]
        notes = []
        if common := dict.fromkeys(name for vector in vectors for name in vector.common):
            name = next(iter(common))
            known = min(vector.common[name] for vector in vectors if name in vector.common)
            notes.append(
                f"the target has rows for {self.target.tensors[name].shape[0]} tokens, the vectors for {known}: in "
                f"{', '.join(common)} only the common rows changed; the others stay the target's"
            )
        if lacking := dict.fromkeys(name for vector in vectors for name in vector.lacking):
            listed = ", ".join([*lacking][:3]) + (f" and {len(lacking) - 3} more" if len(lacking) > 3 else "")
            notes.append(
                f"{len(lacking)} tensors of the target stay as they are, because the tuned checkpoint or the prior "
                f"lacks them (transformers drops some, as those of multi-token prediction): {listed}"
            )
        return notes

    def check_factors(self) -> None:
        """Read the vectors' factors; refuse NaN, infinities and all zeros, which headers do not show."""
        for vector in self.vectors:
            vector.check_factors()

    def low_ranks(self, name: str) -> list[LowRank]:
        """Return all factors that change a tensor, those of each expert of a stacked one."""
        deltas = [term.vector for term in self.deltas(name)]
        products = [part for delta in deltas for part in (delta.slices if isinstance(delta, Stacked) else (delta,))]
        return [part.low for part in products if isinstance(part, (Product, Dora))]

    def factor_bytes(self, name: str) -> int:
        """Return the bytes of a tensor's factors in the dtype that they are multiplied in."""
        lows = self.low_ranks(name)
        numbers = sum(low.rank * sum(low.shape) for low in lows)
        size = np.dtype(self.precision.work(self.target.tensors[name])).itemsize
        # Experts' shares are taken from their whole B, while that of the layer's other weight is kept, too.
        return numbers * size + 2 * sum({(low.b.file, low.b.name): low.held_bytes for low in lows}.values())


def block_rows(entry: TensorEntry) -> int:
    """Return the rows of a block. They depend on the tensor alone: threads and memory never change a result's bits."""
    return max(1, BLOCK // max(1, entry.matrix_shape[1]))


def blocks_of(entry: TensorEntry) -> Iterator[tuple[int, int]]:
    """Yield the first row of each block of a tensor, and the one after its last."""
    rows, step = entry.matrix_shape[0], block_rows(entry)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def msa_terms(
    forget: OneOrSeveral[VectorLike] | None,
    alpha: OneOrSeveral[float] | None,
    retain: OneOrSeveral[VectorLike] | None,
    beta: OneOrSeveral[float] | None,
    precision: Precision = Precision(),
    threads: int | None = None,
) -> list[Term[VectorLike]]:
    """Return the terms of MSA. Raise UsageError for wrong arguments of a merge, all at once.

    The k-th strength is that of the k-th vector. Without a list, 1.0 is that of every forget vector.
    No file is read.
    """
    forgets, retains, alphas, betas = (_as_list(value) for value in (forget, retain, alpha, beta))
    if alpha == 1.0 and len(forgets) > 1:
        alphas = [1.0] * len(forgets)
    faults = [*_strength_faults("forget", "alpha", forgets, alphas)]
    faults += _strength_faults("retain", "beta", retains, betas)
    faults += precision.faults()
    if threads is not None and threads < 1:
        faults.append(f"threads is {threads}; at least 1 is needed")
    if threads is not None and threads > _THREADS:
        faults.append(f"threads: at most {_THREADS}")
    if faults:
        raise UsageError("; ".join(faults) if len(faults) == 1 else join_faults("wrong arguments:", faults))
    terms = [Term("forget", vector, -float(strength)) for vector, strength in zip(forgets, alphas, strict=False)]
    terms += [Term("retain", vector, float(strength)) for vector, strength in zip(retains, betas, strict=False)]
    return number_terms(terms)


def _as_list(value: Any) -> list[Any]:
    """Return the values of an argument that takes one or several; None is no value."""
    return [] if value is None else [*value] if isinstance(value, (list, tuple)) else [value]


def _strength_faults(name: str, symbol: str, vectors: Sequence[Any], strengths: Sequence[Any]) -> Iterator[str]:
    """Yield the faults of the strengths of one side. A strength of 0 needs no vector."""
    for strength in strengths:
        if not 0 <= strength < math.inf:
            yield f"{symbol} is {strength}; it must be a number ≥ 0"
        elif strength > sys.float_info.max:
            yield f"{symbol} is an integer that no float holds"
        elif strength > 0 and not vectors:
            yield f"{symbol} is {strength:g}, but there is no {name} vector"
    if len(vectors) == 1 and not strengths:
        yield f"there is a {name} vector, but no {symbol}; say how strongly it counts"
    elif vectors and len(vectors) != len(strengths):
        hint = ", or none: then each is 1.0" if name == "forget" else ""
        yield (
            f"{name} vectors: {len(vectors)}, {symbol}: {len(strengths)}; give each vector its {symbol}, in the same "
            f"order{hint}"
        )


def check_merge(
    target: Source,
    terms: Sequence[Term[Source]],
    prior: Source | None,
    precision: Precision,
    forecast: tuple[str, ...] = (),
    untie: bool | None = False,
) -> CheckedMerge:
    """Open target and vectors and fit them together by their headers. Raise an error for all that does not fit."""
    checkpoint = load_checkpoint(target.folder)
    check_companions(companion_files(checkpoint.folder))
    if target.tokenizer:
        check_companions(tokenizer_files(target.tokenizer.folder))
    folders = [term.with_vector(term.vector.folder) for term in terms]
    start = load_checkpoint(prior.folder) if prior else None
    checked = check_headers(checkpoint, folders, start, precision, forecast, untie)
    tuned = [load_checkpoint(vector.folder) for vector in checked.vectors if not vector.is_adapter]
    for model in (checkpoint, *([start] if start else []), *tuned):
        for path in unnamed_shards(model):
            logger.warning("%s: no part of the model, and not read: %s does not name it", path, INDEX_FILE)
    return checked


def check_headers(
    target: Checkpoint,
    terms: Sequence[Term[Path | Checkpoint]],
    prior: Checkpoint | None,
    precision: Precision = Precision(),
    forecast: tuple[str, ...] = (),
    untie: bool | None = False,
) -> CheckedMerge:
    """Fit vectors to a target by headers; a vector is the folder of an adapter or checkpoint, or a checkpoint.

    untie: give a tied target a head of its own, so that embedding and head change apart; None: where that is possible.
    """
    check_mergeable(target)
    fault = None if untie is False else untie_fault(target)
    if fault and untie:
        raise fault
    is_untied = untie is not False and fault is None
    if is_untied:
        target = untied(target)
        prior = prior if prior is None or (untie is None and untie_fault(prior)) else untied(prior)
    vectors = tuple(term.with_vector(load_vector(term.vector, target, prior, is_untied)) for term in terms)
    checked = CheckedMerge(target, vectors, precision, forecast, is_untied)
    faults = [
        f"{name}: stored as {target.tensors[name].dtype}, which is not a plain float"
        for name in checked.touched
        if not target.tensors[name].is_float
    ]
    if faults:
        raise FormatError(join_faults(f"{target.folder}: tensors that a vector changes cannot be merged:", faults))
    return checked


def check_mergeable(target: Checkpoint) -> None:
    """Raise FormatError for a quantised target: a delta cannot be added to stored codes."""
    method = target.config.get("quantization_config")
    if method:
        kind = str(method.get("quant_method", "unknown") if isinstance(method, dict) else method)[:80]
        raise FormatError(
            f"{target.folder}: the target is quantised (quantization_config: {kind}); merge into the unquantised "
            "checkpoint and quantise the result. If there is none left, AutoModelForCausalLM.from_pretrained(…)"
            ".dequantize() and save_pretrained() make one"
        )
    check_head(target)


def parse_size(text: str | int) -> int:
    """Return the bytes of "512MB", "1.5 GiB" or "200000000". Raise UsageError for other texts."""
    if isinstance(text, int) and text >= _LARGEST:  # of thousands of digits, maybe, which no string takes
        raise UsageError("more than 10^15 bytes are no size; write it as 512MB, 2GB or 1.5GiB")
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([KMGT]I?)?B?", str(text).strip().upper(), re.ASCII)
    if not match:
        raise UsageError(f"'{str(text)[:40]}' is no size; write it as 512MB, 2GB or 1.5GiB")
    return int(float(match[1]) * _UNITS[match[2] or ""])


@dataclass(frozen=True)
class Bounds:
    """The bounds on what a merge holds in memory at a time."""

    threads: int
    """Worker threads."""
    depth: int
    """Blocks in memory: merged, or waiting to be hashed and written."""
    factor_bytes: int
    """Bytes of factors in memory."""
    memory: int
    """Bytes of memory in all, Python included."""


def find_bounds(checked: CheckedMerge, max_memory: str | int, threads: int | None) -> Bounds:
    """Return the threads, blocks and factors that fit into the memory. By default there is one thread a core.

    Raise UsageError with the memory needed where not even one fits.
    """
    limit, precision, tensors = parse_size(max_memory), checked.precision, checked.target.tensors
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    entries = [tensors[name] for name in checked.touched]
    if precision.stored:
        entries = [entry for entry in tensors.values() if entry.is_float and entry.nbytes]
    worker = max((_worker_bytes(checked, entry) for entry in entries), default=0)
    sizes = [_block_size(entry) * FLOAT_DTYPES[precision.output(entry)].itemsize for entry in entries]
    output = max(sizes, default=0)
    # While factors are read, the stored ones, their scaled copies and the stacked ones are there together.
    factors = 3 * max((checked.factor_bytes(name) for name in checked.touched), default=0)
    reserved = RESERVED + _TENSOR * (len(tensors) + sum(len(vector.deltas) for vector in checked.vectors))
    for count in range(threads or cores, 0, -1):
        depth = count + 6
        memory = reserved + count * worker + depth * output + factors
        if memory <= limit:
            return Bounds(count, depth, limit - memory + factors // 3, memory)
    raise UsageError(f"{max_memory} of memory is too little: this merge needs at least {math.ceil(memory / 1e6)}MB")


def _block_size(entry: TensorEntry) -> int:
    return min(block_rows(entry), entry.matrix_shape[0]) * entry.matrix_shape[1]


def _worker_bytes(checked: CheckedMerge, entry: TensorEntry) -> int:
    """Return the bytes of one thread's buffers: stored block, weights, update, result; for dense deltas two more.

    A forecast takes some for the weights that it counts.
    """
    precision = checked.precision
    work = np.dtype(precision.work(entry)).itemsize
    stored = FLOAT_DTYPES[entry.dtype].itemsize
    dense = 0 if checked.is_low_rank(entry.name) else (4 * work + 8) * len(checked.deltas(entry.name))
    narrowing = 3 * work if precision.stored or precision.is_stochastic or precision.exact else 0
    counted = forecast_bytes(checked.forecast, entry, min(block_rows(entry), entry.matrix_shape[0]))
    return _block_size(entry) * (stored + 3 * work + 1 + dense + narrowing) + counted


def describe_work(checked: CheckedMerge, bounds: Bounds) -> str:
    """Say how much the merge reads and writes, the memory it takes, and its least time on a fast disk."""
    tensors = checked.target.tensors
    files = {path for vector in checked.vectors for path in vector.files}
    files |= {shard.path for shard in checked.target.shards}
    written = output_bytes(tensors.values(), checked.precision.stored)
    work = written * _SECONDS_BYTE
    for name in checked.touched:
        work += math.prod(tensors[name].shape) * (_SECONDS_PRODUCT if checked.is_low_rank(name) else _SECONDS_DENSE)
    # It tells where the files hold each expert. As measured: a process with it is that much larger.
    beside = (
        " and 300 MB for transformers"
        if any(low.share for n in checked.touched for low in checked.low_ranks(n))
        else ""
    )
    return (
        f"{readable(sum(path.stat().st_size for path in files))} to read, {readable(written)} to write, about "
        f"{readable(bounds.memory)} of memory{beside}, {bounds.threads} threads, at least "
        f"{max(work / bounds.threads, written * _SECONDS_BYTE / 1.5):.1f} s"
    )
