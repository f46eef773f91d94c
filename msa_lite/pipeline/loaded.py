"""The target, loaded once, as each of many candidates: its weights are set to what the merge would store.

So a candidate costs one evaluation of a plain model and one reading of target and vectors, no model is written, and the
scores are those of the merged model: weights are rounded alike (with merge.as adapter, they are not rounded). Each
candidate is made from the target's files, never on top of the one before.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from msa_lite.evals.models import load_model
from msa_lite.io.checkpoint import TensorEntry
from msa_lite.io.hub import fetch
from msa_lite.merger import OpenMerge, open_merge
from msa_lite.pipeline.prepare import Run
from msa_lite.pipeline.stages import Vectors, merge_candidate

logger = logging.getLogger(__name__)


class LoadedTarget:
    """The run's target in memory, from the first call of `merged` on."""

    def __init__(self, run: Run) -> None:
        self._job = run
        self._model: Any = None
        self._weights: dict[str, Any] = {}  # of tensors that were rewritten, as matrices, by their names in the files
        self._by_disk = False  # because the model does not hold them as they are stored
        self._merges: dict[tuple[tuple[str, Path], ...], OpenMerge] = {}
        self._last: OpenMerge | None = None

    def merged(self, vectors: Vectors) -> Any:
        """The model that the merge of these vectors would make, until the next call."""
        merge = self._open(vectors)
        if not self._by_disk:
            dtype = self._job.recipe.merge.dtype
            stored = None if dtype == "same" else dtype  # as the merged model would be loaded
            self._model = self._model or load_model(self._job.sources["target"].folder, dtype=stored)
            self._by_disk = not add_weights(self._weights, self._model, merge)
        if self._by_disk:
            self._model, self._weights = None, {}  # their memory is for the merged one
            return merge_candidate(self._job, vectors)
        if self._last is not None and not self._last.rewritten.keys() <= merge.rewritten.keys():
            self._last.restore(self._put)
        self._last = merge
        alpha, beta = (vectors[name][1] if name in vectors else 0.0 for name in ("forget", "retain"))
        merge.fill(alpha, beta, self._put)
        return self._model

    def _open(self, vectors: Vectors) -> OpenMerge:
        key = tuple((name, folder) for name, (folder, _) in sorted(vectors.items()))
        if key not in self._merges:
            settings, sources = self._job.recipe.merge, self._job.sources
            found = {name: fetch(str(folder)) for name, folder in key}
            seed = self._job.recipe.seed
            merge = open_merge(sources["target"], found, sources["prior"], settings.dtype, settings.rounding, seed)
            self._merges = {key: merge}
        return self._merges[key]

    def _put(self, name: str, rows: slice, values: np.ndarray) -> None:
        self._weights[name][rows].copy_(as_tensor(values))


def add_weights(weights: dict[str, Any], model: Any, merge: OpenMerge) -> bool:
    """Add the loaded target's weights that a merge rewrites, as matrices, by their names in its files.

    What is in there already stays. False, with a warning, where the model does not hold the new ones as they are
    stored: some families are rearranged on loading (experts stacked into one tensor).
    """
    state: Mapping[str, Any] = model.state_dict()
    entries = {name: entry for name, entry in merge.rewritten.items() if name not in weights}
    new = {name: _find(state, name, model.base_model_prefix, entry) for name, entry in entries.items()}
    wrong = {name for name, weight in new.items() if weight is None}

    def compare(name: str, rows: slice, values: np.ndarray) -> None:
        if name in new and name not in wrong and not new[name][rows].equal(as_tensor(values).to(new[name])):
            wrong.add(name)

    if new and not wrong:
        merge.restore(compare)
    if not wrong:
        weights |= new
        return True
    logger.warning(
        "%s: not held in memory as it is stored, so each candidate is merged to the disk, scored and removed",
        min(wrong),
    )
    return False


def _find(state: Mapping[str, Any], name: str, prefix: str, entry: TensorEntry) -> Any:
    """The tensor of a file's entry in a model's state, as a matrix; None where there is none of its shape."""
    found = state.get(name, state.get(f"{prefix}.{name}"))
    return found.view(entry.matrix_shape) if found is not None and tuple(found.shape) == entry.shape else None


def as_tensor(values: np.ndarray) -> Any:
    """A numpy array as a tensor over the same memory; torch knows bf16 by another type than numpy."""
    import torch

    if values.dtype.name == "bfloat16":
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)
