"""Read a checkpoint under another one's tensor names: what transformers renames or ignores on loading is no difference.

Names and shapes alone decide, so that a merge needs neither torch nor transformers.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from dataclasses import replace

from msa_lite.io.weights.checkpoint import Checkpoint, TensorEntry
from msa_lite.io.weights.matching import BASE_PREFIXES, find_name
from msa_lite.io.weights.vocabulary import HEADS

_MASK = re.compile(r"(^|\.)(attn|attention|self_attn|crossattention)\.(bias|causal_mask)$")  # (1, 1, n, n)
_TABLE = re.compile(r"(^|\.)((original_)?inv_freq|position_ids|(attn|attention)\.masked_bias)$")
_PREDICTION = re.compile(r"(^|\.)mtp(_\w+)?\.")
_LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.")  # of the text model


def is_buffer(entry: TensorEntry, name: str) -> bool:
    """Check whether a tensor is a causal mask or a table of positions: older files hold them, no training changes them.

    A weight may be called `attention.bias`, too; only a mask has four dimensions.
    """
    if _MASK.search(name):
        return len(entry.shape) == 4 and entry.shape[:2] == (1, 1) and entry.shape[2] == entry.shape[3]
    return bool(_TABLE.search(name)) and len(entry.shape) <= 2


def predicts_ahead(checkpoint: Checkpoint, name: str) -> bool:
    """Check whether a tensor is of multi-token prediction, which transformers neither loads nor saves.

    It is called mtp, or is a layer beyond those that the config counts.
    """
    if _PREDICTION.search(name):
        return True
    text = checkpoint.config.get("text_config")
    count = checkpoint.config.get(
        "num_hidden_layers", text.get("num_hidden_layers") if isinstance(text, dict) else None
    )
    layer = _LAYER.match(name)
    return type(count) is int and layer is not None and int(layer[1]) >= count


def find_names(checkpoint: Checkpoint, target: Container[str]) -> dict[str, str]:
    """Return the target's name of each tensor that it calls by another name than a checkpoint does.

    Where two tensors could be one of the target's, neither is renamed.
    """
    names: dict[str, str] = {}
    taken: dict[str, int] = {}
    for name in checkpoint.tensors:
        if name in target:
            continue
        new = next((n for n in _candidates(name, target) if n in target and n not in checkpoint.tensors), None)
        if new is not None:
            names[name] = new
            taken[new] = taken.get(new, 0) + 1
    return {name: new for name, new in names.items() if taken[new] == 1}


def _candidates(name: str, target: Container[str]) -> Iterator[str]:
    """Yield the names that a target may have for a tensor, the likeliest first."""
    if known := find_name(name, target):
        yield known
    for prefix in BASE_PREFIXES:
        yield f"{prefix}.{name}"
    for head, other in (HEADS, HEADS[::-1]):
        if name.startswith(head):
            yield other + name.removeprefix(head)


def aligned(checkpoint: Checkpoint, target: Checkpoint) -> Checkpoint:
    """Return a checkpoint with its tensors under the target's names; its files stay as they are."""
    names = find_names(checkpoint, target.tensors)
    if not names:
        return checkpoint
    return replace(checkpoint, tensors={names.get(name, name): entry for name, entry in checkpoint.tensors.items()})
