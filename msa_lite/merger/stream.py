"""Target shards → merged shards: blocks of rows on worker threads, written and hashed in order on the calling one.

Workers read, multiply and round a block each, with buffers of their own and one-thread BLAS kernels: threads over
blocks keep their pace when other processes hold a core, where OpenMP's threads inside a kernel wait for each other.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from msa_lite.io.blocks import Files, Scratch, read_rows
from msa_lite.io.checkpoint import FLOAT_DTYPES, ShardFile, TensorEntry
from msa_lite.io.sink import Sink
from msa_lite.io.writer import output_bytes, output_dtype, round_once, round_stochastically, shard_header
from msa_lite.merger.fidelity import (
    Change,
    check_cast,
    check_overflow,
    check_update,
    measure,
    measure_carefully,
    measure_factors,
    measure_vectors,
)
from msa_lite.merger.formula import Factors, combine, combine_factors
from msa_lite.merger.plan import Budget, MergePlan, block_rows
from msa_lite.merger.vectors import Delta, Loaded

Put = Callable[[str, slice, np.ndarray], None]
"""Takes a tensor's name, which rows of its matrix view, and their values, in a buffer that is used again."""

_Buffers = tuple[Scratch, Scratch, Scratch]
_COPY = 16 << 20  # bytes of a range that stays, copied at a time


@dataclass(frozen=True)
class _Block:
    """Rows of a tensor to merge (or cast): by one product for both vectors, or by a delta for each.

    held: bytes of the factors in memory, which all blocks of the tensor share.
    """

    entry: TensorEntry
    rows: tuple[int, int]
    product: Factors | None = None
    deltas: tuple[Delta | None, Delta | None] = (None, None)
    held: int = 0


@dataclass(frozen=True)
class _Range:
    """Bytes of the target's file that stay as they are."""

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
        """Write the merged shard to `path`, which must not exist; its SHA-256 and what changed, by tensor.

        The file is on the disk when this returns. report: called with the number of the target's bytes done since
        the last call.
        """
        dtype, source = self._plan.precision.dtype, self._files[shard.path]
        header = shard_header(shard, dtype)
        size = len(header) + output_bytes(shard.tensors, dtype)
        changes: dict[str, Change] = {}
        waiting: deque[_Range | tuple[_Block, Scratch, Future[tuple[Change | None, np.ndarray]]]] = deque()
        held = 0
        with Sink(path, size, like=source if header == shard.header else None) as sink:

            def take() -> None:
                """The next piece of the file, once it is ready."""
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

    def fill(self, put: Put) -> None:
        """Hand the rows of every tensor that does not stay as it is to `put`, as they would be stored.

        put: called on worker threads. A vector of strength 0 is not read; what it alone touches comes as the target's.
        """
        pending: list[Future[None]] = []
        for name in self._plan.rewritten:
            entry = self._plan.target.tensors[name]
            load, _ = self._load(entry)
            step, rows = block_rows(entry), entry.matrix_shape[0]
            blocks = [_Block(entry, (start, min(start + step, rows)), *load) for start in range(0, rows, step)]
            futures = [self._workers.submit(self._put, block, put) for block in blocks]
            for future in pending:  # no more than two tensors' factors are in memory
                future.result()
            pending = futures
        for future in pending:
            future.result()

    def _pieces(self, shard: ShardFile, changes: dict[str, Change]) -> Iterator[_Block | _Range]:
        """The file's data in order. A tensor's factors are read, and measured, when its turn comes."""
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

    def _load(self, entry: TensorEntry) -> tuple[tuple[Factors | None, tuple[Delta | None, Delta | None], int], Change]:
        """What a tensor's blocks share, as `_Block` takes it; and the norms of vectors that are one product."""
        plan, work = self._plan, self._plan.precision.work(entry)
        forget, retain = (delta.load(self._files, work) if delta else None for delta in plan.deltas(entry.name))
        held = plan.factor_bytes(entry.name)
        if plan.precision.exact or not all(isinstance(delta, Loaded) for delta in (forget, retain) if delta):
            return (None, (forget, retain), held), Change()
        pairs = [(delta.left, delta.right) if isinstance(delta, Loaded) else None for delta in (forget, retain)]
        with np.errstate(over="ignore", invalid="ignore"):  # as in `_merge`
            product = combine_factors(pairs[0], plan.alpha, pairs[1], plan.beta) if any(pairs) else None
            return (product, (None, None), held), measure_factors(*pairs)

    def _merge(self, block: _Block, output: Scratch) -> tuple[Change | None, np.ndarray]:
        """A block on a worker thread, with what changed."""
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is looked at on its own
            return merge_block(self._plan, self._files, block, self._scratch(), output)

    def _put(self, block: _Block, put: Put) -> None:
        """A block on a worker thread, handed over."""
        with np.errstate(over="ignore", invalid="ignore"):
            rows = merge_rows(self._plan, self._files, block, self._scratch(), self._scratch()[0])
        put(block.entry.name, slice(*block.rows), rows.stored)

    def _scratch(self) -> _Buffers:
        """The buffers of a worker thread, for what is only needed meanwhile."""
        if not hasattr(self._own, "scratch"):
            common = Scratch()
            self._own.scratch = (common, Scratch(common), Scratch(common))
        own: _Buffers = self._own.scratch
        return own


