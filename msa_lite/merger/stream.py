"""Target shards → merged shards: blocks of rows on worker threads, hashed in order on the calling one.

Workers read, multiply, round and write a block each, with buffers of their own and one-thread BLAS kernels: threads
over blocks keep their pace when other processes hold a core, where OpenMP's threads inside a kernel wait for each
other. The caller only hashes what they wrote, in the order of the file. A further thread has the disk catch up.
"""

from __future__ import annotations

import hashlib
import os
import queue
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from msa_lite.io.blocks import Files, Scratch, pread_into, read_rows
from msa_lite.io.checkpoint import FLOAT_DTYPES, ShardFile, TensorEntry
from msa_lite.io.writer import (
    clone_file,
    copy_range,
    output_bytes,
    output_dtype,
    reserve,
    round_once,
    round_stochastically,
    shard_header,
    write_all,
)
from msa_lite.merger.fidelity import (
    Change,
    check_overflow,
    measure,
    measure_carefully,
    measure_factors,
    measure_vectors,
)
from msa_lite.merger.formula import Factors, combine, combine_factors
from msa_lite.merger.plan import Budget, Plan, block_rows
from msa_lite.vectors import Product

_COPY = 16 << 20  # bytes of an untouched range that one worker takes at a time
_HASH = 1 << 20  # bytes hashed at a time where they have to be read again
_FLUSH = 256 << 20  # bytes written between two calls to have the disk catch up


@dataclass(frozen=True)
class _Piece:
    """A part of the output file: either rows of a tensor to merge, or bytes to copy from the target's file."""

    at: int
    nbytes: int
    start: int
    stop: int
    entry: TensorEntry | None = None
    factors: tuple[Factors | None, ...] | None = None

    @property
    def factor_bytes(self) -> int:
        return sum(half.nbytes for pair in self.factors or () for half in pair or ())


