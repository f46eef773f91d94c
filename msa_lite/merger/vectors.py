"""Forget and retain vectors: what one tuning run changed, tensor by tensor, as deltas of rows of the target's tensors.

A vector is a mapping from the target's tensor names to deltas. Factors and files are kept, never a whole product or
difference. Deltas come in the dtype that the merge works in, fp32 or fp64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from msa_lite.errors import FormatError, MismatchError, UsageError, join_faults
from msa_lite.io.adapter import Adapter, LowRank, is_adapter, load_adapter
from msa_lite.io.blocks import Files, Scratch, read_rows, read_whole
from msa_lite.io.checkpoint import FLOAT_DTYPES, Checkpoint, TensorEntry, load_checkpoint
from msa_lite.io.matching import match_names
from msa_lite.io.vocabulary import differ_in_tokens, has_token_role, token_tensors

_BLOCK = 1 << 19  # numbers compared at a time


class Delta(Protocol):
    """The change of one tensor, by rows of its matrix view."""

    def load(self, files: Files, dtype: Any) -> Delta:
        """The same with what all rows need in memory: the factors. Raises FormatError for NaN or infinities there."""

    def rows(self, files: Files, start: int, stop: int, dtype: Any, scratch: Scratch) -> np.ndarray:
        """Δw of rows [start, stop), (stop − start, columns) in `dtype`, in a buffer of `scratch`."""


@dataclass(frozen=True)
class Loaded:
    """A product whose factors are in memory: left (rows, r), right (r, columns)."""

    left: np.ndarray
    right: np.ndarray

    def load(self, files: Files, dtype: Any) -> Loaded:
        return self

    def rows(self, files: Files, start: int, stop: int, dtype: Any, scratch: Scratch) -> np.ndarray:
        out = scratch.take("delta", (stop - start, self.right.shape[1]), dtype)
        return np.matmul(self.left[start:stop], self.right, out=out)


@dataclass(frozen=True)
class Product:
    """scale · B A of a LoRA adapter (paper §3: the vectors; low rank is this project's default form).

    count: rows of the target's tensor where that has more or fewer tokens; further ones are not touched.
    """

    low: LowRank
    count: int | None = None

    def load(self, files: Files, dtype: Any) -> Loaded:
        a, b = read_whole(files, self.low.a, dtype), read_whole(files, self.low.b, dtype)
        left, right = (a.T, b.T) if self.low.transposed else (b, a)
        left = left * np.dtype(dtype).type(self.low.scale)
        if self.count is not None:
            left = left[: self.count]
            left = np.pad(left, ((0, self.count - len(left)), (0, 0)))
        return Loaded(left, right)

    def rows(self, files: Files, start: int, stop: int, dtype: Any, scratch: Scratch) -> np.ndarray:
        return self.load(files, dtype).rows(files, start, stop, dtype, scratch)


@dataclass(frozen=True)
class Dora:
    """m (w_0 + B A) / ‖w_0 + B A‖ − w_0, the norm by row: DoRA as PEFT merges it, seen from the prior's w_0."""

    low: LowRank
    magnitude: TensorEntry
    prior: TensorEntry
    product: Loaded | None = None

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


class _Stored:
    """A delta that is read by rows and keeps nothing in memory."""

    def load(self, files: Files, dtype: Any) -> Any:
        return self


@dataclass(frozen=True)
class Difference(_Stored):
    """θ_1 − θ_0 of a tensor that is stored whole: of a full checkpoint, a modules_to_save or a bias."""

    tuned: TensorEntry
    prior: TensorEntry

    def rows(self, files: Files, start: int, stop: int, dtype: Any, scratch: Scratch) -> np.ndarray:
        raw = read_rows(files, self.tuned, start, stop, scratch)
        out = scratch.take("delta", raw.shape, dtype)
        np.copyto(out, raw)
        return np.subtract(out, scratch.prior_rows(files, self.prior, start, stop, dtype), out=out)


@dataclass(frozen=True)
class Shift(_Stored):
    """scale · b of a LoRA layer's own bias (lora_bias)."""

    bias: TensorEntry
    scale: float

    def rows(self, files: Files, start: int, stop: int, dtype: Any, scratch: Scratch) -> np.ndarray:
        rows = read_rows(files, self.bias, start, stop).astype(dtype) * np.dtype(dtype).type(self.scale)
        return _finite(rows, self.bias)


@dataclass(frozen=True)
class TokenRows(_Stored):
    """New minus old rows of an embedding for some tokens, zero for all others (trainable_token_indices)."""

    tuned: TensorEntry
    tokens: tuple[int, ...]
    prior: TensorEntry

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
class CommonRows:
    """A delta of the first `count` rows of a tensor, zero for those after: tokens that not all checkpoints have."""

    delta: Delta
    count: int
    columns: int

    def load(self, files: Files, dtype: Any) -> CommonRows:
        return replace(self, delta=self.delta.load(files, dtype))

    def rows(self, files: Files, start: int, stop: int, dtype: Any, scratch: Scratch) -> np.ndarray:
        out = scratch.take("common", (stop - start, self.columns), dtype)
        known = max(0, min(stop, self.count) - start)
        if known:
            out[:known] = self.delta.rows(files, start, start + known, dtype, scratch)
        out[known:] = 0
        return out


def _finite(rows: np.ndarray, entry: TensorEntry) -> np.ndarray:
    if not np.isfinite(rows).all():
        raise FormatError(f"{entry.file}: '{entry.name}' gives a delta that is not finite; train the vector again")
    return rows


@dataclass(frozen=True)
class Vector:
    """The deltas θ_1 − θ_0 (or θ_2 − θ_0) of one tuning run under the target's tensor names.

    is_adapter: read from a PEFT folder. needs_prior: its deltas, or copies of the prior beside them, have a
    meaning on top of the prior alone. common: rows that are changed, of tensors of which the target has more.
    """

    folder: Path
    deltas: Mapping[str, Delta]
    is_adapter: bool
    needs_prior: bool
    common: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_cut(self) -> bool:
        """Check whether some of its tensors have other tokens than the target's."""
        return any(isinstance(d, CommonRows) or (isinstance(d, Product) and d.count) for d in self.deltas.values())

    @property
    def files(self) -> set[Path]:
        """The weight files that it reads."""
        return {entry.file for delta in self.deltas.values() for entry in _entries(delta)}

    def check_factors(self) -> None:
        """Read all factors once. Raises FormatError for NaN or infinities, MismatchError when the vector is zero."""
        files = Files()
        some = False
        for delta in self.deltas.values():
            loaded = delta.load(files, np.float32)
            some = some or not isinstance(loaded, Loaded) or bool(loaded.left.any() and loaded.right.any())
        if not some:
            raise MismatchError(f"{self.folder}: the vector is all zeros and changes nothing; fit it again")


def _entries(item: Any) -> Iterator[TensorEntry]:
    for name in (part.name for part in fields(item)):
        value = getattr(item, name)
        if isinstance(value, TensorEntry):
            yield value
        elif is_dataclass(value):
            yield from _entries(value)


def ties_head(checkpoint: Checkpoint) -> bool:
    """Whether embedding and head are one matrix: its config says so, or says nothing and no head is stored."""
    said = checkpoint.config.get("tie_word_embeddings")
    if said is not None:
        return bool(said)
    return not any(name.endswith(("lm_head.weight", "embed_out.weight")) for name in checkpoint.tensors)


def compare_checkpoints(one: Checkpoint, other: Checkpoint, names: tuple[str, str]) -> list[str]:
    """Faults that keep two checkpoints from being subtracted: tensors missing on a side, or of another shape.

    names: what the two are called in the messages, as ("target", "prior"). Not a fault: an lm_head that one side
    alone stores where the first ties it to its embedding, so that it is never read; rotary tables that older
    checkpoints hold although they follow from the config; more or fewer tokens in embedding and head.
    """
    faults = []
    for name in sorted(one.tensors.keys() | other.tensors.keys()):
        a, b = one.tensors.get(name), other.tensors.get(name)
        if a is None or b is None:
            if (name == "lm_head.weight" and ties_head(one)) or name.endswith("rotary_emb.inv_freq"):
                continue
            here, there = (names[1], names[0]) if a is None else (names[0], names[1])
            faults.append(f"{name}: in the {here}, not in the {there}")
        elif a.shape != b.shape and not differ_in_tokens(one, other, name):
            faults.append(f"{name}: {a.shape} in the {names[0]}, {b.shape} in the {names[1]}")
    return faults


def load_vector(folder: Path, target: Checkpoint, prior: Checkpoint | None) -> Vector:
    """Open a vector folder (PEFT adapter, or a full checkpoint, which needs the prior) and fit it to the target.

    Raises UsageError when the prior is needed and not given, MismatchError when names, shapes or tied weights do not
    fit. Only headers are read, and what an adapter says is a copy of the prior's or target's weights.
    """
    if is_adapter(folder):
        matched = match_names(load_adapter(folder), target.tensors, token_tensors(target))
        return _adapter_vector(matched, target, prior)
    return checkpoint_vector(load_checkpoint(folder), target, prior)


def checkpoint_vector(tuned: Checkpoint, target: Checkpoint, prior: Checkpoint | None) -> Vector:
    """The vector of a full checkpoint. Raises as `load_vector`."""
    folder = tuned.folder
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
    both = [n for n, e in tuned.tensors.items() if e.is_float and n in prior.tensors and n in target.tensors]
    deltas: dict[str, Delta] = {name: Difference(tuned.tensors[name], prior.tensors[name]) for name in both}
    rows = {name: [tuned.tensors[name].matrix_shape[0], prior.tensors[name].matrix_shape[0]] for name in both}
    return Vector(folder, deltas, False, True, _cut(deltas, target, rows))


def _cut(deltas: dict[str, Delta], target: Checkpoint, rows: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Restrict deltas, in place, to the rows that the target and all that they are made of have.

    rows: how many each of these has, by tensor. Returns the common rows of tensors of which the target has more.
    """
    common = {}
    for name, counts in rows.items():
        own, columns = target.tensors[name].matrix_shape
        count, delta = min(own, *counts), deltas.get(name)
        if delta is None or all(number == own for number in counts):
            continue
        deltas[name] = replace(delta, count=own) if isinstance(delta, Product) else CommonRows(delta, count, columns)
        if count < own:
            common[name] = count
    return common


def _adapter_vector(adapter: Adapter, target: Checkpoint, prior: Checkpoint | None) -> Vector:
    deltas: dict[str, Delta] = {n: Product(low) for n, low in adapter.modules.items() if low.magnitude is None}
    rows = {name: [low.shape[0]] for name, low in adapter.modules.items()}
    rows |= {name: [entry.matrix_shape[0]] for name, (entry, _) in adapter.shifts.items()}
    deltas |= {name: Shift(entry, scale) for name, (entry, scale) in adapter.shifts.items()}
    dora = {name: low for name, low in adapter.modules.items() if low.magnitude is not None}
    absolute = {
        **dict.fromkeys(dora, "DoRA"),
        **dict.fromkeys(adapter.values, "a full new value"),
        **dict.fromkeys(adapter.tokens, "new token rows"),
    }
    if absolute and prior is None:
        raise UsageError(
            join_faults(
                f"{adapter.folder}: what these tensors changed can only be told from the prior they were tuned from "
                "(--prior):",
                [f"{name}: {kind}" for name, kind in absolute.items()],
            )
        )
    faults = _tied(adapter, target)
    seen: set[str] = set(deltas)
    for name, kind in absolute.items():
        old = prior.tensors.get(name) if prior else None
        by_token = prior is not None and differ_in_tokens(target, prior, name)
        if old is None or not (by_token or old.shape == target.tensors[name].shape) or not old.is_float:
            shape = f"it is {old.dtype} {old.shape} there" if old else "the prior has no such tensor"
            faults.append(f"{name}: {kind}, the target's is {target.tensors[name].shape}, {shape}")
        elif name in seen or sum(name in part for part in (dora, adapter.values, adapter.tokens)) > 1:
            faults.append(f"{name}: changed in two ways at once")
        elif name in adapter.values:
            deltas[name] = Difference(adapter.values[name], old)
            rows[name] = [adapter.values[name].matrix_shape[0], old.matrix_shape[0]]
        elif name in adapter.tokens:
            deltas[name] = TokenRows(*adapter.tokens[name], old)
            if max(adapter.tokens[name][1], default=0) >= old.shape[0]:
                faults.append(f"{name}: new rows of tokens that the prior, with {old.shape[0]}, has not")
        else:
            deltas[name] = Dora(dora[name], dora[name].magnitude, old)  # type: ignore[arg-type]
            rows[name].append(old.matrix_shape[0])
    files = Files()
    on_prior = bool(absolute)
    for name, copy in adapter.copies.items():
        if not target.shards or (prior and not prior.shards):  # headers alone: their weights are not here yet
            on_prior = on_prior or prior is not None
        elif name in target.tensors and _is_copy(files, copy, target.tensors[name]):
            continue
        elif prior and name in prior.tensors and _is_copy(files, copy, prior.tensors[name]):
            on_prior = True
        else:
            hint = "" if prior else "; if it is the prior's, give --prior"
            faults.append(f"{copy.name}: a full copy of neither the target's tensor nor the prior's{hint}")
    if faults:
        raise MismatchError(join_faults(f"{adapter.folder}: cannot be merged into this target:", faults))
    return Vector(adapter.folder, deltas, True, on_prior, _cut(deltas, target, rows))


def _tied(adapter: Adapter, target: Checkpoint) -> list[str]:
    """Changes of a matrix that the target uses twice, as embedding and as head, which have no single right meaning.

    PEFT trains one of the two uses and merges into both. Token rows are no such case: PEFT ties them.
    """
    if not ties_head(target):
        return []
    configs = (target.config, target.config.get("text_config") or {})
    sizes = {config["vocab_size"] for config in configs if "vocab_size" in config}
    shapes = {name: target.tensors[name].shape for name in {**adapter.modules, **adapter.values}}
    return [
        f"{name}: the target ties embedding and head, but only one of the two was tuned"
        for name, shape in shapes.items()
        if name.endswith("lm_head.weight") or (has_token_role(name) and len(shape) == 2 and shape[0] in sizes)
    ]


def _is_copy(files: Files, one: TensorEntry, other: TensorEntry) -> bool:
    """Whether `one` holds the values of `other`, as far as its dtype can, read in blocks."""
    if one.shape != other.shape or not other.is_float:
        return False
    if not one.nbytes:
        return True
    rows, columns = one.matrix_shape
    step = max(1, _BLOCK // max(1, columns))
    scratch = Scratch()
    return all(
        np.array_equal(
            read_rows(files, one, start, min(start + step, rows), scratch, "one"),
            read_rows(files, other, start, min(start + step, rows), scratch, "other").astype(FLOAT_DTYPES[one.dtype]),
        )
        for start in range(0, rows, step)
    )
