"""Forget and retain vectors: the deltas of one tuning run, by the target's tensor names."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from msa_lite.errors import FormatError, MismatchError, UsageError, join_faults
from msa_lite.io.weights.adapter import ZERO_3, Adapter, is_adapter, load_adapter
from msa_lite.io.weights.blocks import Files, holds_rows
from msa_lite.io.weights.checkpoint import Checkpoint, TensorEntry, load_checkpoint
from msa_lite.io.weights.matching import aligned, is_buffer, predicts_ahead
from msa_lite.io.weights.quantised import dequantised, describe_forms
from msa_lite.io.weights.tied_head import (
    as_used,
    check_head,
    fold_head,
    stores_alike,
    tie_fault,
    ties_head,
    token_names,
    with_head_rows,
)
from msa_lite.io.weights.vocabulary import differ_in_tokens, has_token_role, token_tensors
from msa_lite.merger.vectors.adapter_names import match_adapter
from msa_lite.merger.vectors.deltas import (
    CommonRows,
    Delta,
    Difference,
    Dora,
    Loaded,
    Product,
    Shift,
    Stacked,
    TokenRows,
)

_HEADS = {"lm_head.weight", "embed_out.weight"}


@dataclass(frozen=True)
class Vector:
    """The deltas of one tuning run, such as θ_1 − θ_0."""

    folder: Path
    """The adapter or checkpoint."""
    deltas: Mapping[str, Delta]
    """The deltas by the target's tensor names."""
    is_adapter: bool
    """True where the folder holds a PEFT adapter."""
    needs_prior: bool
    """True where the deltas are only right with the prior, or copies of its tensors came with them."""
    common: Mapping[str, int] = field(default_factory=dict)
    """The number of rows that change, by tensors of which the target has more."""
    lacking: tuple[str, ...] = ()
    """Weights of the target that the tuned checkpoint or the prior lacks; they stay as they are."""
    form: str = ""
    """The form of codes that the tuned checkpoint is stored in; empty for plain floats."""
    stores_alike: bool = True
    """False where target, prior and tuned checkpoint do not all store both of embedding and head, or the same one."""

    @property
    def is_cut(self) -> bool:
        """Check whether some of its tensors have more or fewer tokens than the target's."""
        return any(isinstance(d, CommonRows) or (isinstance(d, Product) and d.count) for d in self.deltas.values())

    def check_factors(self) -> None:
        """Read all factors once. Raise FormatError for NaN or infinities, MismatchError when the vector is zero."""
        files = Files()
        is_some = False
        for delta in self.deltas.values():
            loaded = delta.load(files, np.float32)
            products = loaded.slices if isinstance(loaded, Stacked) else (loaded,)
            is_some = is_some or any(not isinstance(p, Loaded) or (p.left.any() and p.right.any()) for p in products)
        if not is_some:
            raise MismatchError(f"{self.folder}: the vector is all zeros and changes nothing; fit it again")


def compare_checkpoints(
    first: Checkpoint, second: Checkpoint, names: tuple[str, str], alone: Container[str] | None = None
) -> list[str]:
    """Return why two checkpoints cannot be subtracted: tensors that one of them lacks, or of another shape.

    names: the two names in messages, as ("target", "prior"). alone: tensors of the first that the second may lack, by
    default the modules that it knows nothing of (`own_modules`). No faults are: other names of the same tensors, masks,
    position tables and tensors of multi-token prediction, none of which transformers needs; an embedding or a head that
    only one of them stores, where the other ties the two; more or fewer tokens in embedding and head.
    """
    second = as_used(aligned(second, first), first)
    alone = own_modules(first, [second]) if alone is None else alone
    faults = []
    for name in sorted(first.tensors.keys() | second.tensors.keys()):
        a, b = first.tensors.get(name), second.tensors.get(name)
        if a is None or b is None:
            if (a is None and name in _HEADS and ties_head(first)) or is_buffer((a or b), name) or name in alone:  # type: ignore[arg-type]
                continue
            if predicts_ahead(first if b is None else second, name):
                continue
            here, there = (names[1], names[0]) if a is None else (names[0], names[1])
            faults.append(f"{name}: in the {here}, not in the {there}")
        elif a.shape != b.shape and not (differ_in_tokens(first, second, name) or is_buffer(a, name)):
            faults.append(f"{name}: {a.shape} in the {names[0]}, {b.shape} in the {names[1]}")
    return faults


