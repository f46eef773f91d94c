"""Extend a prior in memory by the tokens that were added to the target later, and save it without them.

The added rows are the target's own and are only read. A vector is saved without them, as one of the prior, so that
a merge leaves the target's rows as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from msa_lite.io.adapter import ADAPTER_FILE
from msa_lite.io.blocks import Files, read_rows
from msa_lite.io.checkpoint import TensorEntry
from msa_lite.io.vocabulary import AddedRows, is_head


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
