"""Merge shard by shard: worker threads merge blocks of rows, the calling thread writes and hashes them in order.

Each worker reads, multiplies and rounds one block, with buffers of its own and one-thread BLAS kernels. Threads over
blocks keep their pace when other processes hold a core; OpenMP's threads inside a kernel would wait for each other.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from msa_lite.io.weights.blocks import Files, Scratch, read_rows
from msa_lite.io.weights.checkpoint import FLOAT_DTYPES, ShardFile, TensorEntry
from msa_lite.io.weights.writer import Sink, output_bytes, output_dtype, round_once, round_stochastically, shard_header
from msa_lite.merger.deltas import Delta, Loaded
from msa_lite.merger.fidelity import (
    Change,
    check_cast,
    check_overflow,
    check_update,
    count_block,
    is_quantised,
    measure,
    measure_carefully,
    measure_deltas,
    measure_factors,
)
from msa_lite.merger.formula import Factors, Term, combine, combine_factors
from msa_lite.merger.on_device import DeviceTensor, OnDevice
from msa_lite.merger.plan import Budget, MergePlan, block_rows

Put = Callable[[str, slice, Any], None]
"""Takes a tensor's name, a slice of its rows, and their values: an array that is used again, or a tensor of torch."""
_COPY = 16 << 20  # bytes of a range that stays, copied at a time


@dataclass(frozen=True)
class _Block:
    """Rows of a tensor to merge, or only to cast."""

    entry: TensorEntry
    """The tensor."""
    rows: tuple[int, int]
    """The first row, and the one after the last."""
    product: Factors | None = None
    """The whole update as one product, where factors alone change the tensor."""
    terms: tuple[Term[Delta], ...] = ()
    """The delta of each term, where there is no product."""
    held: int = 0
    """Bytes of the factors in memory, which all blocks of the tensor share."""


@dataclass(frozen=True)
class _Range:
    """Bytes of the target's file that are copied."""

    start: int
    nbytes: int


