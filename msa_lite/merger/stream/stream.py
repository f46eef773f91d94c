"""Merge block by block on worker threads: into a shard's file, hashed in order, or into memory at any strengths.

Each worker reads, multiplies and rounds one block, with buffers of its own and one-thread BLAS kernels. Threads over
blocks keep their pace when other processes hold a core; OpenMP's threads inside a kernel would wait for each other.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from msa_lite.io.weights.blocks import Files, Scratch
from msa_lite.io.weights.checkpoint import ShardFile, TensorEntry
from msa_lite.io.weights.hub import Source
from msa_lite.io.weights.quantised_forms import Packed, Scaled
from msa_lite.io.weights.writer import Sink, output_bytes, shard_header
from msa_lite.merger.checks.checked import CheckedMerge, Precision, check_merge
from msa_lite.merger.checks.inputs import group_terms, sum_weights
from msa_lite.merger.checks.memory import MAX_MEMORY, Bounds, blocks_of, find_bounds
from msa_lite.merger.fidelity import Change, measure_factors
from msa_lite.merger.formula import Term, combine_factors
from msa_lite.merger.stream.block import (
    DeviceTensor,
    LoadedUpdate,
    OnDevice,
    RowBlock,
    merge_block,
    merge_rows,
    round_rows,
)
from msa_lite.merger.vectors.deltas import Loaded
from msa_lite.merger.vectors.vector import Vector

Put = Callable[[str, slice, Any], None]
"""Takes a tensor's name, a slice of its rows, and their values: an array that is used again, or a tensor of torch."""
_COPY = 16 << 20  # bytes of a range that stays, copied at a time


