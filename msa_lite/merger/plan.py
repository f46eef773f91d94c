"""What a merge will do, and whether it can: all that headers, numbers and the disk can say before a byte moves."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from msa_lite.errors import FormatError, UsageError, join_faults, nearest
from msa_lite.io.checkpoint import FLOAT_DTYPES, Checkpoint, TensorEntry, load_checkpoint
from msa_lite.io.companions import check_companions, companion_files
from msa_lite.io.hub import Source
from msa_lite.io.tokenizer import tokenizer_files
from msa_lite.io.writer import output_bytes, output_dtype
from msa_lite.merger.vectors import Delta, Dora, Product, Vector, load_vector

DTYPES = {"same": None, "bfloat16": "BF16", "float16": "F16", "float32": "F32"}
ROUNDINGS = ("nearest", "stochastic")
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
    """How a merge rounds. dtype: safetensors name of the output's floats, None for the target's own; exact: fp64."""

    dtype: str | None = None
    stochastic: bool = False
    seed: int = 0
    exact: bool = False

    def work(self, entry: TensorEntry) -> type[np.floating[Any]]:
        """The dtype that a tensor is merged in."""
        return np.float64 if self.exact or entry.dtype == "F64" else np.float32


@dataclass(frozen=True)
class MergePlan:
    """A merge whose inputs fit: target − α · forget + β · retain."""

    target: Checkpoint
    forget: Vector | None
    alpha: float
    retain: Vector | None
    beta: float
    precision: Precision = Precision()

    @cached_property
    def touched(self) -> list[str]:
        """The target's tensors that a vector changes, in the order of its files."""
        vectors = [vector for vector in (self.forget, self.retain) if vector]
        return [name for name in self.target.tensors if any(name in vector.deltas for vector in vectors)]

    @cached_property
    def rewritten(self) -> list[str]:
        """The target's tensors whose bytes do not stay: those touched, and those stored in another dtype."""
        touched = set(self.touched)
        return [
            name
            for name, entry in self.target.tensors.items()
            if entry.nbytes and (name in touched or output_dtype(entry, self.precision.dtype) != entry.dtype)
        ]

    def deltas(self, name: str) -> tuple[Delta | None, Delta | None]:
        """The forget and the retain vector's delta of a tensor; None, too, for a vector of strength 0."""
        vectors = ((self.forget, self.alpha), (self.retain, self.beta))
        forget, retain = (vector.deltas.get(name) if vector and strength else None for vector, strength in vectors)
        return forget, retain

    def is_low_rank(self, name: str) -> bool:
        """Whether all that changes a tensor is products of factors, so that one multiplication does it."""
        return all(isinstance(delta, Product) for delta in self.deltas(name) if delta)

    @property
    def common_rows(self) -> dict[str, int]:
        """Rows that are changed, of tensors of which the target has more: its own tokens stay as they are."""
        vectors = [vector for vector, s in ((self.forget, self.alpha), (self.retain, self.beta)) if vector and s]
        names = dict.fromkeys(name for vector in vectors for name in vector.common)
        return {name: min(v.common[name] for v in vectors if name in v.common) for name in names}

    def notes(self) -> list[str]:
        """Return a note for the user on tokens that the merge leaves alone."""
        common = self.common_rows
        if not common:
            return []
        name = next(iter(common))
        rows = self.target.tensors[name].shape[0]
        return [
            f"the target has rows for {rows} tokens, the vectors for {common[name]}: of {', '.join(common)}, the "
            "common rows changed, the others stay the target's"
        ]

    def check_factors(self) -> None:
        """Read the vectors' factors for NaN, infinities and zeros, which headers do not tell."""
        for vector in (self.forget, self.retain):
            if vector:
                vector.check_factors()

    def factor_bytes(self, name: str) -> int:
        """Bytes of a tensor's factors in the dtype that they are multiplied in."""
        rank = sum(delta.low.rank for delta in self.deltas(name) if isinstance(delta, (Product, Dora)))
        entry = self.target.tensors[name]
        return rank * sum(entry.matrix_shape) * np.dtype(self.precision.work(entry)).itemsize


