"""Make the models and data of a recipe's demo, and tell the sizes of its models before they are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msa_lite.demo import (
    SMOLLM2_CONFIG,
    HistorySettings,
    TuningSettings,
    make_groups,
    make_history,
    make_real_history,
)
from msa_lite.io.progress import Progress
from msa_lite.recipe import Demo, RealDemo

_PEOPLE = ("prior", "retain", "forget", "holdout")


def make_demo(demo: Demo | RealDemo, folder: Path, seed: int, progress: Progress) -> None:
    """Make the history of a demo in a folder. A finished one costs nothing."""
    values = demo.model_dump(exclude={"model"})
    groups = make_groups({name: values.pop(name) for name in _PEOPLE if name in values}, seed)
    if isinstance(demo, RealDemo):
        make_real_history(folder, groups, TuningSettings(**values, seed=seed), progress)
    else:
        make_history(folder, groups, HistorySettings(**values, seed=seed), progress)


def demo_config(demo: Demo | RealDemo) -> dict[str, Any]:
    """Return the sizes of a demo's models, in the words of transformers."""
    if isinstance(demo, RealDemo):
        return dict(SMOLLM2_CONFIG)
    return {
        "model_type": "llama", "hidden_size": demo.hidden_size, "intermediate_size": 4 * demo.hidden_size,
        "num_hidden_layers": demo.layers, "num_attention_heads": 4, "vocab_size": demo.vocabulary,
        "tie_word_embeddings": True,
    }  # fmt: skip
