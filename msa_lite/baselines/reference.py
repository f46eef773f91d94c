"""Log-probabilities of answers under the reference, computed once and kept on disk: no second model in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msa_lite.baselines.losses import sequence_log_probs
from msa_lite.baselines.passes import answer_logits, in_chunks, make_batch
from msa_lite.data import Example, hash_ids
from msa_lite.errors import MismatchError
from msa_lite.io.files import write_json
from msa_lite.io.heads import split_model
from msa_lite.io.hub import Source
from msa_lite.io.manifest import is_finished, stage_folder
from msa_lite.io.memory import free_memory, is_out_of_memory
from msa_lite.io.precision import autocast
from msa_lite.io.seal import load_manifest

_FILE = "log_probs.json"


@dataclass(frozen=True)
class ReferenceCache:
    """Sequence log-probabilities of sets of rows under one model, kept in a folder."""

    folder: Path
    model: Source
    """The reference."""
    quantised: bool
    """True when the reference is held in 4 bits."""
    sets: Mapping[str, Sequence[Example]]
    """Rows by name."""

    @property
    def inputs(self) -> dict[str, Any]:
        """Return all that the values depend on, for the manifest."""
        rows = {name: hash_ids(examples) for name, examples in self.sets.items()}
        return {"model": self.model.identity(), "quantised": self.quantised, "rows": rows}

    def check(self) -> None:
        """Raise MismatchError where the folder holds values of another model."""
        inputs = (load_manifest(self.folder) or {}).get("inputs", {})
        theirs, ours = (
            f"{(item.get('model') or {}).get('revision')}{', in 4 bits' if item.get('quantised') else ''}"
            for item in (inputs, self.inputs)
        )
        if inputs and theirs != ours:
            raise MismatchError(
                f"{self.folder} holds log-probabilities of another reference model ({theirs}) than {self.model.name} "
                f"({ours}); remove that folder, or choose another output"
            )

    def values(self, model: Any, pad: int) -> dict[str, list[float]]:
        """Return log-probabilities by set, one per row: from the folder, or computed with `model`, the reference."""
        import torch

        if not is_finished(self.folder, self.inputs):
            with stage_folder(self.folder, "reference", self.inputs) as partial, torch.no_grad():
                training = model.training
                model.eval()
                with autocast(model):
                    scores = {name: _score(model, examples, pad) for name, examples in self.sets.items()}
                model.train(training)
                write_json(partial / _FILE, scores)
        return json.loads((self.folder / _FILE).read_text("utf-8"))


def _score(model: Any, examples: Sequence[Example], pad: int) -> list[float]:
    """Return S_i of each row in nats, in batches of rows of similar length, as large as fit into memory."""
    halves = split_model(model)
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].ids))

    def run(size: int) -> list[float]:
        values = [0.0] * len(examples)
        for chunk in in_chunks(order, size):
            batch = make_batch([examples[i] for i in chunk], pad, model.device)
            scores = sequence_log_probs(*answer_logits(halves, batch)).tolist()
            for i, score in zip(chunk, scores, strict=True):
                values[i] = score
        return values

    for size in (8, 4, 2):
        try:
            return run(size)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        free_memory()
    return run(1)