@dataclass(frozen=True)
class Budget:
    """How much is in flight at a time: worker threads, blocks that wait to be hashed, bytes of factors.

    expected: bytes of memory that this comes to, Python included.
    """

    threads: int
    depth: int
    factor_bytes: int
    expected: int


def block_rows(entry: TensorEntry) -> int:
    """Rows of a block. It depends on the tensor alone, so that neither threads nor memory change a result's bits."""
    return max(1, BLOCK // max(1, entry.matrix_shape[1]))


def check_arguments(
    vectors: Mapping[str, tuple[Any, float | None]],
    dtype: str,
    rounding: str,
    threads: int | None = None,
    seed: int = 0,
) -> None:
    """Raise UsageError for what is wrong without a look at a file or the network.

    vectors: (vector, strength) under "forget" and "retain".
    """
    faults = []
    for name, (vector, strength) in vectors.items():
        symbol = {"forget": "alpha", "retain": "beta"}[name]
        if strength is None:
            if vector is not None:
                faults.append(f"there is a {name} vector, but no {symbol}; say how strongly it counts")
        elif not 0 <= strength < math.inf:
            faults.append(f"{symbol} is {strength}; it must be a number ≥ 0")
        elif strength > sys.float_info.max:
            faults.append(f"{symbol} is an integer that no float holds")
        elif strength > 0 and vector is None:
            faults.append(f"{symbol} is {strength:g}, but there is no {name} vector")
    if dtype not in DTYPES:
        faults.append(f"dtype '{dtype}'{nearest(dtype, DTYPES)}: choose from {', '.join(DTYPES)}")
    if rounding not in ROUNDINGS:
        faults.append(f"rounding '{rounding}'{nearest(rounding, ROUNDINGS)}: choose from {', '.join(ROUNDINGS)}")
    if threads is not None and threads < 1:
        faults.append(f"threads is {threads}; at least 1 is needed")
    if threads is not None and threads > _THREADS:
        faults.append(f"threads: at most {_THREADS}")
    if seed < 0:
        faults.append(f"seed is {seed}; it must be ≥ 0")
    if seed >= _SEEDS:
        faults.append("seed: below 2^64")
    if faults:
        raise UsageError("; ".join(faults) if len(faults) == 1 else join_faults("wrong arguments:", faults))


def make_plan(sources: Mapping[str, Source], alpha: float, beta: float, precision: Precision) -> MergePlan:
    """Open target and vectors and fit them together by their headers. Raises what does not fit, all of it."""
    target = load_checkpoint(sources["target"].folder)
    check_mergeable(target)
    check_companions(companion_files(target.folder))
    if tokenizer := sources["target"].tokenizer:
        check_companions(tokenizer_files(tokenizer.folder))
    prior = load_checkpoint(sources["prior"].folder) if "prior" in sources else None
    forget, retain = (
        load_vector(sources[name].folder, target, prior) if name in sources else None for name in ("forget", "retain")
    )
    plan = MergePlan(target, forget, alpha, retain, beta, precision)
    faults = [
        f"{name}: stored as {target.tensors[name].dtype}, which is not a plain float"
        for name in plan.touched
        if not target.tensors[name].is_float
    ]
    if faults:
        raise FormatError(join_faults(f"{target.folder}: tensors that a vector changes cannot be merged:", faults))
    return plan


def check_mergeable(target: Checkpoint) -> None:
    """Raise FormatError for a quantised target, whose stored codes are no weights that a delta could be added to."""
    method = target.config.get("quantization_config")
    if method:
        kind = str(method.get("quant_method", "unknown") if isinstance(method, dict) else method)[:80]
        raise FormatError(
            f"{target.folder}: the target is quantised (quantization_config: {kind}); merge into the unquantised "
            "checkpoint and quantise the result. If there is none left, AutoModelForCausalLM.from_pretrained(…)"
            ".dequantize() and save_pretrained() make one"
        )


def parse_size(text: str | int) -> int:
    """Bytes of "512MB", "1.5 GiB", "200000000". Raises UsageError."""
    if isinstance(text, int) and text >= _LARGEST:  # of thousands of digits, maybe, which no string takes
        raise UsageError("more than 10^15 bytes are no size; write it as 512MB, 2GB or 1.5GiB")
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([KMGT]I?)?B?", str(text).strip().upper(), re.ASCII)
    if not found:
        raise UsageError(f"'{str(text)[:40]}' is no size; write it as 512MB, 2GB or 1.5GiB")
    return int(float(found[1]) * _UNITS[found[2] or ""])


def make_budget(plan: MergePlan, max_memory: str | int, threads: int | None) -> Budget:
    """Share out the memory: as many threads as asked for (else as there are cores) and as fit.

    Raises UsageError when not even one does, with what is needed.
    """
    limit = parse_size(max_memory)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    entries = [plan.target.tensors[name] for name in plan.touched]
    if plan.precision.dtype:
        entries = [entry for entry in plan.target.tensors.values() if entry.is_float and entry.nbytes]
    worker = max((_worker_bytes(plan, entry) for entry in entries), default=0)
    widths = [FLOAT_DTYPES[output_dtype(entry, plan.precision.dtype)].itemsize for entry in entries]
    output = max((_block_size(entry) * width for entry, width in zip(entries, widths, strict=True)), default=0)
    factors = max((plan.factor_bytes(name) for name in plan.touched), default=0)
    vectors = [vector for vector in (plan.forget, plan.retain) if vector]
    reserved = RESERVED + _TENSOR * (len(plan.target.tensors) + sum(len(vector.deltas) for vector in vectors))
    for count in range(threads or cores, 0, -1):
        depth = count + 6
        fixed = reserved + count * worker + depth * output
        # While factors are read, the stored ones, their scaled copies and the stacked ones are there together.
        if fixed + 3 * factors <= limit:
            return Budget(count, depth, limit - fixed - 2 * factors, fixed + 3 * factors)
    least = reserved + worker + 7 * output + 3 * factors
    raise UsageError(f"{max_memory} of memory are too little: this merge needs at least {math.ceil(least / 1e6)}MB")


def _block_size(entry: TensorEntry) -> int:
    return min(block_rows(entry), entry.matrix_shape[0]) * entry.matrix_shape[1]


def _worker_bytes(plan: MergePlan, entry: TensorEntry) -> int:
    """Buffers of one thread: the stored block, weights, update and result; for dense deltas also tuned and prior."""
    work = np.dtype(plan.precision.work(entry)).itemsize
    stored = FLOAT_DTYPES[entry.dtype].itemsize
    dense = 0 if plan.is_low_rank(entry.name) else sum(4 * work + 8 for delta in plan.deltas(entry.name) if delta)
    narrowing = 3 * work if plan.precision.dtype or plan.precision.stochastic or plan.precision.exact else 0
    return _block_size(entry) * (stored + 3 * work + 1 + dense + narrowing)


def estimate(plan: MergePlan, budget: Budget) -> dict[str, Any]:
    """What the merge will read and write, its memory bound, and the least time it takes if the disk keeps up."""
    tensors = plan.target.tensors
    written = output_bytes(tensors.values(), plan.precision.dtype)
    low = sum(math.prod(tensors[name].shape) for name in plan.touched if plan.is_low_rank(name))
    dense = sum(math.prod(tensors[name].shape) for name in plan.touched if not plan.is_low_rank(name))
    vectors = [vector for vector in (plan.forget, plan.retain) if vector]
    files = {path for vector in vectors for path in vector.files} | {shard.path for shard in plan.target.shards}
    work = written * _SECONDS_BYTE + low * _SECONDS_PRODUCT + dense * _SECONDS_DENSE
    return {
        "bytes_read": sum(path.stat().st_size for path in files),
        "bytes_written": written,
        "memory": budget.expected,
        "threads": budget.threads,
        "seconds": max(work / budget.threads, written * _SECONDS_BYTE / 1.5),
    }
