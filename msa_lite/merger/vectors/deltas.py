"""Deltas: the change of one tensor by one tuning run, in rows of the target's tensor.

Factors and files are kept, never a whole product or difference. Deltas come in the dtype that the merge computes in,
fp32 or fp64.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol, Self

import numpy as np

from msa_lite.errors import FormatError
from msa_lite.io.weights.blocks import Files, Scratch, read_rows
from msa_lite.io.weights.checkpoint import TensorEntry
from msa_lite.io.weights.factors import LowRank

_TURNED = 1 << 19  # numbers of a delta that are turned at a time


class Delta(Protocol):
    """The change of one tensor, by rows of its matrix view."""

    @property
    def kind(self) -> str:
        """Return what it is, in words, for messages."""

    def load(self, files: Files, dtype: Any) -> Delta:
        """Return the same delta with its factors in memory. Raise FormatError for NaN or infinities there."""

    def rows(self, files: Files, start: int, stop: int, dtype: Any, scratch: Scratch) -> np.ndarray:
        """Return Δw of rows [start, stop), (stop − start, columns) in `dtype`, in a buffer of `scratch`."""


@dataclass(frozen=True)
class Loaded:
    """A product whose factors are in memory."""

    left: np.ndarray
    """(rows, r)."""
    right: np.ndarray
    """(r, columns)."""
    kind: ClassVar[str] = "LoRA factors"

    def load(self, files: Files, dtype: Any) -> Loaded:
        return self

    def rows(self, files: Files, start: int, stop: int, dtype: Any, scratch: Scratch) -> np.ndarray:
        out = scratch.take("delta", (stop - start, self.right.shape[1]), dtype)
        return np.matmul(self.left[start:stop], self.right, out=out)


@dataclass(frozen=True)
class Product:
    """scale · B A of a LoRA adapter (paper §3: the vectors; low rank is this project's default form)."""

    low: LowRank
    """The factors in the adapter's file."""
    count: int | None = None
    """The rows of the target's tensor, where that has more or fewer tokens; further ones are not touched."""
    kind: ClassVar[str] = "of more or fewer tokens than the target"

    def load(self, files: Files, dtype: Any) -> Loaded:
        b, a = self.low.read(files, dtype)
        left, right = (a.T, b.T) if self.low.transposed else (b, a)
        left = left * np.dtype(dtype).type(self.low.scale)
        if self.count is not None:
            left = left[: self.count]
            left = np.pad(left, ((0, self.count - len(left)), (0, 0)))
        return Loaded(left, right)

    def rows(self, files: Files, start: int, stop: int, dtype: Any, scratch: Scratch) -> np.ndarray:
        return self.load(files, dtype).rows(files, start, stop, dtype, scratch)


@dataclass(frozen=True)
class Stacked:
    """scale · B A of each slice of a tensor of three dimensions: of experts that the target stores stacked."""

    slices: tuple[Product | Loaded, ...]
    """The product of each slice, in the order of the slices."""
    height: int
    """The rows of a slice."""
    kind: ClassVar[str] = "LoRA factors of stacked experts"

    def load(self, files: Files, dtype: Any) -> Stacked:
        return replace(self, slices=tuple(part.load(files, dtype) for part in self.slices))

    def rows(self, files: Files, start: int, stop: int, dtype: Any, scratch: Scratch) -> np.ndarray:
        products = []
        for number in range(start // self.height, -(-stop // self.height)):
            first, last = (max(0, min(row - number * self.height, self.height)) for row in (start, stop))
            loaded = self.slices[number].load(files, dtype)
            products.append(loaded.left[first:last] @ loaded.right)
        out = scratch.take("delta", (stop - start, products[0].shape[1]), dtype)
        return np.concatenate(products, out=out)


@dataclass(frozen=True)
class Dora:
    """m (w_0 + B A) / ‖w_0 + B A‖ − w_0, the norm by row: DoRA as PEFT merges it, from the prior's w_0."""

    low: LowRank
    """The factors B and A."""
    magnitude: TensorEntry
    """The magnitudes m, one a row."""
    prior: TensorEntry
    """The prior's weights w_0."""
    product: Loaded | None = None
    """The factors in memory, once they are loaded."""
    kind: ClassVar[str] = "DoRA"

    def load(self, files: Files, dtype: Any) -> Dora:
        return replace(self, product=Product(self.low).load(files, dtype))

    def rows(self, files: Files, start: int, stop: int, dtype: Any, scratch: Scratch) -> np.ndarray:
        before = scratch.prior_rows(files, self.prior, start, stop, dtype)
        moved = (self.product or Product(self.low)).rows(files, start, stop, dtype, scratch)
        moved += before
        magnitude = read_rows(files, self.magnitude, start, stop).astype(dtype)
        with np.errstate(divide="ignore", invalid="ignore"):
            moved *= magnitude / np.linalg.norm(moved, axis=1, keepdims=True)
        moved -= before
        return _finite(moved, self.magnitude)


class _OnDisk:
    """A delta that is read by rows and keeps nothing in memory."""

    def load(self, files: Files, dtype: Any) -> Any:
        return self


@dataclass(frozen=True)
class Difference(_OnDisk):
    """θ_1 − θ_0 of a tensor that is stored whole: of a full checkpoint, a modules_to_save or a bias."""

    tuned: TensorEntry
    """θ_1."""
    prior: TensorEntry
    """θ_0."""
    kind: ClassVar[str] = "a full new value"

    def rows(self, files: Files, start: int, stop: int, dtype: Any, scratch: Scratch) -> np.ndarray:
        raw = read_rows(files, self.tuned, start, stop, scratch)
        out = scratch.take("delta", raw.shape, dtype)
        np.copyto(out, raw)
        return np.subtract(out, scratch.prior_rows(files, self.prior, start, stop, dtype), out=out)


@dataclass(frozen=True)
class Shift(_OnDisk):
    """scale · b of a LoRA layer's own bias (lora_bias)."""

    bias: TensorEntry
    scale: float
    kind: ClassVar[str] = "a bias of LoRA's own"

    def rows(self, files: Files, start: int, stop: int, dtype: Any, scratch: Scratch) -> np.ndarray:
        rows = read_rows(files, self.bias, start, stop).astype(dtype) * np.dtype(dtype).type(self.scale)
        return _finite(rows, self.bias)


@dataclass(frozen=True)
class TokenRows(_OnDisk):
    """New minus old rows of an embedding for some tokens, zero for all others (trainable_token_indices)."""

    tuned: TensorEntry
    """The new rows."""
    tokens: tuple[int, ...]
    """The token of each new row."""
    prior: TensorEntry
    """The prior's embedding."""
    kind: ClassVar[str] = "new token rows"

    @cached_property
    def _numbers(self) -> dict[int, int]:
        return {token: number for number, token in enumerate(self.tokens)}

    def rows(self, files: Files, start: int, stop: int, dtype: Any, scratch: Scratch) -> np.ndarray:
        out = scratch.take("delta", (stop - start, self.prior.matrix_shape[1]), dtype)
        out[:] = 0
        for token in range(start, stop):
            if (number := self._numbers.get(token)) is not None:
                new = read_rows(files, self.tuned, number, number + 1).astype(dtype)
                out[token - start] = (new - read_rows(files, self.prior, token, token + 1).astype(dtype))[0]
        return _finite(out, self.tuned)


@dataclass(frozen=True)
class _Around:
    """A delta that another one is made of."""

    delta: Delta
    """The delta."""

    @property
    def kind(self) -> str:
        return self.delta.kind

    def load(self, files: Files, dtype: Any) -> Self:
        return replace(self, delta=self.delta.load(files, dtype))


@dataclass(frozen=True)
class CommonRows(_Around):
    """A delta of a tensor's first rows, zero for the others: tokens that not all checkpoints have."""

    count: int
    """The number of rows that it changes."""
    columns: int
    """The columns of the tensor."""

    def rows(self, files: Files, start: int, stop: int, dtype: Any, scratch: Scratch) -> np.ndarray:
        out = scratch.take("common", (stop - start, self.columns), dtype)
        known = max(0, min(stop, self.count) - start)
        if known:
            out[:known] = self.delta.rows(files, start, start + known, dtype, scratch)
        out[known:] = 0
        return out


@dataclass(frozen=True)
class TurnedDelta(_Around):
    """A delta of stacked matrices (inputs, outputs), for a target that stores them as (outputs, inputs)."""

    inputs: int
    outputs: int

    def rows(self, files: Files, start: int, stop: int, dtype: Any, scratch: Scratch) -> np.ndarray:
        out = scratch.take("turned", (stop - start, self.inputs), dtype)
        step = max(1, _TURNED // self.outputs)
        for number in range(start // self.outputs, -(-stop // self.outputs)):
            first, last = (max(0, min(row - number * self.outputs, self.outputs)) for row in (start, stop))
            place = slice(first + number * self.outputs - start, last + number * self.outputs - start)
            for at in range(0, self.inputs, step):
                top = min(at + step, self.inputs)
                base = number * self.inputs
                out[place, at:top] = self.delta.rows(files, base + at, base + top, dtype, scratch)[:, first:last].T
        return out


def turned(delta: Delta, shape: tuple[int, ...]) -> Delta:
    """Return a delta of stacked matrices, of this shape (n, inputs, outputs), for matrices (n, outputs, inputs)."""
    _, inputs, outputs = shape
    if isinstance(delta, Stacked) and all(isinstance(part, Product) for part in delta.slices):
        lows = [part.low for part in delta.slices if isinstance(part, Product)]
        return Stacked(tuple(Product(replace(low, transposed=not low.transposed)) for low in lows), outputs)
    return TurnedDelta(delta, inputs, outputs)


def _finite(rows: np.ndarray, entry: TensorEntry) -> np.ndarray:
    if not np.isfinite(rows).all():
        raise FormatError(f"{entry.file}: '{entry.name}' gives a delta that is not finite; train the vector again")
    return rows