def own_modules(target: Checkpoint, others: Sequence[Checkpoint]) -> set[str]:
    """Return the target's tensors in modules of which no other checkpoint has anything: a vision tower, a second head.

    A further layer of a list that another has, or a further tensor in a module of another, is none: there the models
    differ. Nor is an embedding or a head, nor anything of an embedding's shape: it may be a head.
    """
    known = {block for other in others for name in other.tensors for block in _blocks(name)}
    heads = {entry.shape for entry in token_tensors(target).values() if len(entry.shape) == 2}
    own = {name for name, entry in target.tensors.items() if not (has_token_role(name) or entry.shape in heads)}
    return {name for name in own if not known & {*_blocks(name)}}


def _blocks(name: str) -> list[str]:
    """Return the list of layers that a tensor is in, and its module: "layers.#", "layers.#.mlp"."""
    parts = ["#" if part.isdecimal() else part for part in name.split(".")]
    module = ".".join(parts[:-1]) or name
    return [module] if "#" not in parts else [".".join(parts[: parts.index("#") + 1]), module]


def load_vector(source: Path | Checkpoint, target: Checkpoint, prior: Checkpoint | None) -> Vector:
    """Open a vector (the folder of a PEFT adapter, or a full checkpoint, which needs the prior), fitted to the target.

    Raise UsageError when the prior is needed and missing, MismatchError when names, shapes or tied weights do not
    fit. Only headers are read, and tensors of an adapter that should be copies of the prior's or target's.
    """
    prior = prior and aligned(prior, target)
    if isinstance(source, Checkpoint) or not is_adapter(source):
        tuned = dequantised(source if isinstance(source, Checkpoint) else load_checkpoint(source))
        return _checkpoint_vector(tuned, target, prior)
    return adapter_vector(load_adapter(source), target, prior)


def _checkpoint_vector(tuned: Checkpoint, target: Checkpoint, prior: Checkpoint | None) -> Vector:
    folder = tuned.folder
    if prior is None:
        raise UsageError(f"{folder}: this is a full checkpoint; name the model that it was tuned from (--prior)")
    check_head(tuned)
    tuned, is_alike = aligned(tuned, target), all(stores_alike(target, model) for model in (tuned, prior))
    tied = (tie_fault(target, model, what) for model, what in ((tuned, "tuned checkpoint"), (prior, "prior")))
    faults = [fault for fault in tied if fault]
    tuned, prior = as_used(tuned, target), as_used(prior, target)
    full = {name for name, entry in target.tensors.items() if entry.nbytes}
    if empty := [name for name, entry in tuned.tensors.items() if name in full and not entry.nbytes]:
        raise FormatError(join_faults(f"{folder}: {len(empty)} of its tensors are empty. {ZERO_3}:", empty))
    # A tune of a vision-language model's text is saved without the rest, which its prior has.
    alone = own_modules(target, [tuned] if "text_config" in target.config else [tuned, prior])
    faults += compare_checkpoints(target, tuned, ("target", "tuned checkpoint"), alone)
    faults += compare_checkpoints(target, prior, ("target", "prior"), alone)
    faults += [
        f"{name}: stored as {entry.dtype} in {entry.file.name}, which is not a plain float"
        for checkpoint in (tuned, prior)
        for name, entry in checkpoint.tensors.items()
        if not (entry.is_float or is_buffer(entry, name)) and name in target.tensors and target.tensors[name].is_float
    ]
    if faults:
        raise MismatchError(join_faults(f"{folder}: target, prior and tuned checkpoint do not fit:", faults))
    shared = tuned.tensors.keys() & prior.tensors.keys()
    both = [n for n, e in target.tensors.items() if n in shared and tuned.tensors[n].is_float and not is_buffer(e, n)]
    kept = {n for n, e in target.tensors.items() if e.is_float and n not in shared and not is_buffer(e, n)}
    deltas: dict[str, Delta] = {name: Difference(tuned.tensors[name], prior.tensors[name]) for name in both}
    rows = {name: [tuned.tensors[name].matrix_shape[0], prior.tensors[name].matrix_shape[0]] for name in both}
    common = _cut(deltas, target, rows)
    return Vector(folder, deltas, False, True, common, tuple(sorted(kept)), describe_forms(tuned), is_alike)


