"""Merge block by block on worker threads: into a shard's file, hashed in order, or into memory at any strengths.

Each worker reads, multiplies and rounds one block, with buffers of its own and one-thread BLAS kernels. Threads over
blocks keep their pace when other processes hold a core; OpenMP's threads inside a kernel would wait for each other.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from msa_lite.io.weights.blocks import Files, Scratch, read_rows
from msa_lite.io.weights.checkpoint import FLOAT_DTYPES, ShardFile, TensorEntry
from msa_lite.io.weights.hub import Source
from msa_lite.io.weights.writer import Sink, output_bytes, round_once, round_stochastically, shard_header
from msa_lite.merger.checked import MAX_MEMORY, Bounds, CheckedMerge, Precision, blocks_of, check_merge, find_bounds
from msa_lite.merger.deltas import Delta, Loaded
from msa_lite.merger.fidelity import (
    NAMES,
    Change,
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
from msa_lite.merger.inputs import group_terms, sum_weights
from msa_lite.merger.on_device import DeviceTensor, OnDevice
from msa_lite.merger.vectors import Vector

Put = Callable[[str, slice, Any], None]
"""Takes a tensor's name, a slice of its rows, and their values: an array that is used again, or a tensor of torch."""
_COPY = 16 << 20  # bytes of a range that stays, copied at a time


@dataclass(frozen=True)
class _Update:
    """The update of one tensor, loaded as far as it is kept in memory. All blocks of the tensor share it."""

    product: Factors | None = None
    """The whole update as one product, where factors alone change the tensor."""
    terms: tuple[Term[Delta], ...] = ()
    """The delta of each term, where there is no product."""
    held: int = 0
    """Bytes of the factors in memory."""


@dataclass(frozen=True)
class _Block:
    """Rows of a tensor to merge, or only to cast."""

    entry: TensorEntry
    """The tensor."""
    rows: tuple[int, int]
    """The first row, and the one after the last."""
    update: _Update
    """The update of the tensor; empty for a mere cast."""


@dataclass(frozen=True)
class _Range:
    """Bytes of the target's file that are copied."""

    start: int
    nbytes: int


