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
from functools import lru_cache
from typing import Any

import numpy as np

from msa_lite.errors import FormatError, MismatchError, MsaError, UsageError
from msa_lite.io.weights.adapter import Adapter
from msa_lite.io.weights.blocks import Files, holds_rows, read_whole
from msa_lite.io.weights.checkpoint import INDEX_FILE, Checkpoint, ShardFile, TensorEntry, read_shard, text_part
from msa_lite.io.weights.companions import unnamed_shards
from msa_lite.io.weights.factors import LowRank
from msa_lite.io.weights.vocabulary import HEADS, has_token_role, is_head, vocabulary_size
from msa_lite.io.weights.writer import file_header

# The module that a tied head shares, where a model has several embeddings with a row for each token.
_EMBEDDINGS = {"embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings"}
_APART = {
    "deepseek_v2", "deepseek_v3", "exaone4", "glm", "glm4", "gpt_neox", "gpt_oss", "gptj", "granite", "granitemoe",
    "llama", "mamba2", "ministral", "ministral3", "mistral", "mixtral", "nemotron", "olmo", "olmo2", "olmo3", "olmoe",
    "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "stablelm",
}  # fmt: skip
"""Families of which transformers does not tie the head where the config does not say it."""


def says_tied(config: Mapping[str, Any]) -> bool | None:
    """Return whether a config, or that of its text model, ties embedding and head; None where it leaves it open."""
    said = [part.get("tie_word_embeddings") for part in (config, text_part(config))]
    return True if True in said else False if False in said or str(config.get("model_type")) in _APART else None


def ties_head(checkpoint: Checkpoint) -> bool:
    """Check whether embedding and head are one matrix, as transformers 5 sees it.

    The config must not rule it out. And only one of the two is stored, or both with the same values. Of headers alone,
    the config decides.
    """
    said, pair = says_tied(checkpoint.config), _stored_pair(checkpoint)
    if said is False or pair is None:
        names = checkpoint.tensors
        return bool(said) or (
            said is None and not any(n.endswith(("lm_head.weight", "embed_out.weight")) for n in names)
        )
    return None in pair or (not _holds_two(checkpoint) if checkpoint.shards else bool(said))