class Stream:
    """The threads and buffers of one merge; a context manager. `write` makes one shard at a time, `fill` all rows."""

    def __init__(self, checked: CheckedMerge, bounds: Bounds) -> None:
        self._checked, self._bounds = checked, bounds
        self._files = Files()
        self._workers, self._lock = ThreadPoolExecutor(bounds.threads), threading.Lock()
        self._of_thread = threading.local()
        self._outputs = deque(Scratch() for _ in range(bounds.depth))
        self._weights: dict[str, Packed] = {}  # by stored name of their codes or scales, where those are written anew
        for entry in map(checked.target.tensors.__getitem__, checked.touched):
            if isinstance(entry, Packed) and (form := self._form(entry)):
                self._weights |= {form.codes.name: entry, form.scales.name: entry}
        self._scales: dict[str, np.ndarray] = {}  # by tensor, those that all its blocks need

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
        waiting: deque[range | np.ndarray | tuple[RowBlock, Scratch, Future[tuple[Change | None, np.ndarray]]]] = (
            deque()
        )
        held = 0
        with Sink(path, size) as sink:

            def take() -> None:
                """Write the next piece of the file, once it is ready."""
                nonlocal held
                piece = waiting.popleft()
                if isinstance(piece, range):
                    sink.append_from(source, piece.start, len(piece), shard.path)
                    report(len(piece))
                    return
                if isinstance(piece, np.ndarray):
                    sink.append(piece.reshape(-1).view(np.uint8).data)
                    report(piece.nbytes)
                    return
                block, output, future = piece
                change, stored = future.result()
                sink.append(stored.reshape(-1).view(np.uint8).data)
                if change is not None:
                    changes.setdefault(block.entry.name, Change()).add(change)
                report(block.nbytes)
                held -= block.update.held
                self._outputs.append(output)

            sink.append(header)
            for piece in self._pieces(shard, changes):
                if not isinstance(piece, RowBlock):
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
            form, on_gpu = self._form(entry), None
            if on_device and form is None:
                on_gpu = on_device.open(entry, self._checked.precision, update.product, update.terms)
            scales = self._new_scales(entry, form) if form and form.is_wide else None
            blocks = [RowBlock(entry, rows, update, form=form, scales=scales) for rows in blocks_of(entry)]
            futures = [self._workers.submit(self._put, block, put, on_gpu) for block in blocks]
            for future in pending:  # no more than two tensors' factors are in memory
                future.result()
            pending = futures
        for future in pending:
            future.result()

    def _pieces(self, shard: ShardFile, changes: dict[str, Change]) -> Iterator[RowBlock | range | np.ndarray]:
        """Yield the pieces of the file in order; a range is of bytes of the target's file that are copied.

        Read and measure a tensor's factors when its turn comes.
        """
        rewritten = set(self._checked.rewritten)
        for entry in shard.tensors:
            weight = self._weights.get(entry.name, entry)
            form = self._form(weight)
            if form and entry == form.scales:
                yield self._new_scales(weight, form)
                continue
            if form or entry.name in rewritten:
                update, changes[weight.name] = self._load(weight)
                scales = self._new_scales(weight, form) if form and form.is_wide else None
                row_bytes = entry.nbytes // max(1, weight.matrix_shape[0])
                for start, stop in blocks_of(weight):
                    yield RowBlock(weight, (start, stop), update, row_bytes * (stop - start), form, scales)
                continue
            for done in range(0, entry.nbytes, _COPY):
                yield range(entry.start + done, entry.start + min(done + _COPY, entry.nbytes))

    def _form(self, entry: TensorEntry) -> Scaled | None:
        """Return the form of codes that a merged tensor is stored in; None for plain floats."""
        form = entry.form if isinstance(entry, Packed) and self._checked.keeps_codes else None
        return form if isinstance(form, Scaled) else None

    def _new_scales(self, entry: TensorEntry, form: Scaled) -> np.ndarray:
        """Return the scales of a merged tensor, (rows of scales, across), as they are stored.

        All its blocks are merged for that, and once more for the codes: scales often come first in a file, and codes
        of the whole tensor would take too much memory. Scales that blocks have in common are few, and kept.
        """
        if entry.name in self._scales:
            return self._scales[entry.name]
        update, _ = self._load(entry)
        peaks = np.zeros((form.scale_rows(0, entry.matrix_shape[0])[1], form.across), np.float32)
        pending: deque[Future[None]] = deque()
        for rows in blocks_of(entry):
            pending.append(self._workers.submit(self._find_peaks, RowBlock(entry, rows, update, form=form), peaks))
            if len(pending) > self._bounds.threads:
                pending.popleft().result()
        for future in pending:
            future.result()
        scales = form.new_scales(peaks)
        if form.is_wide:
            self._scales[entry.name] = scales
        return scales

    def _find_peaks(self, block: RowBlock, peaks: np.ndarray) -> None:
        """Enter the largest magnitudes of a merged block's weights, on a worker thread."""
        with np.errstate(over="ignore", invalid="ignore"):
            rows = merge_rows(self._checked, self._files, block, self._scratch())
        if block.form is not None and rows.merged is not None:
            found, (first, last) = block.form.peaks(rows.merged, block.rows[0]), block.form.scale_rows(*block.rows)
            with self._lock:
                np.maximum(peaks[first:last], found, out=peaks[first:last])

    def _load(self, entry: TensorEntry) -> tuple[LoadedUpdate, Change]:
        """Load the update of a tensor; return it with the norms of vectors that are one product."""
        checked, work = self._checked, self._checked.precision.work(entry)
        terms = [term.with_vector(term.vector.load(self._files, work)) for term in checked.deltas(entry.name)]
        held = checked.factor_bytes(entry.name)
        factors = [term.with_vector((d.left, d.right)) for term in terms if isinstance(d := term.vector, Loaded)]
        if checked.precision.exact or len(factors) < len(terms):
            return LoadedUpdate(terms=tuple(terms), held=held), Change()
        with np.errstate(over="ignore", invalid="ignore"):  # as in `_merge`
            return LoadedUpdate(combine_factors(factors) if factors else None, held=held), measure_factors(factors)

    def _merge(self, block: RowBlock, output: Scratch) -> tuple[Change | None, np.ndarray]:
        """Merge a block on a worker thread."""
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is looked at on its own
            return merge_block(self._checked, self._files, block, self._scratch(), output)

    def _put(self, block: RowBlock, put: Put, on_gpu: DeviceTensor | None) -> None:
        """Merge a block on a worker thread and hand it over."""
        scratch = self._scratch()
        values = on_gpu.merge(self._files, *block.rows, scratch[0]) if on_gpu else None
        if values is None:
            with np.errstate(over="ignore", invalid="ignore"):
                rows = merge_rows(self._checked, self._files, block, scratch)
                values, _ = round_rows(self._checked, block, rows, scratch[0])
        put(block.entry.name, slice(*block.rows), values)

    def _scratch(self) -> list[Scratch]:
        """Return the worker thread's buffers: for a block, and for the delta of each term."""
        if not hasattr(self._of_thread, "scratch"):
            common = Scratch()
            self._of_thread.scratch = [common, *(Scratch(common) for _ in self._checked.terms)]
        return self._of_thread.scratch


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