class Stream:
    """The threads and buffers of one merge; a context manager. `write` makes one shard at a time, `fill` all rows."""

    def __init__(self, checked: CheckedMerge, bounds: Bounds) -> None:
        self._checked, self._bounds = checked, bounds
        self._files = Files()
        self._workers = ThreadPoolExecutor(bounds.threads)
        self._of_thread = threading.local()
        self._outputs = deque(Scratch() for _ in range(bounds.depth))

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.shutdown(cancel_futures=True)

    def write(self, shard: ShardFile, path: Path, report: Callable[[int], None]) -> tuple[str, dict[str, Change]]:
        """Write the merged shard to `path`, which must not exist. Return its SHA-256 and the changes by tensor.

        The file is on the disk when this returns. report: called with the number of the target's bytes that were merged
        since the last call.
        """
        dtype, source = self._checked.precision.stored, self._files[shard.path]
        header = shard_header(shard, dtype)
        size = len(header) + output_bytes(shard.tensors, dtype)
        changes: dict[str, Change] = {}
        waiting: deque[_Range | tuple[_Block, Scratch, Future[tuple[Change | None, np.ndarray]]]] = deque()
        held = 0
        is_same = header == shard.header and size == os.fstat(source).st_size  # no dtype or tensor more than there
        with Sink(path, size, like=source if is_same else None) as sink:

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
                held -= block.update.held
                self._outputs.append(output)

            sink.append(header)
            for piece in self._pieces(shard, changes):
                if isinstance(piece, _Range):
                    waiting.append(piece)
                    continue
                while not self._outputs or (held and held + piece.update.held > self._bounds.factor_bytes):
                    take()
                output = self._outputs.popleft()  # in turn, so that memory is in use from the start
                held += piece.update.held
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
        for name in self._checked.rewritten:
            entry = self._checked.target.tensors[name]
            update, _ = self._load(entry)
            on_gpu = on_device.open(entry, self._checked.precision, update.product, update.terms) if on_device else None
            blocks = [_Block(entry, rows, update) for rows in blocks_of(entry)]
            futures = [self._workers.submit(self._put, block, put, on_gpu) for block in blocks]
            for future in pending:  # no more than two tensors' factors are in memory
                future.result()
            pending = futures
        for future in pending:
            future.result()

    def _pieces(self, shard: ShardFile, changes: dict[str, Change]) -> Iterator[_Block | _Range]:
        """Yield the pieces of the file in order. Read and measure a tensor's factors when its turn comes."""
        rewritten = set(self._checked.rewritten)
        for entry in shard.tensors:
            if entry.name in rewritten:
                update, changes[entry.name] = self._load(entry)
                for rows in blocks_of(entry):
                    yield _Block(entry, rows, update)
                continue
            for done in range(0, entry.nbytes, _COPY):
                yield _Range(entry.start + done, min(_COPY, entry.nbytes - done))

    def _load(self, entry: TensorEntry) -> tuple[_Update, Change]:
        """Load the update of a tensor; return it with the norms of vectors that are one product."""
        checked, work = self._checked, self._checked.precision.work(entry)
        terms = [term.with_vector(term.vector.load(self._files, work)) for term in checked.deltas(entry.name)]
        held = checked.factor_bytes(entry.name)
        factors = [term.with_vector((d.left, d.right)) for term in terms if isinstance(d := term.vector, Loaded)]
        if checked.precision.exact or len(factors) < len(terms):
            return _Update(terms=tuple(terms), held=held), Change()
        with np.errstate(over="ignore", invalid="ignore"):  # as in `_merge`
            return _Update(combine_factors(factors) if factors else None, held=held), measure_factors(factors)

    def _merge(self, block: _Block, output: Scratch) -> tuple[Change | None, np.ndarray]:
        """Merge a block on a worker thread."""
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is looked at on its own
            return _merge_block(self._checked, self._files, block, self._scratch(), output)

    def _put(self, block: _Block, put: Put, on_gpu: DeviceTensor | None) -> None:
        """Merge a block on a worker thread and hand it over."""
        scratch = self._scratch()
        values = on_gpu.merge(self._files, *block.rows, scratch[0]) if on_gpu else None
        if values is None:
            with np.errstate(over="ignore", invalid="ignore"):
                values = _merge_rows(self._checked, self._files, block, scratch, scratch[0]).stored
        put(block.entry.name, slice(*block.rows), values)

    def _scratch(self) -> list[Scratch]:
        """Return the worker thread's buffers: for a block, and for the delta of each term."""
        if not hasattr(self._of_thread, "scratch"):
            common = Scratch()
            self._of_thread.scratch = [common, *(Scratch(common) for _ in self._checked.terms)]
        return self._of_thread.scratch


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


def _merge_rows(
    checked: CheckedMerge, files: Files, block: _Block, scratch: Sequence[Scratch], output: Scratch
) -> _Rows:
    """Apply the formula to one block and round once, into a buffer of `output`.

    scratch: buffers for the block itself, then for the delta of each term.
    """
    entry, (start, stop), (product, terms) = block.entry, block.rows, (block.update.product, block.update.terms)
    buffers, precision = scratch[0], checked.precision
    work, dtype = precision.work(entry), precision.output(entry)
    raw = read_rows(files, entry, start, stop, buffers)
    stored = output.take("out", raw.shape, FLOAT_DTYPES[dtype])
    before = buffers.take("before", raw.shape, work)
    np.copyto(before, raw)
    if product is None and not terms:
        return _Rows(raw, before, round_once(before, dtype, stored))
    update, merged = buffers.take("update", raw.shape, work), buffers.take("merged", raw.shape, work)
    norms = Change()
    if product is not None:
        np.matmul(product[0][start:stop], product[1], out=update)
        np.add(before, update, out=merged)
    else:
        deltas = [
            term.with_vector(term.vector.rows(files, start, stop, work, own))
            for term, own in zip(terms, scratch[1:], strict=False)
        ]
        norms = measure_deltas(deltas)
        combine(before, deltas, merged)
        np.copyto(update, deltas[0].vector)
        for term in deltas[1:]:
            update += term.vector
    if precision.is_stochastic:
        seed = [precision.seed, zlib.crc32(entry.name.encode()), start]
        round_stochastically(merged, dtype, np.random.Generator(np.random.SFC64(seed)), stored)
    else:
        round_once(merged, dtype, stored)
    return _Rows(raw, before, stored, update, merged, norms)


