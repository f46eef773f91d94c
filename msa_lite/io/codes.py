"""Round weights to 4 or 8 bits as quantisation does: a code for each weight, and one scale for each group of them.

The scale of a group is its largest magnitude (absmax). Three forms (`QUANTISATIONS`):

- nf4: the 16 values of NormalFloat-4 (QLoRA, arXiv 2305.14314), groups of 64 weights in the order in which the tensor
  is stored, so that a group may begin in one row and end in the next; as bitsandbytes does it, without its second
  quantisation of the scales. A model that transformers loads with `load_in_4bit` and `nf4` has these weights.
- int4: the whole numbers −7 … 7, groups of 128 weights of a row, the last of a row maybe shorter: plain absmax.
- int8: the whole numbers −127 … 127, a row is a group; as bitsandbytes stores weights for LLM.int8()
  (arXiv 2208.07339), except that those are rounded to fp16 first, where they are not yet.

Codes are those of bitsandbytes, but for weights that lie between two codes within the rounding of one product in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

_NF4 = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
_MIDPOINTS = (_NF4[1:] + _NF4[:-1]) / 2
_CHUNK = 1 << 16  # weights encoded at a time: what they take stays in the cache of a core
_MAGNITUDE = np.uint32(0x7FFFFFFF)  # of the bits of an fp32 number: all but the sign
_LEAST = np.float32(1e-38)  # a group of zeros has this scale, so that its codes are those of 0


class Recoded(NamedTuple):
    """Sums over weights before and after an update."""

    changed: int = 0
    """The weights whose code differs."""
    weights: int = 0
    """All weights."""
    along: float = 0.0
    """⟨Q(after) − Q(before), after − before⟩, Q the rounded weights."""
    update: float = 0.0
    """‖after − before‖²."""

    def plus(self, other: Sequence[float]) -> Recoded:
        """Return the sums of both parts."""
        return Recoded(*(one + two for one, two in zip(self, other, strict=True)))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Quantisation:
    """A form of quantisation: how weights are grouped, and how many codes there are."""

    name: str
    """Its key in `QUANTISATIONS`."""
    label: str
    """Its name in tables."""
    width: int
    """Weights of a group; 0: a row is one."""
    top: int = 0
    """The largest code of whole numbers; 0 for nf4, whose codes are places in a table of values."""
    crosses_rows: bool = False
    """True where groups run on from one row to the next."""

    def groups(self, rows: np.ndarray) -> list[np.ndarray]:
        """Return the groups of whole rows, views of (n, weights of a group); the shorter last ones come second.

        rows: (rows, columns), contiguous; where groups cross rows, it begins with a group.
        """
        if not self.width:
            return [rows]
        if self.crosses_rows:
            rows = rows.reshape(1, -1)
        whole = rows.shape[1] // self.width * self.width
        parts = [rows[:, :whole].reshape(-1, self.width), rows[:, whole:]]
        return [part for part in parts if part.size]

    def encode(self, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the codes of groups (n, width) of fp32 weights, as 8-bit numbers, and the scales (n, 1)."""
        codes = np.empty(groups.shape, np.int8 if self.top else np.uint8)
        scales = np.empty((len(groups), 1), np.float32)
        step = max(1, _CHUNK // max(1, groups.shape[1]))
        for at in range(0, len(groups), step):
            part = slice(at, at + step)
            self._encode(groups[part], codes[part], scales[part])
        return codes, scales

    def _encode(self, groups: np.ndarray, codes: np.ndarray, scales: np.ndarray) -> None:
        magnitudes = np.bitwise_and(groups.view(np.uint32), _MAGNITUDE)  # twice as quick as their maximum as floats
        np.copyto(scales, magnitudes.max(1, keepdims=True).view(np.float32))
        with np.errstate(invalid="ignore", over="ignore"):  # weights that are not finite have no code
            scaled = groups * (1 / np.maximum(scales, _LEAST) * np.float32(self.top or 1))
            if self.top:
                np.copyto(codes, np.rint(scaled, out=scaled), casting="unsafe")
                return
        # The code is the number of midpoints below the weight. Fifteen comparisons take a tenth of a binary search.
        above = np.empty(codes.shape, np.bool_)
        np.greater(scaled, _MIDPOINTS[0], out=codes.view(np.bool_))
        for midpoint in _MIDPOINTS[1:]:
            np.greater(scaled, midpoint, out=above)
            np.add(codes, above.view(np.uint8), out=codes)

    def decode(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Return the fp32 weights that codes of groups stand for."""
        values = codes * np.float32(1 / self.top) if self.top else _NF4.take(codes)
        return np.multiply(values, scales, dtype=np.float32)

    def round(self, rows: np.ndarray) -> np.ndarray:
        """Return a whole matrix of fp32 weights, rounded."""
        rounded = np.ascontiguousarray(rows)
        parts = [self.decode(*self.encode(group)) for group in self.groups(rounded)]
        if self.crosses_rows or not self.width:
            return np.concatenate([part.reshape(-1) for part in parts]).reshape(rows.shape)
        return np.concatenate([part.reshape(len(rows), -1) for part in parts], axis=1)

    def compare(self, before: np.ndarray, after: np.ndarray) -> Recoded:
        """Return what rounding leaves of the change of some groups: the same ones of two models, (n, width) in fp32."""
        codes, scales = self.encode(np.concatenate([before, after]))
        changed = int(np.count_nonzero(codes[: len(before)] != codes[len(before) :]))
        values = self.decode(codes, scales)
        update, left = (after - before).reshape(-1), (values[len(before) :] - values[: len(before)]).reshape(-1)
        along, square = float(np.dot(left, update)), float(np.dot(update, update))
        is_whole = np.isfinite(along + square)  # weights that are not finite have no codes
        return Recoded(changed, before.size, *((along, square) if is_whole else (0.0, 0.0)))


QUANTISATIONS = {
    form.name: form
    for form in (
        Quantisation("nf4", "NF4", 64, crosses_rows=True),
        Quantisation("int4", "int4", 128, top=7),
        Quantisation("int8", "int8", 0, top=127),
    )
}
