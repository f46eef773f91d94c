"""Forget and retain vectors: what one tuning run changed, as fp32 (LoRA) or fp64 (checkpoint) deltas by row range.

Both kinds answer the same two questions: which of the target's tensors do you change, and what is your delta for
rows [start, stop) of one of them. Factors and files are kept, never the whole product or difference.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from msa_lite.errors import FormatError, MismatchError, UsageError, join_faults
from msa_lite.io.adapter import ADAPTER_CONFIG, LowRank, load_adapter, load_factor, match_names
from msa_lite.io.checkpoint import Checkpoint, TensorEntry, load_checkpoint, read_rows


class Vector(Protocol):
    """The deltas θ_1 − θ_0 (or θ_2 − θ_0) of one tuning run under the target's tensor names."""

    @property
    def names(self) -> set[str]:
        """Tensors of the target that the vector may change."""

    @property
    def files(self) -> list[Path]:
        """The weight files that it reads."""

    @property
    def is_exact(self) -> bool:
        """True when deltas are differences of stored weights, whose arithmetic is worth doing in fp64."""

    def delta(self, name: str, start: int, stop: int) -> np.ndarray:
        """Δw for rows [start, stop) of the tensor's matrix view."""


class _Files:
    """Open descriptors by path; closed with the object."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def __getitem__(self, path: Path) -> int:
        if path not in self._open:
            self._open[path] = os.open(path, os.O_RDONLY)
        return self._open[path]

    def __del__(self) -> None:
        for handle in self._open.values():
            os.close(handle)


class LoraVector:
    """Low-rank deltas scale · B A from a PEFT adapter (paper §3: the vectors; LoRA is this project's default form).

    Keeps the fp32 factors of one tensor at a time: r · (in + out) numbers.
    """

    is_exact = False

    def __init__(self, factors: Mapping[str, LowRank]) -> None:
        self._factors = dict(factors)
        self._files = _Files()
        self._current = ""
        self._left = self._right = np.empty((0, 0), np.float32)

    @property
    def names(self) -> set[str]:
        return set(self._factors)

    @property
    def files(self) -> list[Path]:
        return sorted({f.a.file for f in self._factors.values()})

    def delta(self, name: str, start: int, stop: int) -> np.ndarray:
        """fp32 (stop − start, columns): rows of scale · B A, or of its transpose for weights stored as (in, out)."""
        if name != self._current:
            factors = self._factors[name]
            a = load_factor(self._files[factors.a.file], factors.a)
            b = load_factor(self._files[factors.b.file], factors.b)
            left, self._right = (a.T, b.T) if factors.transposed else (b, a)
            self._left, self._current = left * np.float32(factors.scale), name
        return self._left[start:stop] @ self._right


class CheckpointVector:
    """Differences θ_1 − θ_0 of two full checkpoints, taken in fp64 so that nothing is rounded before the merge."""

    is_exact = True

    def __init__(self, tuned: Checkpoint, prior: Checkpoint) -> None:
        self._tuned, self._prior = tuned, prior
        self._files = _Files()

    @property
    def names(self) -> set[str]:
        return {name for name, entry in self._tuned.tensors.items() if entry.is_float and name in self._prior.tensors}

    @property
    def files(self) -> list[Path]:
        return [shard.path for shard in (*self._tuned.shards, *self._prior.shards)]

    def delta(self, name: str, start: int, stop: int) -> np.ndarray:
        """fp64 (stop − start, columns): tuned rows minus prior rows. Raises FormatError on NaN or infinities."""
        difference = self._rows(self._tuned.tensors[name], start, stop) - self._rows(
            self._prior.tensors[name], start, stop
        )
        if not np.isfinite(difference).all():
            raise FormatError(f"{self._tuned.tensors[name].file}: '{name}' minus the prior's is not finite")
        return difference

    def _rows(self, entry: TensorEntry, start: int, stop: int) -> np.ndarray:
        return read_rows(self._files[entry.file], entry, start, stop).astype(np.float64)


def compare_checkpoints(one: Checkpoint, other: Checkpoint, names: tuple[str, str]) -> list[str]:
    """Faults that keep two checkpoints from being subtracted: tensors missing on a side, or of another shape.

    names: what the two are called in the messages, as ("target", "prior"). Not a fault: an lm_head that one side
    alone stores where the first ties it to its embedding, so that it is never read, and rotary tables that older
    checkpoints hold although they follow from the config.
    """
    faults = []
    for name in sorted(one.tensors.keys() | other.tensors.keys()):
        a, b = one.tensors.get(name), other.tensors.get(name)
        if a is None or b is None:
            tied = name == "lm_head.weight" and one.config.get("tie_word_embeddings")
            if tied or name.endswith("rotary_emb.inv_freq"):
                continue
            here, there = (names[1], names[0]) if a is None else (names[0], names[1])
            faults.append(f"{name}: in the {here}, not in the {there}")
        elif a.shape != b.shape:
            faults.append(f"{name}: {a.shape} in the {names[0]}, {b.shape} in the {names[1]}")
    return faults


def load_vector(folder: Path, target: Checkpoint, prior: Checkpoint | None) -> Vector:
    """Open a vector folder (PEFT adapter, or a full checkpoint, which needs the prior) and fit it to the target.

    Raises UsageError for a full checkpoint without a prior, MismatchError when names or shapes do not fit.
    """
    if (Path(folder) / ADAPTER_CONFIG).is_file():
        vector = LoraVector(match_names(load_adapter(folder), target.tensors))
        if target.config.get("tie_word_embeddings") and "lm_head.weight" in vector.names:
            raise MismatchError(
                f"{folder}: adapts lm_head, which the target ties to its embedding, so that the merged head would not "
                "be read; train without lm_head in target_modules"
            )
        return vector
    tuned = load_checkpoint(folder)
    if prior is None:
        raise UsageError(f"{folder}: is a full checkpoint, so its prior is needed to take the difference (--prior)")
    faults = compare_checkpoints(target, tuned, ("target", "tuned checkpoint"))
    faults += compare_checkpoints(target, prior, ("target", "prior"))
    faults += [
        f"{entry.name}: stored as {entry.dtype} in {entry.file.name}, which is not a plain float"
        for checkpoint in (tuned, prior)
        for entry in checkpoint.tensors.values()
        if not entry.is_float and entry.name in target.tensors and target.tensors[entry.name].is_float
    ]
    if faults:
        raise MismatchError(join_faults(f"{folder}: target, prior and tuned checkpoint do not fit:", faults))
    return CheckpointVector(tuned, prior)
