"""Rows of tokens in embedding and head: those that the prior lacks, their addition to it, and their removal again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from msa_lite.io.weights.adapter import ADAPTER_FILE
from msa_lite.io.weights.blocks import Files, read_rows
from msa_lite.io.weights.checkpoint import Checkpoint, TensorEntry, text_part

HEADS = ("lm_head.", "embed_out.", "output_projection.")  # the second is GPT-NeoX's, in its files; the third BioGPT's
# Names of modules with a row for each token, besides those with "emb" in their name (embed_tokens, word_embeddings,
# embed_in, embed_out). The number of rows alone does not tell: GPT-2's c_fc may have as many.
_MODULES = {"wte", "shared", "lm_head", "head", "output", "output_projection"}
_OTHER_EMBEDDINGS = ("pos", "type", "patch")  # of places, segments and pictures


def vocabulary_size(checkpoint: Checkpoint) -> int | None:
    """Return the number of rows that the config gives to embedding and head, or None where it does not say."""
    size = {**text_part(checkpoint.config), **checkpoint.config}.get("vocab_size")
    return size if type(size) is int else None


def has_token_role(name: str) -> bool:
    """Check whether a tensor is embedding, head or the head's bias, by its name; no name with a layer's number is."""
    *path, module, kind = f".{name}".lower().split(".")
    named = module in _MODULES or ("emb" in module and not any(part in module for part in _OTHER_EMBEDDINGS))
    return named and kind in ("weight", "bias") and not any(part.isdecimal() for part in path)


def token_tensors(checkpoint: Checkpoint) -> dict[str, TensorEntry]:
    """Return the tensors that have a row for each token, by name: embedding, head and the head's bias."""
    return {name: entry for name, entry in checkpoint.tensors.items() if _has_tokens(checkpoint, name)}


def _has_tokens(checkpoint: Checkpoint, name: str) -> bool:
    """Check whether a checkpoint has a tensor of this name with a row for each token."""
    shape, size = checkpoint.tensors[name].shape if name in checkpoint.tensors else (), vocabulary_size(checkpoint)
    return bool(shape) and has_token_role(name) and (not size or shape[0] == size)


def differ_in_tokens(first: Checkpoint, second: Checkpoint, name: str) -> bool:
    """Check whether two checkpoints' tensors of a name differ in the number of tokens and in nothing else."""
    if not (_has_tokens(first, name) and _has_tokens(second, name)):
        return False
    a, b = first.tensors[name].shape, second.tensors[name].shape
    return a[0] != b[0] and a[1:] == b[1:]


def is_head(name: str) -> bool:
    """Check whether a tensor is the head's, or the head's bias, by its name."""
    return any(f".{head}" in f".{name}" for head in HEADS)


@dataclass(frozen=True)
class AddedRows:
    """Rows of embedding and head that a model takes over from another checkpoint, which has added tokens."""

    start: int
    """The first of these rows."""
    stop: int
    """The row after the last of them."""
    theirs: tuple[TensorEntry, ...]
    """The tensors of the other checkpoint."""
    own: tuple[TensorEntry, ...]
    """The same tensors of the model itself."""
    sha256: str
    """The hash of these rows."""

    @property
    def own_rows(self) -> int:
        """Return the number of rows that the model has itself."""
        return self.own[0].shape[0]

    @property
    def rows(self) -> int:
        """Return the number of rows that it has with the added ones."""
        return max(self.stop, self.own_rows)

    def describe(self) -> dict[str, Any]:
        """Return a JSON-able form, by which a manifest tells one extension from another."""
        return {"from": self.start, "to": self.stop, "sha256": self.sha256}


def find_added_rows(target: Checkpoint, prior: Checkpoint, known: int | None = None) -> AddedRows | None:
    """Return the rows that the target has for tokens which the prior lacks, or None.

    known: the size of the prior's tokenizer, only if the target's is larger; the prior's rows from there on are
    padding.
    """
    theirs, own = token_tensors(target), token_tensors(prior)
    names = [name for name in theirs if name in own and theirs[name].shape[1:] == own[name].shape[1:]]
    if not names:
        return None
    stop = theirs[names[0]].shape[0]
    start = min(own[names[0]].shape[0], known or stop)
    if start >= stop:
        return None
    files, state = Files(), hashlib.sha256()
    for name in names:
        state.update(f"{name}\n".encode() + read_rows(files, theirs[name], start, stop).tobytes())
    return AddedRows(
        start, stop, tuple(theirs[n] for n in names), tuple(own[n] for n in names), f"sha256:{state.hexdigest()}"
    )


def extend(model: Any, added: AddedRows) -> None:
    """Give a model's embedding and head the rows of added tokens, in place."""
    import torch

    model.resize_token_embeddings(added.rows, mean_resizing=False)
    files = Files()
    with torch.no_grad():
        for entry in added.theirs:
            weight = _weight(model, entry)
            if weight is not None:
                weight[added.start : added.stop] = _read(files, entry, added.start, added.stop).to(weight)


def _weight(model: Any, entry: TensorEntry) -> Any:
    """Return the model's weight of an entry's name: the head's, its bias, or the embedding's; None if it has none."""
    layer = model.get_output_embeddings() if is_head(entry.name) else model.get_input_embeddings()
    return getattr(layer, entry.name.rpartition(".")[2], None)


def _read(files: Files, entry: TensorEntry, start: int, stop: int) -> Any:
    """Read rows [start, stop) of a tensor as fp32."""
    import torch

    rows = read_rows(files, entry, start, stop).astype(np.float32)
    return torch.from_numpy(rows.reshape(stop - start, *entry.shape[1:]))


@contextmanager
def without_added_rows(model: Any, added: AddedRows | None) -> Iterator[dict[str, Any]]:
    """Give the arguments with which `save_pretrained` saves a fully tuned model with the rows of the prior alone.

    The model's config gives the prior's number of rows meanwhile. Where added rows took the place of padding, the
    prior's padding is saved.
    """
    if added is None:
        yield {}
        return
    files, state = Files(), model.state_dict()
    entries = {w.data_ptr(): entry for entry in added.own if (w := _weight(model, entry)) is not None}
    cut: dict[int, Any] = {}  # by place: a tied head is the same rows again
    for name, weight in state.items():
        place = weight.data_ptr()
        if place in entries and place not in cut:
            rows = weight[: added.own_rows].detach().clone()
            if added.start < added.own_rows:
                rows[added.start :] = _read(files, entries[place], added.start, added.own_rows).to(rows)
            cut[place] = rows
        state[name] = cut.get(place, weight)
    config = model.config.get_text_config()
    config.vocab_size = added.own_rows
    try:
        yield {"state_dict": state}
    finally:
        config.vocab_size = added.rows


def cut_adapter(folder: Path, added: AddedRows) -> None:
    """Cut a saved adapter's factors of embedding and head down to the rows of the prior, in place.

    Where added rows took the place of padding, factors become zero, so that the adapter does not change the padding.
    """
    from safetensors.torch import load_file, save_file

    path, changed = folder / ADAPTER_FILE, False
    tensors = load_file(path)
    for name, factor in tensors.items():
        if "lora_embedding_A" in name:
            rows = factor.T
        elif "lora_B" in name and is_head(name):
            rows = factor
        else:
            continue
        rows = rows[: added.own_rows].clone()
        rows[added.start :] = 0
        tensors[name] = (rows.T if "lora_embedding_A" in name else rows).contiguous()
        changed = True
    if changed:
        save_file(tensors, path, {"format": "pt"})
