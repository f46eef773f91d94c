"""Check what a written model says of itself against the headers of its own weight files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msa_lite.errors import FormatError, join_faults
from msa_lite.io.weights.checkpoint import INDEX_FILE, Checkpoint, load_checkpoint, read_index, text_part
from msa_lite.io.weights.companions import unnamed_shards
from msa_lite.io.weights.quantised import CONFIG_KEYS, dequantised, name_form
from msa_lite.io.weights.tied_head import check_head, settled


def check_statements(folder: Path, target: Checkpoint) -> None:
    """Raise FormatError where index or config of a written model say what its weight files do not hold.

    Checked are the names and files of all tensors, the total size, the dtype, whether embedding and head are one
    matrix, and whether the weights are codes. What the target's config says wrongly of its dtype may stand on.
    """
    model = load_checkpoint(folder)
    check_head(model)
    if faults := [*_faults(model, target)]:
        raise FormatError(join_faults(f"{folder}: what it says of itself is not what its files hold:", faults))


def _faults(model: Checkpoint, target: Checkpoint) -> Iterator[str]:
    notes, held = (read_index(model.folder) or {}).get("metadata"), sum(e.nbytes for e in model.tensors.values())
    size = notes.get("total_size") if isinstance(notes, dict) else None
    if size is not None and size != held:
        yield f"{INDEX_FILE}: total_size: {json.dumps(size)}, the tensors take {held}"
    for path in unnamed_shards(model):
        yield f"{INDEX_FILE}: does not name {path.name}"
    stored = dict.fromkeys(_dtypes(target.config), target.dtype_name)
    for said in _dtypes(model.config):
        if said != model.dtype_name != stored.get(said):
            yield f"config.json: dtype: {said}, the weights are {model.dtype_name}"
    if settled(plain := dequantised(model)) is not plain:
        yield "config.json: tie_word_embeddings: true, embedding and head differ"
    if any(key in model.config for key in CONFIG_KEYS) and not name_form(model):
        yield "config.json: quantization_config, the weights are plain"


def _dtypes(config: Mapping[str, Any]) -> set[str]:
    """Return the dtypes that a config names, for the model or its text model."""
    said = (part.get(key) for part in (config, text_part(config)) for key in ("dtype", "torch_dtype"))
    return {name.removeprefix("torch.") for name in said if isinstance(name, str)}
