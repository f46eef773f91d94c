"""Merge one block of a tensor's rows: read, add, round once or encode, and measure what became of the update."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from msa_lite.io.weights.blocks import Files, Scratch, read_rows
from msa_lite.io.weights.checkpoint import FLOAT_DTYPES, TensorEntry
from msa_lite.io.weights.quantised_forms import Scaled
from msa_lite.io.weights.writer import round_once, round_stochastically
from msa_lite.merger.checks.checked import CheckedMerge
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
from msa_lite.merger.vectors.deltas import Delta


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
        seed = [precision.seed, zlib.crc32(entry.name.encode()), start]
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