class Stream:
    """The threads and buffers of one merge; a context manager. `write` makes one shard at a time."""

    def __init__(self, plan: Plan, budget: Budget) -> None:
        self._plan, self._budget = plan, budget
        self._files = Files()
        self._workers = ThreadPoolExecutor(budget.threads)
        self._disk = ThreadPoolExecutor(1)
        self._own = threading.local()
        # The kernel lets one thread at a time write to a file; who waits for it there spins, here it sleeps.
        self._writing = threading.Lock()
        self._hashed = bytearray(_HASH)
        self._flushes: list[Future[None]] = []
        self._outputs: queue.SimpleQueue[Scratch] = queue.SimpleQueue()
        for _ in range(budget.depth):
            self._outputs.put(Scratch())

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.shutdown(cancel_futures=True)
        self._disk.shutdown(cancel_futures=True)

    def write(
        self,
        shard: ShardFile,
        path: Path,
        report: Callable[[int], None],
        finish: Callable[[str, dict[str, Change]], None],
    ) -> Future[None]:
        """Write the merged shard to `path`, which must not exist.

        report: called with the number of the target's bytes done since the last call. finish: called on another
        thread with the file's SHA-256 and the changes by tensor, once the file is on the disk; the returned future
        ends then.
        """
        source = self._files[shard.path]
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            header = shard_header(shard, self._plan.precision.dtype)
            size = len(header) + output_bytes(shard.tensors, self._plan.precision.dtype)
            cloned = header == shard.header and clone_file(source, handle)
            if not cloned:
                reserve(handle, size)
                write_all(handle, header, 0)
            digest, changes = self._write_pieces(shard, source, handle, header, cloned, report)
        except BaseException:
            self._workers.shutdown(cancel_futures=True)
            self._disk.shutdown(cancel_futures=True)
            os.close(handle)
            raise

        def complete(flushes: list[Future[None]]) -> None:
            try:
                for flush in flushes:
                    flush.result()  # an error that the disk reports once, to the first who asks
                os.fsync(handle)
            finally:
                os.close(handle)
            finish(digest, changes)

        flushes, self._flushes = self._flushes, []
        return self._disk.submit(complete, flushes)

    def _write_pieces(
        self, shard: ShardFile, source: int, handle: int, header: bytes, cloned: bool, report: Callable[[int], None]
    ) -> tuple[str, dict[str, Change]]:
        """All pieces of a shard; returns the file's hash and what changed."""
        state = hashlib.sha256(header)
        changes: dict[str, Change] = {}
        waiting: deque[tuple[_Piece, Scratch, Future[Change | None]]] = deque()
        held = unflushed = 0

        def take() -> None:
            nonlocal held, unflushed
            piece, output, future = waiting.popleft()
            change = future.result()
            if piece.entry is None:
                self._hash_range(state, source, piece)
                report(piece.nbytes)
            else:
                state.update(output.take("out", (piece.nbytes,), np.uint8).data)
                report(piece.entry.nbytes * (piece.stop - piece.start) // piece.entry.matrix_shape[0])
            if change is not None and piece.entry is not None:
                changes.setdefault(piece.entry.name, Change()).add(change)
            held -= piece.factor_bytes
            unflushed += piece.nbytes
            if unflushed > _FLUSH:
                self._flushes.append(self._disk.submit(os.fdatasync if hasattr(os, "fdatasync") else os.fsync, handle))
                unflushed = 0
            self._outputs.put(output)

        for piece in self._pieces(shard, len(header), changes):
            while waiting and (
                len(waiting) >= self._budget.depth or held + piece.factor_bytes > self._budget.factor_bytes
            ):
                take()
            output = self._outputs.get_nowait()
            held += piece.factor_bytes
            waiting.append((piece, output, self._workers.submit(self._do, piece, source, handle, output, cloned)))
        while waiting:
            take()
        return state.hexdigest(), changes

    def _pieces(self, shard: ShardFile, at: int, changes: dict[str, Change]) -> Iterator[_Piece]:
        """The output file's data in order. A tensor's factors are read, and measured, when its turn comes."""
        plan, dtype = self._plan, self._plan.precision.dtype
        touched = set(plan.touched)
        copy = [0, 0, 0]  # neighbouring tensors that stay are copied in one go: from, count, to

        def copies() -> Iterator[_Piece]:
            start, count, to = copy
            for done in range(0, count, _COPY):
                nbytes = min(_COPY, count - done)
                yield _Piece(to + done, nbytes, start + done, start + done + nbytes)
            copy[:] = [0, 0, 0]

        for entry in shard.tensors:
            nbytes = output_bytes([entry], dtype)
            if not entry.nbytes or (entry.name not in touched and output_dtype(entry, dtype) == entry.dtype):
                copy[:] = [copy[0], copy[1] + nbytes, copy[2]] if copy[1] else [entry.start, nbytes, at]
            else:
                yield from copies()
                factors = None
                if entry.name in touched and plan.is_low_rank(entry.name):
                    factors, changes[entry.name] = self._load_factors(entry)
                rows, step = entry.matrix_shape[0], block_rows(entry)
                width = nbytes // rows
                for start in range(0, rows, step):
                    stop = min(start + step, rows)
                    yield _Piece(at + start * width, (stop - start) * width, start, stop, entry, factors)
            at += nbytes
        yield from copies()

    def _load_factors(self, entry: TensorEntry) -> tuple[tuple[Factors | None, ...], Change]:
        """Factors of one product for both vectors, or, for exact arithmetic, of each; and the vectors' norms."""
        plan = self._plan
        forget, retain = (
            delta.factors(self._files, plan.precision.work(entry)) if isinstance(delta, Product) else None
            for delta in plan.deltas(entry.name)
        )
        norms = measure_factors(forget, retain)
        return (
            (forget, retain) if plan.precision.exact else (combine_factors(forget, plan.alpha, retain, plan.beta),)
        ), norms

    def _hash_range(self, state: Any, source: int, piece: _Piece) -> None:
        for start in range(piece.start, piece.stop, _HASH):
            view = memoryview(self._hashed)[: min(_HASH, piece.stop - start)]
            pread_into(source, view, start)
            state.update(view)

    def _do(self, piece: _Piece, source: int, handle: int, output: Scratch, cloned: bool) -> Change | None:
        """One piece, on a worker thread: its bytes are in the file and, where merged, in `output`."""
        if piece.entry is None:
            if not cloned:
                with self._writing:
                    copy_range(source, handle, piece.start, piece.nbytes, piece.at)
            return None
        if not hasattr(self._own, "scratch"):
            self._own.scratch = {name: Scratch() for name in ("block", "forget", "retain")}
        change, stored = merge_block(
            self._plan, self._files, piece.entry, piece.start, piece.stop, piece.factors, self._own.scratch, output
        )
        with self._writing:
            write_all(handle, stored.reshape(-1).view(np.uint8).data, piece.at)
        return change


def merge_block(
    plan: Plan,
    files: Files,
    entry: TensorEntry,
    start: int,
    stop: int,
    factors: tuple[Factors | None, ...] | None,
    scratch: dict[str, Scratch],
    output: Scratch,
) -> tuple[Change | None, np.ndarray]:
    """Rows [start, stop) of one tensor: what changed (None for a cast alone), and the rows as they are stored.

    factors: for a tensor that only products change: those of `combine_factors`, or of forget and retain vector apart.
    Rounds once, on storing.
    """
    own, work, dtype = scratch["block"], plan.precision.work(entry), output_dtype(entry, plan.precision.dtype)
    raw = read_rows(files, entry, start, stop, own)
    shape = raw.shape
    stored = output.take("out", shape, FLOAT_DTYPES[dtype])
    before = own.take("before", shape, work)
    np.copyto(before, raw)
    deltas = plan.deltas(entry.name)
    if not any(deltas):
        check_overflow(entry.name, dtype, before, round_once(before, dtype, stored))
        return None, stored
    wanted, merged = own.take("wanted", shape, work), own.take("merged", shape, work)
    norms = Change()
    if factors is not None and len(factors) == 1 and factors[0]:
        np.matmul(factors[0][0][start:stop], factors[0][1], out=wanted)
        np.add(before, wanted, out=merged)
    else:
        if factors is not None:
            forget, retain = (left_right and left_right[0][start:stop] @ left_right[1] for left_right in factors)
        else:
            forget, retain = (
                delta.rows(files, start, stop, work, scratch[name]) if delta else None
                for name, delta in zip(("forget", "retain"), deltas, strict=True)
            )
            norms = measure_vectors(forget, retain)
        combine(before, forget, plan.alpha, retain, plan.beta, merged)
        np.subtract(0 if retain is None else retain, 0 if forget is None else forget, out=wanted)
    if plan.precision.stochastic:
        seed = [plan.precision.seed, zlib.crc32(entry.name.encode()), start]
        round_stochastically(merged, dtype, np.random.Generator(np.random.SFC64(seed)), stored)
    else:
        round_once(merged, dtype, stored)
    if dtype != entry.dtype:
        np.copyto(before, round_once(before, dtype))  # a cast is no change
    np.copyto(merged, stored)
    change = measure(before, wanted, merged, own.take("moved", shape, np.bool_))
    if not np.isfinite(change.stored + change.lost + change.weight + change.wanted):
        check_overflow(entry.name, dtype, raw.astype(work), stored)
        change = measure_carefully(entry.name, before, wanted, stored)
    change.add(norms)
    return change, stored