@dataclass(frozen=True)
class _Rows:
    """A merged block: the rows as they were, as they are stored, and, where a vector touches them, the update that was
    wanted and the result before it was rounded, with the norms of deltas.
    """

    raw: np.ndarray
    before: np.ndarray
    stored: np.ndarray
    wanted: np.ndarray | None = None
    merged: np.ndarray | None = None
    norms: Change = field(default_factory=Change)


def merge_rows(plan: MergePlan, files: Files, block: _Block, scratch: _Buffers, output: Scratch) -> _Rows:
    """The formula on one block, rounded once, on storing, into a buffer of `output`.

    scratch: buffers for the block itself, the forget delta and the retain delta.
    """
    entry, (start, stop) = block.entry, block.rows
    own, work, dtype = scratch[0], plan.precision.work(entry), output_dtype(entry, plan.precision.dtype)
    raw = read_rows(files, entry, start, stop, own)
    shape = raw.shape
    stored = output.take("out", shape, FLOAT_DTYPES[dtype])
    before = own.take("before", shape, work)
    np.copyto(before, raw)
    if block.product is None and not any(block.deltas):
        return _Rows(raw, before, round_once(before, dtype, stored))
    wanted, merged = own.take("wanted", shape, work), own.take("merged", shape, work)
    norms = Change()
    if block.product is not None:
        np.matmul(block.product[0][start:stop], block.product[1], out=wanted)
        np.add(before, wanted, out=merged)
    else:
        forget, retain = (
            delta.rows(files, start, stop, work, buffers) if delta else None
            for delta, buffers in zip(block.deltas, scratch[1:], strict=True)
        )
        norms = measure_vectors(forget, retain)
        combine(before, forget, plan.alpha, retain, plan.beta, merged)
        np.subtract(0 if retain is None else retain, 0 if forget is None else forget, out=wanted)
    if plan.precision.stochastic:
        seed = [plan.precision.seed, zlib.crc32(entry.name.encode()), start]
        round_stochastically(merged, dtype, np.random.Generator(np.random.SFC64(seed)), stored)
    else:
        round_once(merged, dtype, stored)
    return _Rows(raw, before, stored, wanted, merged, norms)


def merge_block(
    plan: MergePlan, files: Files, block: _Block, scratch: _Buffers, output: Scratch
) -> tuple[Change | None, np.ndarray]:
    """`merge_rows` with what changed (None for a cast alone); the rows as they are stored, in a buffer of `output`."""
    rows = merge_rows(plan, files, block, scratch, output)
    entry, dtype = block.entry, output_dtype(block.entry, plan.precision.dtype)
    raw, before, stored, wanted, merged = rows.raw, rows.before, rows.stored, rows.wanted, rows.merged
    if wanted is None or merged is None:
        check_cast(entry.name, dtype, before, stored)
        return None, stored
    if dtype != entry.dtype:
        np.copyto(before, round_once(before, dtype))  # a cast is no change
    np.copyto(merged, stored)
    change = measure(before, wanted, merged, scratch[0].take("moved", raw.shape, np.bool_))
    if not np.isfinite(change.stored + change.lost + change.weight + change.wanted):
        check_update(entry.name, wanted)
        check_overflow(entry.name, dtype, raw.astype(before.dtype), stored)
        change = measure_carefully(before, wanted, stored)
    change.add(rows.norms)
    return change, stored
