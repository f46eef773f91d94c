"""Low-rank factors of an adapter: of one weight, or of all experts of a layer side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from msa_lite.io.weights.blocks import Files, read_whole
from msa_lite.io.weights.checkpoint import TensorEntry


@dataclass(frozen=True)
class BareParameter:
    """A bare parameter of a module that PEFT adapts (target_parameters)."""

    name: str
    """Its name in the module: "gate_up_proj"."""
    place: int
    """Its place among the module's parameters. PEFT wraps the module once for each, in this order."""


@dataclass(frozen=True)
class ExpertShare:
    """One expert's share of the factors that PEFT keeps side by side for a layer's experts."""

    expert: int
    """The expert's number. Its r rows of A lie together; its columns of B are every `count`-th."""
    count: int
    """The number of experts."""
    outputs: tuple[int, int]
    """The first output that the tensor holds, and the one after the last: a gate or an up of both, or all."""


@dataclass(frozen=True)
class LowRank:
    """Factors of one tensor's delta, Δw = scale · B A. With a magnitude m it is DoRA's.

    DoRA's delta is m (w_0 + Δw) / ‖w_0 + Δw‖ by row, minus w_0.
    """

    module: str
    """The module's name as PEFT has it."""
    a: TensorEntry
    """A (r, in) in the adapter file."""
    b: TensorEntry
    """B (out, r) in the adapter file."""
    scale: float
    """lora_alpha / r, or lora_alpha / √r for rsLoRA."""
    transposed: bool
    """True where the target stores the weight as (in, out)."""
    is_embedding: bool = False
    magnitude: TensorEntry | None = None
    """DoRA's m (out,)."""
    parameter: BareParameter | None = None
    """Set where the weight is no module's own `weight`."""
    share: ExpertShare | None = None
    """Set where A (count · r, in) and B (out, r · count) are those of several experts."""

    @property
    def rank(self) -> int:
        """Return the rank r of the factors."""
        return self.a.shape[0] // (self.share.count if self.share else 1)

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the delta as the target stores the weight."""
        start, stop = self.share.outputs if self.share else (0, self.b.shape[0])
        out, into = stop - start, self.a.shape[1]
        return (into, out) if self.transposed else (out, into)

    @property
    def held_bytes(self) -> int:
        """Return the bytes of B that stay in memory while the experts' shares of it are taken, one after the other."""
        return self.b.nbytes if self.share else 0

    def read(self, files: Files, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return B (out, r) and A (r, in), not scaled. Raise FormatError for NaN or infinities."""
        if (share := self.share) is None:
            return read_whole(files, self.b, dtype), read_whole(files, self.a, dtype)
        size = self.a.nbytes // share.count
        start = self.a.start + share.expert * size
        own = replace(self.a, shape=(self.rank, self.a.shape[1]), start=start, nbytes=size)
        of_expert = files.by_column(self.b, share.count)[share.expert, slice(*share.outputs)]
        return of_expert.astype(dtype), read_whole(files, own, dtype)
