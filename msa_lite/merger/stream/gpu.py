"""Merge blocks on a GPU, for points of a sweep: the bits that the CPU would store, in a fraction of its time.

Sums, differences and casts of fp32 numbers have one result each, whatever computes them. Only products of factors leave
a choice: the order of their sums. BLAS libraries take one term after the other, each with a single rounding, at the
ranks that adapters have. A trial on random factors shows for each shape whether this device does, too; where it does
not, the CPU makes the product.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from msa_lite.io.weights.blocks import Files, Scratch, read_rows
from msa_lite.io.weights.checkpoint import FLOAT_DTYPES, TensorEntry
from msa_lite.merger.checks.checked import Precision
from msa_lite.merger.formula import Factors, Term
from msa_lite.merger.vectors.deltas import Delta, Difference

logger = logging.getLogger(__name__)


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