def _merge_block(
    checked: CheckedMerge, files: Files, block: _Block, scratch: Sequence[Scratch], output: Scratch
) -> tuple[Change | None, np.ndarray]:
    """Merge rows and measure the change. Return it (None for a mere cast) and the stored rows, in `output`'s buffer."""
    rows = _merge_rows(checked, files, block, scratch, output)
    entry, dtype = block.entry, checked.precision.output(block.entry)
    raw, before, stored, update, merged = rows.raw, rows.before, rows.stored, rows.update, rows.merged
    if update is None or merged is None:
        check_overflow(before, stored, f"{entry.name}: its values do not fit {NAMES[dtype]}; choose another --dtype")
        return None, stored
    if dtype != entry.dtype:
        np.copyto(before, round_once(before, dtype))  # a cast is no change
    np.copyto(merged, stored)
    codes = count_block(checked.forecast, entry, block.rows[0], before, merged) if is_quantised(entry) else {}
    change = measure(before, update, merged, scratch[0].take("moved", raw.shape, np.bool_))
    if not np.isfinite(change.stored + change.lost + change.weight + change.wanted):
        check_update(entry.name, update)
        remedy = "try a smaller alpha or beta, or --dtype float32"
        fault = f"{entry.name}: merged values do not fit {NAMES[dtype]}; {remedy}"
        check_overflow(raw.astype(before.dtype), stored, fault)
        change = measure_carefully(before, update, stored)
    change.codes = codes
    change.add(rows.norms)
    return change, stored


@dataclass(frozen=True)
class OpenMerge:
    """A target with its vectors, opened and checked. `fill` merges them at any strengths, as often as needed.

    Each `fill` reads target and vectors anew: it never adds to the result of an earlier one.
    """

    checked: CheckedMerge
    """The target with a term for each vector, in the order in which `merge` adds them."""
    names: Mapping[str, tuple[str, ...]]
    """The names of each term's vector, by the first: several where it was given more than once."""

    @property
    def rewritten(self) -> dict[str, TensorEntry]:
        """Return the target's tensors that a vector touches, or that are stored in another dtype, by name."""
        return {name: self.checked.target.tensors[name] for name in self.checked.rewritten}

    def fill(self, weights: Mapping[str, float], put: Put, on_device: OnDevice | None = None) -> None:
        """Hand the rows of every rewritten tensor to `put` as `merge` would store them (`Stream.fill`).

        weights: by the names of the vectors, as they were given to `open_merge`. on_device: makes the rows on a GPU.
        """
        self._fill(replace(self.checked, terms=self._weighted(weights)), put, on_device)

    def restore(self, put: Put) -> None:
        """Hand the target's own rows of every tensor that a vector touches to `put`, as they are stored."""
        self._fill(replace(self.checked, terms=self._weighted({}), precision=Precision()), put)

    def _weighted(self, weights: Mapping[str, float]) -> tuple[Term[Vector], ...]:
        return tuple(
            replace(term, weight=sum_weights(weights.get(name, 0.0) for name in self.names[term.name]))
            for term in self.checked.terms
        )

    def _fill(self, checked: CheckedMerge, put: Put, on_device: OnDevice | None = None) -> None:
        bounds = find_bounds(checked, MAX_MEMORY, None)
        with threadpool_limits(1, user_api="blas"), Stream(checked, bounds) as stream:
            stream.fill(put, on_device)


def open_merge(target: Source, vectors: Mapping[str, Source], prior: Source, precision: Precision) -> OpenMerge:
    """Open the target with vectors by name, such as "forget", "retain", "forget 2". Raise as `merge` does."""
    groups = group_terms([Term(name, vector, 1.0) for name, vector in vectors.items()])
    checked = check_merge(target, [group[0] for group in groups], prior, precision)
    checked.check_factors()
    return OpenMerge(checked, {group[0].name: tuple(term.name for term in group) for group in groups})
