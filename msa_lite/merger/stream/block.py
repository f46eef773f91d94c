"""Merge one block of a tensor's rows: read, add, round once or encode, and measure what became of the update.

A GPU does the same for points of a sweep (`OnDevice`).
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from msa_lite.io.weights.blocks import Files, Scratch, read_rows
from msa_lite.io.weights.checkpoint import FLOAT_DTYPES, TensorEntry
from msa_lite.io.weights.quantised_forms import Scaled
from msa_lite.io.weights.writer import round_once, round_stochastically
from msa_lite.merger.checks.checked import CheckedMerge, Precision
from msa_lite.merger.fidelity import (
    NAMES,
    Change,
    check_overflow,
    check_update,
    measure,
    measure_carefully,
    measure_deltas,
)
from msa_lite.merger.formula import Factors, Term, combine
from msa_lite.merger.vectors.deltas import Delta, Difference

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedUpdate:
    """The update of one tensor, loaded as far as it is kept in memory. All blocks of the tensor share it."""

    product: Factors | None = None
    """The whole update as one product, where factors alone change the tensor."""
    terms: tuple[Term[Delta], ...] = ()
    """The delta of each term, where there is no product."""
    held: int = 0
    """Bytes of the factors in memory."""


@dataclass(frozen=True)
class RowBlock:
    """Rows of a tensor to merge, or only to cast."""

    entry: TensorEntry
    """The tensor."""
    rows: tuple[int, int]
    """The first row, and the one after the last."""
    update: LoadedUpdate
    """The update of the tensor; empty for a mere cast."""
    nbytes: int = 0
    """Bytes of the target's file that it stands for."""
    form: Scaled | None = None
    """The form of codes that the merged rows are stored in; None for plain floats."""
    scales: np.ndarray | None = None
    """The new scales of the whole tensor, where blocks of it have some in common."""


@dataclass(frozen=True)
class MergedRows:
    """A merged block."""

    raw: np.ndarray
    """The target's rows as they are stored."""
    before: np.ndarray
    """The same in the dtype that the merge computes in."""
    update: np.ndarray | None = None
    """The update; None where no vector touches the rows."""
    merged: np.ndarray | None = None
    """The result before it was rounded; None where no vector touches the rows."""
    norms: Change = field(default_factory=Change)
    """The norms of the deltas."""


def merge_rows(checked: CheckedMerge, files: Files, block: RowBlock, scratch: Sequence[Scratch]) -> MergedRows:
    """Apply the formula to one block.

    scratch: buffers for the block itself, then for the delta of each term.
    """
    entry, (start, stop), (product, terms) = block.entry, block.rows, (block.update.product, block.update.terms)
    buffers, work = scratch[0], checked.precision.work(entry)
    raw = read_rows(files, entry, start, stop, buffers)
    before = buffers.take("before", raw.shape, work)
    np.copyto(before, raw)
    if product is None and not terms:
        return MergedRows(raw, before)
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
    return MergedRows(raw, before, update, merged, norms)


def round_rows(
    checked: CheckedMerge, block: RowBlock, rows: MergedRows, output: Scratch
) -> tuple[np.ndarray, np.ndarray]:
    """Round a merged block once, into a buffer of `output`. Return its values, and what is written: those, or codes."""
    entry, start, precision = block.entry, block.rows[0], checked.precision
    generator = None
    if precision.is_stochastic and rows.merged is not None:
        seed = [precision.seed, zlib.crc32(checked.copies.get(entry.name, entry.name).encode()), start]
        generator = np.random.Generator(np.random.SFC64(seed))
    merged, dtype = rows.before if rows.merged is None else rows.merged, precision.output(entry)
    if (form := block.form) is not None:
        scales = block.scales
        if scales is None:
            scales = form.new_scales(form.peaks(merged, start))
        else:
            scales = scales[slice(*form.scale_rows(*block.rows))]
        codes = form.encode(merged, scales, start, generator)
        return form.values(codes, scales, start), codes
    stored = output.take("out", merged.shape, FLOAT_DTYPES[dtype])
    if generator is None:
        round_once(merged, dtype, stored)
    else:
        round_stochastically(merged, dtype, generator, stored)
    return stored, stored


