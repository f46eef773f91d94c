"""The memory and the work of a merge, by headers: blocks of rows, threads, bytes."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from msa_lite.errors import UsageError
from msa_lite.io.console.progress import readable
from msa_lite.io.weights.checkpoint import FLOAT_DTYPES, TensorEntry
from msa_lite.io.weights.quantised_forms import Packed, Turned
from msa_lite.merger.checks.checked import CheckedMerge

MAX_MEMORY = "512MB"
BLOCK = 1 << 19  # numbers in a block: fp32 weights, update and result stay in a core's share of the cache
RESERVED = 100 << 20  # bytes for Python, numpy and the buffers of the output file
_TENSOR = 1500  # bytes that a tensor's names, places and figures take
_LARGEST = 10**15  # bytes of memory that anybody allows
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def block_rows(entry: TensorEntry) -> int:
    """Return the rows of a block. They depend on the tensor alone: threads and memory never change a result's bits."""
    rows, step = max(1, BLOCK // max(1, entry.matrix_shape[1])), entry.form.step if isinstance(entry, Packed) else 1
    return max(rows // step, 1) * step


def blocks_of(entry: TensorEntry) -> Iterator[tuple[int, int]]:
    """Yield the first row of each block of a tensor, and the one after its last."""
    rows, step = entry.matrix_shape[0], block_rows(entry)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


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
    """Return the bytes of one thread's buffers: stored block, weights, update, result; for dense deltas two more."""
    precision = checked.precision
    work = np.dtype(precision.work(entry)).itemsize
    stored = FLOAT_DTYPES[entry.dtype].itemsize
    dense = 0 if checked.is_low_rank(entry.name) else (4 * work + 8) * len(checked.deltas(entry.name))
    coded = 16 if isinstance(entry, Packed) else 0  # codes, and the weights that they stand for, twice
    if isinstance(entry, Packed) and isinstance(entry.form, Turned):
        coded += 8  # a strip of all matrices' rows
    narrowing = 3 * work if precision.stored or precision.is_stochastic or precision.exact else 0
    return _block_size(entry) * (stored + 3 * work + 1 + dense + narrowing + coded)


def describe_work(checked: CheckedMerge, bounds: Bounds) -> str:
    """Say how much the merge writes, and the memory and threads that it takes."""
    # transformers tells where the files hold each expert. As measured: a process with it is that much larger.
    has_experts = any(low.share for name in checked.touched for low in checked.low_ranks(name))
    beside = " and 300 MB for transformers" if has_experts else ""
    return (
        f"{readable(checked.output_bytes)} to write, about {readable(bounds.memory)} of memory{beside}, "
        f"{bounds.threads} threads"
    )
