"""Handle models whose embedding and head are one matrix (tied): tell them, give the head a matrix of its own, and read
an adapter's changes of both as one.

A change of a tied matrix is clear only where embedding and head change alike. PEFT stores it so with
`ensure_weight_tying`, and where it saves whole copies of both. PEFT's own merge then adds LoRA factors twice, though
the model that was trained had them once; here they are added once. All other changes need a matrix for each use:
`untied`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from msa_lite.errors import FormatError, MismatchError, MsaError, UsageError
from msa_lite.io.weights.adapter import Adapter
from msa_lite.io.weights.blocks import Files, holds_rows, read_whole
from msa_lite.io.weights.checkpoint import (
    INDEX_FILE,
    Checkpoint,
    ShardFile,
    TensorEntry,
    read_shard,
)
from msa_lite.io.weights.companions import unnamed_shards
from msa_lite.io.weights.factors import LowRank
from msa_lite.io.weights.vocabulary import has_token_role, is_head, vocabulary_size
from msa_lite.io.weights.writer import file_header

# The module that a tied head shares, where a model has several embeddings with a row for each token.
_EMBEDDINGS = {"embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings"}


def ties_head(checkpoint: Checkpoint) -> bool:
    """Check whether embedding and head are one matrix: the config says so, or says nothing and no head is stored."""
    tied = checkpoint.config.get("tie_word_embeddings")
    if tied is not None:
        return bool(tied)
    return not any(name.endswith(("lm_head.weight", "embed_out.weight")) for name in checkpoint.tensors)


def tied_names(checkpoint: Checkpoint) -> tuple[str, str] | None:
    """Return the names of embedding and head of a tied model; None where the embedding cannot be told."""
    names = _token_matrices(checkpoint)
    if any(name.split(".")[-2:-1] in (["head"], ["output"]) for name in names):
        return None
    stored = [name for name in names if is_head(name)]
    names = [name for name in names if name not in stored]
    if len(names) > 1:
        names = [name for name in names if name.split(".")[-2] in _EMBEDDINGS]
    if len(names) != 1:
        return None
    [name] = names
    is_nested = name.startswith("language_model.model.")
    default = "embed_out.weight" if ".embed_in." in f".{name}" else "language_model." * is_nested + "lm_head.weight"
    return name, stored[0] if stored else default


def _token_matrices(checkpoint: Checkpoint) -> list[str]:
    """Return the names of all matrices with a row for each token; none where the config does not say how many."""
    size, tensors = vocabulary_size(checkpoint), checkpoint.tensors
    return [name for name, e in tensors.items() if has_token_role(name) and len(e.shape) == 2 and e.shape[0] == size]


def untie_fault(checkpoint: Checkpoint) -> MsaError | None:
    """Return why a model cannot get a head of its own, or None."""
    names, place = tied_names(checkpoint), checkpoint.folder
    if not ties_head(checkpoint):
        return UsageError(f"{place}: embedding and head are two matrices already; leave out untie")
    if names is None:
        return MismatchError(f"{place}: none of its tensors is known as the embedding that its head shares; untie")
    if checkpoint.shards and names[1] in checkpoint.tensors and not copies_of_head(checkpoint):
        return MismatchError(
            f"{place}: its config ties embedding and head, but {names[1]} differs from {names[0]}; set "
            "tie_word_embeddings to what is right"
        )
    return None


def untied(checkpoint: Checkpoint) -> Checkpoint:
    """Return a tied model with a head of its own: a tensor of the embedding's bytes, behind all others of its file.

    A model that is not tied is returned as it is. Raise as `untie_fault` says.
    """
    if not ties_head(checkpoint):
        return checkpoint
    names = tied_names(checkpoint)
    if (fault := untie_fault(checkpoint)) or names is None:
        raise fault or AssertionError
    config = _untied_config(checkpoint.config)
    if names[1] in checkpoint.tensors:
        return replace(checkpoint, config=config)
    head = replace(checkpoint.tensors[names[0]], name=names[1])
    shards = tuple(_with_tensor(shard, head) if shard.path == head.file else shard for shard in checkpoint.shards)
    return replace(checkpoint, config=config, shards=shards, tensors={**checkpoint.tensors, head.name: head})


def check_head(target: Checkpoint) -> None:
    """Raise FormatError for an untied language model without a head: loaded, it would get a random one."""
    if target.config.get("tie_word_embeddings") is not False or any(map(_names_head, target.tensors)):
        return
    holders = [
        path.name for path in unnamed_shards(target) if any(_names_head(e.name) for e in read_shard(path).tensors)
    ]
    classes = target.config.get("architectures")
    name = str(classes[0]) if isinstance(classes, list) and classes else ""
    if not (name.endswith(("CausalLM", "LMHeadModel")) or holders):
        return
    remedy = "save the model again with its head"
    if holders:
        remedy = f"{holders[0]} holds it, but {INDEX_FILE} does not name that file: add its tensors there"
    raise FormatError(
        f"{target.folder}: its head is missing (lm_head.weight), and config.json says tie_word_embeddings: false, so "
        f"it would be loaded with a random head; {remedy}. If embedding and head are one matrix, set "
        "tie_word_embeddings to true"
    )


def _names_head(name: str) -> bool:
    """Check whether a tensor is a head's, by its module's name in the families that we know."""
    return not {"lm_head", "embed_out", "head", "output", "output_layer"}.isdisjoint(name.split("."))


def copies_of_head(target: Checkpoint) -> tuple[str, str] | None:
    """Return the names of embedding and head where a tied model stores the one matrix twice, else None."""
    names = tied_names(target) if ties_head(target) and target.shards else None
    if names is None or names[1] not in target.tensors:
        return None
    embedding, head = (target.tensors[name] for name in names)
    return names if embedding.shape == head.shape and holds_rows(head, embedding, embedding.matrix_shape[0]) else None


def _untied_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's config, with the word that embedding and head are two matrices."""
    new = {**config, "tie_word_embeddings": False}
    text = config.get("text_config")
    if isinstance(text, dict):
        new["text_config"] = {**text, "tie_word_embeddings": False}
    return new


