"""Find the rows that stand for tokens: those that two checkpoints share, and those that only one of them has.

Tokens that a fine-tune adds (a chat template's, say) are new rows at the end of embedding and head. Some tools pad both
to a multiple of 64.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from msa_lite.io.blocks import Files, read_rows
from msa_lite.io.checkpoint import Checkpoint, TensorEntry

_HEADS = ("lm_head.", "embed_out.")
# Names of modules with a row for each token, besides those with "emb" in their name (embed_tokens, word_embeddings,
# embed_in, embed_out). The number of rows alone does not tell: GPT-2's c_fc may have as many.
_MODULES = {"wte", "shared", "lm_head", "head", "output"}
_OTHER_EMBEDDINGS = ("pos", "type", "patch")  # of places, segments and pictures


def vocabulary_size(checkpoint: Checkpoint) -> int | None:
    """Return the number of rows that the config gives to embedding and head, or None where it does not say."""
    text = checkpoint.config.get("text_config")
    size = checkpoint.config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    return size if type(size) is int else None


def has_token_role(name: str) -> bool:
    """Check whether a tensor is embedding, head or the head's bias, by its name: none is in a numbered layer."""
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


def differ_in_tokens(one: Checkpoint, other: Checkpoint, name: str) -> bool:
    """Check whether two checkpoints' tensors of a name differ in the number of tokens and in nothing else."""
    if not (_has_tokens(one, name) and _has_tokens(other, name)):
        return False
    a, b = one.tensors[name].shape, other.tensors[name].shape
    return a[0] != b[0] and a[1:] == b[1:]


def is_head(name: str) -> bool:
    """Check whether a tensor is the head's, or the head's bias, by its name."""
    return any(f".{head}" in f".{name}" for head in _HEADS)


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

    known: the number of tokens of the prior's tokenizer, if the target's has more; later rows of the prior are padding.
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