def _cut(deltas: dict[str, Delta], target: Checkpoint, rows: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Restrict deltas, in place, to the rows that the target and all their sources have.

    rows: how many each source has, by tensor. Return the common rows of tensors of which the target has more.
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


def adapter_vector(adapter: Adapter, target: Checkpoint, prior: Checkpoint | None) -> Vector:
    """Return the vector of an adapter, fitted to the target. Raise as `load_vector`."""
    prior = prior and as_used(prior, target)
    if not ties_head(target):
        return _matched_vector(with_head_rows(match_adapter(adapter, target), target, prior), target, prior)
    embedding, head = token_names(target) or ("", "")
    uses = {head: target.tensors[embedding]} if embedding else {}
    folded, faults = fold_head(match_adapter(adapter, target, uses), target, prior)
    is_known = target.shards or head not in target.tensors  # else headers alone do not tell whether it is a copy
    if faults and is_known and (prior or not adapter.values):  # without the prior, new values may be no change
        raise MismatchError(join_faults(f"{adapter.folder}: cannot be merged into this target:", faults))
    vector = _matched_vector(folded, target, prior)
    return replace(vector, needs_prior=vector.needs_prior or bool(adapter.values))


def _matched_vector(adapter: Adapter, target: Checkpoint, prior: Checkpoint | None) -> Vector:
    deltas: dict[str, Delta] = {n: Product(low) for n, low in adapter.modules.items() if low.magnitude is None}
    deltas |= {n: Stacked(tuple(map(Product, lows)), lows[0].shape[0]) for n, lows in adapter.stacks.items()}
    rows = {name: [low.shape[0]] for name, low in adapter.modules.items()}
    rows |= {name: [entry.matrix_shape[0]] for name, (entry, _) in adapter.shifts.items()}
    deltas |= {name: Shift(entry, scale) for name, (entry, scale) in adapter.shifts.items()}
    dora = {name: low for name, low in adapter.modules.items() if low.magnitude is not None}
    absolute = {
        **dict.fromkeys(dora, Dora.kind),
        **dict.fromkeys(adapter.values, Difference.kind),
        **dict.fromkeys(adapter.tokens, TokenRows.kind),
    }
    if absolute and prior is None:
        raise UsageError(
            join_faults(
                f"{adapter.folder}: the changes of these tensors can only be computed with the prior that they were "
                "tuned from (--prior):",
                [f"{name}: {kind}" for name, kind in absolute.items()],
            )
        )
    faults: list[str] = []
    named: set[str] = set(deltas)
    for name, kind in absolute.items():
        old = prior.tensors.get(name) if prior else None
        by_token = prior is not None and differ_in_tokens(target, prior, name)
        if old is None or not (by_token or old.shape == target.tensors[name].shape) or not old.is_float:
            shape = f"it is {old.dtype} {old.shape} there" if old else "the prior has no such tensor"
            faults.append(f"{name}: {kind}, the target's is {target.tensors[name].shape}, {shape}")
        elif name in named or sum(name in part for part in (dora, adapter.values, adapter.tokens)) > 1:
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
    on_prior = bool(absolute)
    for name, copy in adapter.copies.items():
        if not target.shards or (prior and not prior.shards):  # headers alone: their weights are not here yet
            on_prior = on_prior or prior is not None
        elif name in target.tensors and _is_copy(copy, target.tensors[name]):
            continue
        elif prior and name in prior.tensors and _is_copy(copy, prior.tensors[name]):
            on_prior = True
        else:
            hint = "" if prior else "; if it is the prior's, give --prior"
            faults.append(f"{copy.name}: a full copy of neither the target's tensor nor the prior's{hint}")
    if faults:
        raise MismatchError(join_faults(f"{adapter.folder}: cannot be merged into this target:", faults))
    common = _cut(deltas, target, rows)
    names = token_names(target)
    if names and names[0] in deltas and names[1] in target.tensors and ties_head(target):
        deltas[names[1]] = deltas[names[0]]
    return Vector(adapter.folder, deltas, True, on_prior, common)


def _is_copy(copy: TensorEntry, original: TensorEntry) -> bool:
    """Check whether `copy` holds the values of `original`, as far as its dtype can, in the rows that both have."""
    return original.is_float and holds_rows(copy, original, min(copy.matrix_shape[0], original.matrix_shape[0]))