def _with_tensor(shard: ShardFile, head: TensorEntry) -> ShardFile:
    """Return a shard with one more tensor, whose bytes lie elsewhere in its file."""
    tensors = (*shard.tensors, head)
    header = file_header(((e.name, e.dtype, e.shape, e.nbytes) for e in tensors), shard.metadata)
    return replace(shard, header=header, tensors=tensors)


def fold_head(adapter: Adapter, target: Checkpoint, prior: Checkpoint | None) -> tuple[Adapter, list[str]]:
    """Return an adapter on a tied target with one change of the tied matrix, by the embedding's name; and the faults.

    Equal factors, new values or token rows of both uses become one. New values that equal the prior's are no change.
    Where only headers are there, shapes alone are compared.
    """
    names = tied_names(target)
    if names is None:
        unclear = {*_token_matrices(target)} & {*adapter.modules, *adapter.values}
        return adapter, [
            f"{name}: the target ties embedding and head, and which one is not known" for name in sorted(unclear)
        ]
    embedding, head = names
    parts: dict[str, Any] = {kind: dict(getattr(adapter, kind)) for kind in ("modules", "values", "tokens", "copies")}
    has_weights = bool(target.shards) and (prior is None or bool(prior.shards))
    is_shared = False
    for kind, part in parts.items():
        if head in part and embedding in part and _alike(part[embedding], part[head], has_weights):
            del part[head]
            is_shared = is_shared or kind != "copies"
    old = prior.tensors.get(embedding) if prior and has_weights else None
    values, copies = parts["values"], parts["copies"]
    for name in {embedding, head} & values.keys() if old else ():
        if old and holds_rows(values[name], old, min(values[name].shape[0], old.shape[0])):
            del values[name]
    if head in copies and embedding not in copies:
        copies[embedding] = copies.pop(head)
    uses = [name for name in names if any(name in parts[kind] for kind in ("modules", "values"))]
    uses += [head] if head in parts["tokens"] else []
    cause = "they were tuned apart" if len(set(uses)) > 1 else "only one of the two was tuned"
    faults = [
        f"{name}: the target ties embedding and head, but {cause}, so the change of the one matrix is not defined; "
        "give each use a matrix of its own with msa_lite.merge(…, untie=True)"
        for name in (() if is_shared and uses == [embedding] else dict.fromkeys(uses))
    ]
    return replace(adapter, **parts), faults


def _alike(first: Any, second: Any, has_weights: bool) -> bool:
    """Check whether two parts of an adapter change embedding and head alike."""
    if isinstance(first, LowRank) and isinstance(second, LowRank):
        sides = [(low.a, low.b) if low.transposed else (low.b, low.a) for low in (first, second)]
        pairs = [*zip(*sides, strict=True)]
        if first.shape != second.shape or first.scale != second.scale or first.magnitude or second.magnitude:
            return False
        turned = first.transposed != second.transposed
        return not has_weights or all(_same_factor(first, second, turned) for first, second in pairs)
    if isinstance(first, tuple):
        return first[1] == second[1] and _alike(first[0], second[0], has_weights)
    if first.shape != second.shape:
        return False
    return not has_weights or holds_rows(first, second, first.matrix_shape[0])


def _same_factor(first: TensorEntry, second: TensorEntry, turned: bool) -> bool:
    """Check whether two factors are equal; turned: whether one of them is stored as the other's transpose."""
    files = Files()
    values = [read_whole(files, entry, np.float32) for entry in (first, second)]
    return np.array_equal(values[0].T if turned else values[0], values[1])