def settled(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose config says that embedding and head are two matrices where its files hold two.

    transformers 5 goes by the files then; other programs take the embedding for both if the config ties them.
    """
    is_wrong = says_tied(checkpoint.config) is not False and _holds_two(checkpoint)
    return replace(checkpoint, config=_untied_config(checkpoint.config)) if is_wrong else checkpoint


def token_names(checkpoint: Checkpoint) -> tuple[str, str] | None:
    """Return the names of embedding and head, stored or not; None where the embedding cannot be told.

    The embedding's is empty where only the head is stored.
    """
    names = _token_matrices(checkpoint)
    if any(name.split(".")[-2:-1] in (["head"], ["output"]) for name in names):
        return None
    stored = [name for name in names if is_head(name)]
    names = [name for name in names if name not in stored]
    if len(names) > 1:
        names = [name for name in names if name.split(".")[-2] in _EMBEDDINGS]
    if len(names) > 1 or not (names or stored):
        return None
    name = names[0] if names else ""
    number = 1 if ".embed_in." in f".{name}" else 2 if name.startswith("biogpt.") else 0
    nested = "language_model." * name.startswith("language_model.model.")
    return name, stored[0] if stored else f"{nested}{HEADS[number]}weight"


def _stored_pair(checkpoint: Checkpoint) -> tuple[TensorEntry | None, TensorEntry | None] | None:
    """Return embedding and head, None for one that is not stored; None where the embedding cannot be told."""
    names = token_names(checkpoint)
    return names and (checkpoint.tensors.get(names[0]), checkpoint.tensors.get(names[1]))


def stores_alike(first: Checkpoint, second: Checkpoint) -> bool:
    """Check whether two checkpoints both store the embedding or not, and both store the head or not."""
    pairs = [_stored_pair(checkpoint) or () for checkpoint in (first, second)]
    return [entry is None for entry in pairs[0]] == [entry is None for entry in pairs[1]]


def _holds_two(checkpoint: Checkpoint) -> bool:
    """Check whether a checkpoint's files hold embedding and head with different values."""
    first, last = _stored_pair(checkpoint) or (None, None)
    if not (first and last and checkpoint.shards):
        return False
    return not _are_equal(first, last, *(entry.file.stat().st_mtime_ns for entry in (first, last)))


@lru_cache(16)  # a merge asks for the same two again and again
def _are_equal(first: TensorEntry, second: TensorEntry, *times: int) -> bool:
    rows = first.matrix_shape[0]  # one of them may be stored finer
    return first.shape == second.shape and (holds_rows(second, first, rows) or holds_rows(first, second, rows))


def as_used(checkpoint: Checkpoint, target: Checkpoint) -> Checkpoint:
    """Return a checkpoint with embedding and head under the target's names, each as the checkpoint's model uses it.

    A matrix that stands for both is there twice; for a target that ties the two, under the names that it stores.
    """
    own, goal, pair = token_names(checkpoint), token_names(target), _stored_pair(checkpoint)
    if not (own and goal and pair) or (None in pair and says_tied(checkpoint.config) is False):
        return checkpoint
    is_tied = ties_head(target)
    uses = zip(goal, (pair[0] or pair[1], pair[1] or pair[0]), strict=True)
    named = {name: use for name, use in uses if use and name and (name in target.tensors or not is_tied)}
    return replace(checkpoint, tensors={n: e for n, e in checkpoint.tensors.items() if n not in own} | named)


def tie_fault(target: Checkpoint, model: Checkpoint, what: str) -> str | None:
    """Return why a tied target cannot take the whole change of a model in which embedding and head differ, or None."""
    if (names := token_names(model)) and _holds_two(model) and ties_head(target):
        return _unclear(names[1], f"in the {what} they are two matrices")
    return None


def _unclear(name: str, cause: str) -> str:
    """Return the fault of a change of a tied matrix that its two uses do not have in common."""
    return (
        f"{name}: the target ties embedding and head, but {cause}, so the change of the one matrix is not defined; "
        "give each use a matrix of its own with msa_lite.merge(…, untie=True)"
    )


def _token_matrices(checkpoint: Checkpoint) -> list[str]:
    """Return the names of all matrices with a row for each token; none where the config does not say how many."""
    size, tensors = vocabulary_size(checkpoint), checkpoint.tensors
    return [name for name, e in tensors.items() if has_token_role(name) and len(e.shape) == 2 and e.shape[0] == size]


def untie_fault(checkpoint: Checkpoint) -> MsaError | None:
    """Return why a model cannot get a head of its own, or None."""
    names, place = token_names(checkpoint), checkpoint.folder
    if not ties_head(checkpoint):
        return UsageError(f"{place}: embedding and head are two matrices already; leave out untie")
    if not (names and names[0]):
        return MismatchError(f"{place}: none of its tensors is known as the embedding that its head shares; untie")
    return None


def untied(checkpoint: Checkpoint) -> Checkpoint:
    """Return a tied model with a head of its own: a tensor of the embedding's bytes, behind all others of its file.

    The model must have no `untie_fault`.
    """
    names, config = token_names(checkpoint) or ("", ""), _untied_config(checkpoint.config)
    if names[1] in checkpoint.tensors:
        return replace(checkpoint, config=config)
    head = replace(checkpoint.tensors[names[0]], name=names[1])
    shards = tuple(_with_tensor(shard, head) if shard.path == head.file else shard for shard in checkpoint.shards)
    return replace(checkpoint, config=config, shards=shards, tensors={**checkpoint.tensors, head.name: head})


def check_head(checkpoint: Checkpoint) -> None:
    """Raise FormatError for an untied language model without head or embedding: loaded, it would get a random one."""
    if says_tied(checkpoint.config) is not False:
        return
    part = "embedding" if (token_names(checkpoint) or "?")[0] == "" else "head"
    if part == "head" and any(map(_names_head, checkpoint.tensors)):
        return
    holders = [
        path.name for path in unnamed_shards(checkpoint) if any(_names_head(e.name) for e in read_shard(path).tensors)
    ]
    classes = checkpoint.config.get("architectures")
    name = str(classes[0]) if isinstance(classes, list) and classes else ""
    if not (name.endswith(("CausalLM", "LMHeadModel")) or holders):
        return
    remedy = "save the model again with it"
    if holders:
        remedy = f"{holders[0]} holds it, but {INDEX_FILE} does not name that file: add its tensors there"
    raise FormatError(
        f"{checkpoint.folder}: its {part} is missing, and config.json does not tie the two, so it would be loaded with "
        f"a random {part}; {remedy}. If embedding and head are one matrix, set tie_word_embeddings to true"
    )


def _names_head(name: str) -> bool:
    """Check whether a tensor is a head's, by its module's name in the families that we know."""
    return is_head(name) or not {"head", "output", "output_layer"}.isdisjoint(name.split("."))


def _untied_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's config, with the word that embedding and head are two matrices."""
    new = {**config, "tie_word_embeddings": False}
    if text := text_part(config):
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
    names = token_names(target)
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
    is_apart = prior and has_weights and not ties_head(prior)  # else PEFT saves rows of both uses once
    uses += [name for name in names if name in parts["tokens"] and (is_apart or name == head)]
    cause = "they were tuned apart" if len(set(uses)) > 1 else "only one of the two was tuned"
    faults = [_unclear(n, cause) for n in (() if is_shared and uses == [embedding] else dict.fromkeys(uses))]
    return replace(adapter, **parts), faults


def with_head_rows(adapter: Adapter, target: Checkpoint, prior: Checkpoint | None) -> Adapter:
    """Return an adapter with the rows of tokens that PEFT saved once for the embedding and head of a tied prior."""
    names, tokens = token_names(target), adapter.tokens
    if not (names and names[0] in tokens and prior and ties_head(prior)):
        return adapter
    return replace(adapter, tokens={names[1]: tokens[names[0]]} | tokens)


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
