"""Read and write rows of quantised weights: codes of 4 or 8 bits with scales (fp8, mxfp4, nvfp4, NF4, int8).

Weights are seen as they are stored: a matrix (rows, columns) in C order, those of stacked experts one below the other.
Values are fp32. Sources: OCP Microscaling Formats 1.0 (E2M1, E8M0), Micikevicius et al. 2022 (FP8), Dettmers et al.
2023 (NF4), and how bitsandbytes, compressed-tensors, ModelOpt and transformers lay them out in files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import ml_dtypes
import numpy as np

from msa_lite.io.weights.checkpoint import FLOAT_DTYPES, TensorEntry

Read = Callable[[TensorEntry, int, int], np.ndarray]
"""Takes a tensor, its first byte and a number of bytes; returns them as an array of uint8."""

_CODES = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # the magnitudes of fp4
_CHUNK = 1 << 16  # weights coded at a time: what they take stays in the cache of a core
_SPAN = 256  # rows that may have a scale in common and still be coded in one block


class CodeForm(Protocol):
    """A form of codes and scales."""

    @property
    def label(self) -> str:
        """Return its name, for messages: "fp8"."""

    @property
    def step(self) -> int:
        """Return the rows that have to be read together; blocks are multiples of it."""

    def rows(self, read: Read, start: int, stop: int) -> np.ndarray:
        """Return rows [start, stop) of the weights, (stop − start, columns) in fp32."""


@dataclass(frozen=True)
class Scaled:
    """Floats of 8 or 4 bits with a scale for each block of `height` rows and `width` columns: value = code · scale.

    A merge can store into this form: each block gets the scale that makes its largest weight the largest code.
    """

    codes: TensorEntry
    """F8_E4M3 or F8_E5M2, (…, rows, columns); or two codes of E2M1 a byte, the low four bits first."""
    scales: TensorEntry
    """One a block: floats, or bytes that are the exponents of E8M0."""
    shape: tuple[int, ...]
    """Of the weights: (rows, columns), or of experts (n, rows, columns)."""
    height: int
    """The rows of a block."""
    width: int
    """The columns of a block."""
    is_power: bool = False
    """True where scales are powers of two (also those that are stored as floats)."""
    outer: float = 1.0
    """A scale of the whole tensor, with which all others are multiplied; a merge leaves it as it is."""

    @property
    def label(self) -> str:
        if self.is_fp4:
            return "mxfp4" if self.is_power else "nvfp4"
        return "mxfp8" if self.is_power and self.height == 1 else "fp8"

    @property
    def is_fp4(self) -> bool:
        return self.codes.dtype not in _CODES

    @property
    def columns(self) -> int:
        return self.shape[-1]

    @property
    def per_matrix(self) -> int:
        """Return the rows of scales of one matrix."""
        return -(-self.shape[-2] // self.height)

    @property
    def across(self) -> int:
        """Return the scales of a row."""
        return -(-self.columns // self.width)

    @property
    def is_wide(self) -> bool:
        """Check whether blocks have too many rows to be coded at a time: their largest weights are looked up first."""
        return self.height > _SPAN

    @property
    def step(self) -> int:
        if self.is_wide:
            return 1
        whole = len(self.shape) < 3 or self.shape[-2] % self.height == 0
        return self.height if whole else self.shape[-2]

    @property
    def largest(self) -> float:
        """Return the largest code's value."""
        return 6.0 if self.is_fp4 else float(ml_dtypes.finfo(_CODES[self.codes.dtype]).max)

    def scale_rows(self, start: int, stop: int) -> tuple[int, int]:
        """Return the rows of scales [first, last) that belong to rows of the weights."""
        high = self.shape[-2]
        first, last = ((row // high) * self.per_matrix + row % high // self.height for row in (start, stop - 1))
        return first, last + 1

    def read_scales(self, read: Read, first: int, last: int) -> np.ndarray:
        """Return rows of scales as they are stored, (last − first, across)."""
        kind = _scale_dtype(self.scales)
        line = self.across * kind.itemsize
        return read(self.scales, first * line, (last - first) * line).view(kind).reshape(-1, self.across)

    def read_codes(self, read: Read, start: int, stop: int) -> np.ndarray:
        """Return the codes of rows, (stop − start, bytes of a row)."""
        line = self.columns // 2 if self.is_fp4 else self.columns
        return read(self.codes, start * line, (stop - start) * line).reshape(-1, line)

    def rows(self, read: Read, start: int, stop: int) -> np.ndarray:
        scales = self.read_scales(read, *self.scale_rows(start, stop))
        return self.values(self.read_codes(read, start, stop), scales, start)

    def values(self, codes: np.ndarray, scales: np.ndarray, start: int) -> np.ndarray:
        """Return the weights that codes and stored scales stand for; start: the number of the first row."""
        out = np.empty((len(codes), self.columns), np.float32)
        table = _pairs() if self.is_fp4 else _table(self.codes.dtype)
        for some, factors in self._chunks(len(codes), self._factors(scales), start):
            values = table.take(codes[some], axis=0).reshape(len(factors), self.columns)
            np.multiply(values, self._spread(factors), out=out[some])
        return out

    def peaks(self, rows: np.ndarray, start: int) -> np.ndarray:
        """Return the largest magnitude of each block, (rows of scales, across); start: the number of the first row."""
        first, last = self.scale_rows(start, start + len(rows))
        high, begins = self.shape[-2], []
        for number in range(first, last):
            matrix, row = divmod(number, self.per_matrix)
            begins.append(max(0, matrix * high + row * self.height - start))
        over = np.abs(rows)
        if self.height > 1:
            over = np.maximum.reduceat(over, begins, axis=0)
        if self.columns % self.width == 0:
            return over.reshape(len(over), self.across, self.width).max(2)
        return np.maximum.reduceat(over, range(0, self.columns, self.width), axis=1)

    def new_scales(self, peaks: np.ndarray) -> np.ndarray:
        """Return the scales, as they are stored, with which blocks of these largest magnitudes fit the codes."""
        kind = _scale_dtype(self.scales)
        wanted = peaks.astype(np.float64) / (self.largest * self.outer)
        if self.is_power:
            fraction, exponent = np.frexp(wanted)
            exponent -= fraction == 0.5  # a power of two itself
            exponent = np.where(peaks > 0, exponent, 0).clip(-126, 127)
            return (exponent + 127).astype(np.uint8) if kind == np.uint8 else np.ldexp(1.0, exponent).astype(kind)
        wanted = np.where(peaks > 0, wanted, 1.0)
        if kind == _CODES["F8_E4M3"]:
            wanted = wanted.clip(2.0**-9, 448.0)  # all that E4M3 holds; beyond, weights are cut
        return wanted.astype(np.float32).astype(kind)

    def encode(
        self, rows: np.ndarray, scales: np.ndarray, start: int, generator: np.random.Generator | None = None
    ) -> np.ndarray:
        """Return the codes of rows, (n, bytes of a row), for stored scales; start: the number of the first row.

        Each weight goes to the nearest code, ties to even; with a generator to one of its two neighbours by chance, so
        that the mean is the weight. What is beyond the largest code becomes that code.
        """
        line = self.columns // 2 if self.is_fp4 else self.columns
        codes = np.empty((len(rows), line), np.uint8)
        for some, factors in self._chunks(len(rows), self._factors(scales), start):
            scaled = rows[some] / self._spread(factors)
            codes[some] = _encode(scaled, self.codes.dtype if not self.is_fp4 else "F4", self.largest, generator)
        return codes

    def _factors(self, scales: np.ndarray) -> np.ndarray:
        """Return stored scales as fp32 factors, the outer scale in them."""
        if scales.dtype == np.uint8:
            return np.ldexp(np.float32(self.outer), scales.astype(np.int32) - 127).astype(np.float32)
        return scales.astype(np.float32) * np.float32(self.outer)

    def _chunks(self, count: int, factors: np.ndarray, start: int) -> list[tuple[slice, np.ndarray]]:
        """Return slices of `count` rows, each with the factors of its rows, (rows, across)."""
        step, high = max(1, _CHUNK // self.columns), self.shape[-2]
        numbers = np.arange(start, start + count)
        lines = numbers // high * self.per_matrix + numbers % high // self.height
        lines -= lines[0] if count else 0
        return [(slice(at, at + step), factors[lines[at : at + step]]) for at in range(0, count, step)]

    def _spread(self, factors: np.ndarray) -> np.ndarray:
        """Return the factor of each weight, by the factors of its blocks."""
        if self.across == 1:
            return factors
        return np.repeat(factors, self.width, axis=1)[:, : self.columns]


def _encode(scaled: np.ndarray, kind: str, largest: float, generator: np.random.Generator | None) -> np.ndarray:
    """Return the codes of weights that their scales have divided, (rows, bytes)."""
    is_fp4 = kind == "F4"
    sizes = np.minimum(np.abs(scaled), np.float32(largest))
    if is_fp4:
        codes = np.zeros(sizes.shape, np.uint8)
        for number, middle in enumerate((_E2M1[1:] + _E2M1[:-1]) / 2):
            codes += sizes > middle if number % 2 == 0 else sizes >= middle  # ties go to the even code
        grid = _E2M1
    else:
        codes = sizes.astype(_CODES[kind]).view(np.uint8)
        grid = _table(kind)
    if generator is not None:
        near = grid.take(codes)
        lower = codes - (near > sizes)
        below, above = grid.take(lower), grid.take(np.minimum(lower + 1, np.uint8(len(grid) - 1 if is_fp4 else 127)))
        is_between = (sizes > below) & np.isfinite(above)
        with np.errstate(invalid="ignore", divide="ignore"):
            share = (sizes - below) / (above - below)
        codes = lower + (is_between & (generator.random(sizes.shape, np.float32) < share)).astype(np.uint8)
    codes |= np.signbit(scaled).astype(np.uint8) << (3 if is_fp4 else 7)
    return codes[:, 0::2] | codes[:, 1::2] << 4 if is_fp4 else codes


@dataclass(frozen=True)
class BitsAndBytes4:
    """NF4 or FP4 of bitsandbytes: a scale for each `block` of weights in C order, which may be stored in 8 bits."""

    codes: TensorEntry
    """Two codes a byte, the high four bits first."""
    table: TensorEntry
    """The value of each of the 16 codes, fp32."""
    scales: TensorEntry
    """absmax: fp32, or bytes that are codes of `nested`."""
    shape: tuple[int, int]
    """Of the weights."""
    block: int
    """Weights of a scale."""
    kind: str
    """nf4 or fp4."""
    nested: tuple[TensorEntry, TensorEntry, int, float] | None = None
    """Where scales are bytes: the values of their codes, the scales of the scales, how many have one, the offset."""

    step = 1

    @property
    def label(self) -> str:
        return f"bitsandbytes {self.kind.upper()}"

    def rows(self, read: Read, start: int, stop: int) -> np.ndarray:
        first, last = start * self.shape[1], stop * self.shape[1]
        begin, end = first // 2, -(-last // 2)
        packed = read(self.codes, begin, end - begin)
        table = read(self.table, 0, self.table.nbytes).view(np.float32)
        codes = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)[first - 2 * begin :][: last - first]
        low, high = first // self.block, -(-last // self.block)
        scales = np.repeat(self._scales(read, low, high), self.block)[first - low * self.block :][: last - first]
        return (table.take(codes) * scales).reshape(stop - start, self.shape[1])

    def _scales(self, read: Read, first: int, last: int) -> np.ndarray:
        """Return the scales of blocks [first, last) in fp32."""
        size = FLOAT_DTYPES[self.scales.dtype].itemsize if self.scales.is_float else 1
        stored = read(self.scales, first * size, (last - first) * size)
        if self.nested is None:
            return stored.view(FLOAT_DTYPES[self.scales.dtype]).astype(np.float32)
        table, outer, block, offset = self.nested
        values = read(table, 0, table.nbytes).view(np.float32).take(stored)
        low, high = first // block, -(-last // block)
        factors = np.repeat(read(outer, 4 * low, 4 * (high - low)).view(np.float32), block)
        return values * factors[first - low * block :][: last - first] + np.float32(offset)


@dataclass(frozen=True)
class BitsAndBytes8:
    """LLM.int8 of bitsandbytes: value = code · scale of its row / 127."""

    codes: TensorEntry
    """I8, (rows, columns)."""
    scales: TensorEntry
    """SCB: fp32, one a row."""

    step = 1
    label = "bitsandbytes int8"

    def rows(self, read: Read, start: int, stop: int) -> np.ndarray:
        count, columns = stop - start, self.codes.shape[1]
        codes = read(self.codes, start * columns, count * columns).view(np.int8).reshape(count, columns)
        scales = read(self.scales, 4 * start, 4 * count).view(np.float32)
        return codes * (scales / np.float32(127))[:, None]


@dataclass(frozen=True)
class Turned:
    """Another form whose matrices are read as (columns, rows): gpt-oss stores its experts the other way round."""

    form: Scaled

    @property
    def label(self) -> str:
        return self.form.label

    @property
    def step(self) -> int:
        # A stored matrix is read whole for each block, so blocks are large.
        return min(self.form.columns, 512)

    def rows(self, read: Read, start: int, stop: int) -> np.ndarray:
        _, high, wide = self.form.shape
        parts = []
        for matrix in range(start // wide, -(-stop // wide)):
            first, last = max(start, matrix * wide) - matrix * wide, min(stop, (matrix + 1) * wide) - matrix * wide
            low, top = first // self.form.width, -(-last // self.form.width)
            piece = self._strip(read, matrix * high, high, low, top)
            parts.append(piece[:, first - low * self.form.width : last - low * self.form.width].T)
        return np.ascontiguousarray(np.concatenate(parts))

    def _strip(self, read: Read, start: int, count: int, low: int, top: int) -> np.ndarray:
        """Return the weights of blocks [low, top) of `count` stored rows."""
        form, half = self.form, self.form.width // 2
        codes = form.read_codes(read, start, start + count)[:, low * half : top * half]
        scales = form.read_scales(read, start, start + count)[:, low:top]
        values = _pairs().take(codes, axis=0).reshape(count, top - low, form.width)
        values *= form._factors(scales)[:, :, None]
        return values.reshape(count, -1)


def _scale_dtype(entry: TensorEntry) -> np.dtype[np.generic]:
    """Return numpy's dtype of stored scales; uint8 where they are exponents."""
    if entry.dtype in ("U8", "F8_E8M0"):
        return np.dtype(np.uint8)
    return np.dtype(_CODES[entry.dtype]) if entry.dtype in _CODES else FLOAT_DTYPES[entry.dtype]


@cache
def _table(kind: str) -> np.ndarray:
    """Return the values of all 256 codes of an 8-bit float."""
    return np.arange(256, dtype=np.uint8).view(_CODES[kind]).astype(np.float32)


@cache
def _pairs() -> np.ndarray:
    """Return the two values that each byte of fp4 codes stands for, (256, 2)."""
    values, codes = np.concatenate([_E2M1, -_E2M1]), np.arange(256)
    return np.stack([values[codes & 15], values[codes >> 4]], axis=1)


@dataclass(frozen=True, slots=True)
class Packed(TensorEntry):
    """A weight that is stored as codes, as it is read: dtype F32, `nbytes` of the fp32 weights, no `start` to use."""

    form: CodeForm