def merge_block(
    checked: CheckedMerge, files: Files, block: RowBlock, scratch: Sequence[Scratch], output: Scratch
) -> tuple[Change | None, np.ndarray]:
    """Merge rows and measure the change. Return it (None for a mere cast) and what is written, in `output`'s buffer."""
    rows = merge_rows(checked, files, block, scratch)
    stored, written = round_rows(checked, block, rows, output)
    entry, dtype = block.entry, checked.precision.output(block.entry)
    raw, before, update, merged = rows.raw, rows.before, rows.update, rows.merged
    if update is None or merged is None:
        check_overflow(before, stored, f"{entry.name}: its values do not fit {NAMES[dtype]}; choose another --dtype")
        return None, written
    if dtype != entry.dtype:
        np.copyto(before, round_once(before, dtype))  # a cast is no change
    np.copyto(merged, stored)
    change = measure(before, update, merged, scratch[0].take("moved", raw.shape, np.bool_))
    if not np.isfinite(change.stored + change.lost + change.weight + change.wanted):
        check_update(entry.name, update)
        remedy = "try a smaller alpha or beta, or --dtype float32"
        fault = f"{entry.name}: merged values do not fit {NAMES[dtype]}; {remedy}"
        check_overflow(raw.astype(before.dtype), stored, fault)
        change = measure_carefully(before, update, stored)
    change.add(rows.norms)
    return change, written


# On a GPU, for points of a sweep: the bits that the CPU would store, in a fraction of its time.
#
# Sums, differences and casts of fp32 numbers have one result each, whatever computes them. Only products of factors
# leave a choice: the order of their sums. BLAS libraries take one term after the other, each with a single rounding, at
# the ranks that adapters have. A trial on random factors shows for each shape whether this device does, too; where it
# does not, the CPU makes the product.


class OnDevice:
    """Merges blocks on a device of torch. One object serves all points of a sweep."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._agrees: dict[tuple[int, int, int], bool] = {}

    def open(
        self, entry: TensorEntry, precision: Precision, product: Factors | None, terms: Sequence[Term[Delta]]
    ) -> DeviceTensor | None:
        """Return a merger of one tensor's blocks; None for a tensor that only the CPU merges.

        product: the factors of the whole update, or None where it is the sum of `terms`.
        """
        import torch

        if precision.is_stochastic or precision.work(entry) is not np.float32:
            return None
        if not all(isinstance(term.vector, Difference) for term in terms):
            return None
        factors = None
        if product is not None:
            if not all(factor.flags.c_contiguous for factor in product):
                return None
            factors = [torch.from_numpy(factor).to(self._device) for factor in product]
        stored = getattr(torch, FLOAT_DTYPES[precision.output(entry)].name)
        return DeviceTensor(self, entry, stored, factors, terms)

    def place(self, rows: np.ndarray) -> Any:
        """Return a copy of rows on the device, in fp32."""
        import torch

        return as_tensor(rows).to(self._device, copy=True).to(torch.float32)  # copied: the next rows take its place

    def agrees(self, rows: int, rank: int, columns: int) -> bool:
        """Check by random factors whether products of this shape have the same bits here as on the CPU."""
        import torch

        shape = rows, rank, columns
        if shape not in self._agrees:
            random = np.random.default_rng(0)
            left, right = (random.standard_normal(size, np.float32) for size in ((rows, rank), (rank, columns)))
            ours = torch.from_numpy(left).to(self._device) @ torch.from_numpy(right).to(self._device)
            self._agrees[shape] = np.array_equal(ours.cpu().numpy(), np.matmul(left, right))
            if not self._agrees[shape]:
                logger.info(
                    "products of %d × %d × %d have other bits on %s, so the CPU makes them", *shape, self._device
                )
        return self._agrees[shape]


class DeviceTensor:
    """Merges the blocks of one tensor on a device."""

    def __init__(
        self, device: OnDevice, entry: TensorEntry, stored: Any, factors: Any, terms: Sequence[Term[Delta]]
    ) -> None:
        self._device, self._entry, self._stored = device, entry, stored
        self._factors, self._terms = factors, terms

    def merge(self, files: Files, start: int, stop: int, scratch: Scratch) -> Any:
        """Return rows [start, stop) as `merge_rows` would store them, a tensor; None where the CPU has to do it.

        The same operations in the same order, each of them a kernel of its own: a fused one would round less often.
        """
        if self._factors is not None:
            left, right = self._factors
            if not self._device.agrees(stop - start, *right.shape):
                return None
        merged = self._device.place(read_rows(files, self._entry, start, stop, scratch))
        if self._factors is not None:
            merged = merged + left[start:stop].clone() @ right  # a copy lies aligned as the factors of the trial
        for term in self._terms:
            assert isinstance(term.vector, Difference), "`open` takes no others"
            delta = self._device.place(read_rows(files, term.vector.tuned, start, stop, scratch))
            delta = delta - self._device.place(read_rows(files, term.vector.prior, start, stop, scratch, "raw prior"))
            merged = merged + delta * term.weight
        return merged.to(self._stored)


def as_tensor(values: np.ndarray) -> Any:
    """Return a numpy array as a tensor over the same memory; torch knows bf16 by another type than numpy."""
    import torch

    if values.dtype.name == "bfloat16":
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)