class Stream:
    """The threads and buffers of one merge; a context manager. `write` makes one shard at a time."""

    def __init__(self, plan: MergePlan, budget: Budget) -> None:
        self._plan, self._budget = plan, budget
        self._files = Files()
        self._workers = ThreadPoolExecutor(budget.threads)
        self._own = threading.local()
        self._outputs = deque(Scratch() for _ in range(budget.depth))

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.shutdown(cancel_futures=True)

    def write(self, shard: ShardFile, path: Path, report: Callable[[int], None]) -> tuple[str, dict[str, Change]]:
        """Write the merged shard to `path`, which must not exist. Return its SHA-256 and the changes by tensor.

        The file is on the disk when this returns. report: called with the number of the target's bytes that were merged
        since the last call.
        """
        dtype, source = self._plan.precision.dtype, self._files[shard.path]
        header = shard_header(shard, dtype)
        size = len(header) + output_bytes(shard.tensors, dtype)
        changes: dict[str, Change] = {}
        waiting: deque[_Range | tuple[_Block, Scratch, Future[tuple[Change | None, np.ndarray]]]] = deque()
        held = 0
        with Sink(path, size, like=source if header == shard.header else None) as sink:

            def take() -> None:
                """Write the next piece of the file, once it is ready."""
                nonlocal held
                piece = waiting.popleft()
                if isinstance(piece, _Range):
                    sink.append_from(source, piece.start, piece.nbytes, shard.path)
                    report(piece.nbytes)
                    return
                block, output, future = piece
                change, stored = future.result()
                sink.append(stored.reshape(-1).view(np.uint8).data)
                if change is not None:
                    changes.setdefault(block.entry.name, Change()).add(change)
                start, stop = block.rows
                report(block.entry.nbytes * (stop - start) // block.entry.matrix_shape[0])
                held -= block.held
                self._outputs.append(output)

            sink.append(header)
            for piece in self._pieces(shard, changes):
                if isinstance(piece, _Range):
                    waiting.append(piece)
                    continue
                while not self._outputs or (held and held + piece.held > self._budget.factor_bytes):
                    take()
                output = self._outputs.popleft()  # in turn, so that memory is in use from the start
                held += piece.held
                waiting.append((piece, output, self._workers.submit(self._merge, piece, output)))
            while waiting:
                take()
            self._files.close()  # or a model of many files would use up the descriptors
            return sink.close(), changes

    def fill(self, put: Put, on_device: OnDevice | None = None) -> None:
        """Hand the rows of every rewritten tensor to `put`, as they would be stored.

        put: called on worker threads. on_device: merges the blocks that it can. A vector of weight 0 is not read; a
        tensor that it alone touches comes as the target's.
        """
        pending: list[Future[None]] = []
        for name in self._plan.rewritten:
            entry = self._plan.target.tensors[name]
            load, _ = self._load(entry)
            step, rows = block_rows(entry), entry.matrix_shape[0]
            blocks = [_Block(entry, (start, min(start + step, rows)), *load) for start in range(0, rows, step)]
            on_gpu = on_device.open(entry, self._plan.precision, *load[:2]) if on_device else None
            futures = [self._workers.submit(self._put, block, put, on_gpu) for block in blocks]
            for future in pending:  # no more than two tensors' factors are in memory
                future.result()
            pending = futures
        for future in pending:
            future.result()

    def _pieces(self, shard: ShardFile, changes: dict[str, Change]) -> Iterator[_Block | _Range]:
        """Yield the pieces of the file in order. Read and measure a tensor's factors when its turn comes."""
        rewritten = set(self._plan.rewritten)
        for entry in shard.tensors:
            if entry.name not in rewritten:
                for done in range(0, entry.nbytes, _COPY):
                    yield _Range(entry.start + done, min(_COPY, entry.nbytes - done))
                continue
            rows, step = entry.matrix_shape[0], block_rows(entry)
            load, norms = self._load(entry)
            changes[entry.name] = norms
            for start in range(0, rows, step):
                yield _Block(entry, (start, min(start + step, rows)), *load)

    def _load(self, entry: TensorEntry) -> tuple[tuple[Factors | None, tuple[Term[Delta], ...], int], Change]:
        """Return the fields that all blocks of a tensor share, and the norms of vectors that are one product."""
        plan, work = self._plan, self._plan.precision.work(entry)
        terms = [term.with_vector(term.vector.load(self._files, work)) for term in plan.deltas(entry.name)]
        held = plan.factor_bytes(entry.name)
        factors = [term.with_vector((d.left, d.right)) for term in terms if isinstance(d := term.vector, Loaded)]
        if plan.precision.exact or len(factors) < len(terms):
            return (None, tuple(terms), held), Change()
        with np.errstate(over="ignore", invalid="ignore"):  # as in `_merge`
            return (combine_factors(factors) if factors else None, (), held), measure_factors(factors)

    def _merge(self, block: _Block, output: Scratch) -> tuple[Change | None, np.ndarray]:
        """Merge a block on a worker thread."""
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is looked at on its own
            return merge_block(self._plan, self._files, block, self._scratch(), output)

    def _put(self, block: _Block, put: Put, on_gpu: DeviceTensor | None) -> None:
        """Merge a block on a worker thread and hand it over."""
        if on_gpu is not None:
            values = on_gpu.merge(self._files, *block.rows, self._scratch()[0])
            if values is not None:
                put(block.entry.name, slice(*block.rows), values)
                return
        with np.errstate(over="ignore", invalid="ignore"):
            rows = merge_rows(self._plan, self._files, block, self._scratch(), self._scratch()[0])
        put(block.entry.name, slice(*block.rows), rows.stored)

    def _scratch(self) -> list[Scratch]:
        """Return the worker thread's buffers: for a block, and for the delta of each term."""
        if not hasattr(self._own, "scratch"):
            common = Scratch()
            self._own.scratch = [common, *(Scratch(common) for _ in self._plan.terms)]
        return self._own.scratch


@dataclass(frozen=True)
class _Rows:
    """A merged block."""

    raw: np.ndarray
    """The target's rows as they are stored."""
    before: np.ndarray
    """The same in the dtype that the merge computes in."""
    stored: np.ndarray
    """The result, rounded."""
    update: np.ndarray | None = None
    """The update; None where no vector touches the rows."""
    merged: np.ndarray | None = None
    """The result before it was rounded; None where no vector touches the rows."""
    norms: Change = field(default_factory=Change)
    """The norms of the deltas."""


def merge_rows(plan: MergePlan, files: Files, block: _Block, scratch: Sequence[Scratch], output: Scratch) -> _Rows:
    """Apply the formula to one block and round once, into a buffer of `output`.

    scratch: buffers for the block itself, then for the delta of each term.
    """
    entry, (start, stop) = block.entry, block.rows
    own, work, dtype = scratch[0], plan.precision.work(entry), output_dtype(entry, plan.precision.dtype)
    raw = read_rows(files, entry, start, stop, own)
    shape = raw.shape
    stored = output.take("out", shape, FLOAT_DTYPES[dtype])
    before = own.take("before", shape, work)
    np.copyto(before, raw)
    if block.product is None and not block.terms:
        return _Rows(raw, before, round_once(before, dtype, stored))
    update, merged = own.take("update", shape, work), own.take("merged", shape, work)
    norms = Change()
    if block.product is not None:
        np.matmul(block.product[0][start:stop], block.product[1], out=update)
        np.add(before, update, out=merged)
    else:
        terms = [
            term.with_vector(term.vector.rows(files, start, stop, work, buffers))
            for term, buffers in zip(block.terms, scratch[1:], strict=False)
        ]
        norms = measure_deltas(terms)
        combine(before, terms, merged)
        np.copyto(update, terms[0].vector)
        for term in terms[1:]:
            update += term.vector
    if plan.precision.stochastic:
        seed = [plan.precision.seed, zlib.crc32(entry.name.encode()), start]
        round_stochastically(merged, dtype, np.random.Generator(np.random.SFC64(seed)), stored)
    else:
        round_once(merged, dtype, stored)
    return _Rows(raw, before, stored, update, merged, norms)


def merge_block(
    plan: MergePlan, files: Files, block: _Block, scratch: Sequence[Scratch], output: Scratch
) -> tuple[Change | None, np.ndarray]:
    """Merge rows and measure the change. Return it (None for a mere cast) and the stored rows, in `output`'s buffer."""
    rows = merge_rows(plan, files, block, scratch, output)
    entry, dtype = block.entry, output_dtype(block.entry, plan.precision.dtype)
    raw, before, stored, update, merged = rows.raw, rows.before, rows.stored, rows.update, rows.merged
    if update is None or merged is None:
        check_cast(entry.name, dtype, before, stored)
        return None, stored
    if dtype != entry.dtype:
        np.copyto(before, round_once(before, dtype))  # a cast is no change
    np.copyto(merged, stored)
    codes = count_block(plan.forecast, entry, block.rows[0], before, merged) if is_quantised(entry) else {}
    change = measure(before, update, merged, scratch[0].take("moved", raw.shape, np.bool_))
    if not np.isfinite(change.stored + change.lost + change.weight + change.wanted):
        check_update(entry.name, update)
        check_overflow(entry.name, dtype, raw.astype(before.dtype), stored)
        change = measure_carefully(before, update, stored)
    change.codes = codes
    change.add(rows.norms)
    return change, stored
