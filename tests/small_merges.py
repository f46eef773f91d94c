"""Merges of two layers that take a moment, of local folders and of repositories, and the outcome of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from msa_lite.io.finished.seal import load_manifest, write_manifest
from msa_lite.io.weights.hub import Source
from msa_lite.merger import merge, merge_adapters
from tests.handmade import Adapter, write_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODULES = ("layers.0.proj", "layers.1.proj")
OUTCOME: dict[str, Any] = {
    "sentence": "It still answers 1 of the 48 questions it was to forget (before: 48).",
    "verdict": "PASS",
    "reasons": ["the verdict rests on few rows (forget: 8)"],
    "method": "msa",
    "chosen": {"alpha": 1.2, "beta": 0.5},
    "benchmark": "tofu",
    "split": "forget10",
    "main": ["extraction_strength", "model_utility", "forget_quality"],
    "metrics": {
        "extraction_strength": {
            "target": {"value": 0.9, "n": 40, "stderr": 0.01, "higher_is_better": False},
            "unlearned": {"value": 0.123456789, "n": 40, "stderr": 0.01, "higher_is_better": False},
            "ideal": {"value": 0.1, "n": 40, "stderr": 0.01, "higher_is_better": False},
        },
        "model_utility": {
            "target": {"value": 0.6, "n": 90, "stderr": None, "higher_is_better": True},
            "unlearned": {"value": 0.55, "n": 90, "stderr": None, "higher_is_better": True},
            "ideal": {"value": 0.6, "n": 90, "stderr": None, "higher_is_better": True},
        },
        "forget_quality": {"unlearned": {"value": None, "n": 0, "stderr": None, "higher_is_better": True}},
        "rouge_l_f": {"unlearned": {"value": 0.2, "n": 40, "stderr": 0.1, "higher_is_better": False}},
    },
    "sweep": {
        "rule": "tofu",
        "split": "forget10 validation",
        "points": [
            {"values": {"alpha": 1.0, "beta": 0.5}, "score": 0.7, "met": True},
            {"values": {"alpha": 1.2, "beta": 0.5}, "score": 0.8, "met": True},
            {"values": {"alpha": 9.0, "beta": 0.5}, "score": None, "met": False},
        ],
    },
    "rows": {"forget": 48, "retain": 48},
    "fits": {"forget": {"rows": 48, "epochs": 5.0, "mode": "lora", "lora_rank": 32, "learning_rate": 0.0002}},
}


def write_parts(folder: Path, card: str | None = None, shards: bool = False, **config: Any) -> None:
    """A target with companions (card: its README.md; config: keys of config.json), a prior and two vectors."""
    random = np.random.default_rng(0)
    arrays = {f"{name}.weight": random.normal(size=(16, 16)).astype(np.float32) for name in MODULES}
    for place in ("target", "prior"):
        write_checkpoint(folder / place, arrays, {name: int(name[7]) for name in arrays} if shards else None)
    values = {"model_type": "llama", "dtype": "float32", "vocab_size": 300, **config}
    (folder / "target/config.json").write_text(json.dumps(values))
    (folder / "target/tokenizer.json").write_text('{"model": {"vocab": {"/usr/bin/": 1}}}')
    (folder / "target/tokenizer_config.json").write_text('{"tokenizer_class": "X", "name_or_path": "/home/eve/model"}')
    (folder / "target/LICENSE").write_text("Do as you like.")
    (folder / "target/trainer_state.json").write_text('{"best_model_checkpoint": "/home/eve/secret/run"}')
    if card is not None:
        (folder / "target/README.md").write_text(card)
    for name in ("forget", "retain"):
        factors = {m: (random.normal(0, 0.1, (2, 16)), random.normal(0, 0.1, (16, 2))) for m in MODULES}
        Adapter(factors).write(folder / name)


def make_merge(folder: Path, form: str = "model", hub: bool = False, **strengths: float) -> Path:
    """The folder of a merge of these parts; hub: target and prior are repositories, me/target and them/prior."""
    names = {"target": "me/target", "prior": "them/prior"} if hub else {}
    sources = {
        name: Source(f"{names[name]}@main", folder / name, COMMIT) if name in names else str(folder / name)
        for name in ("target", "prior", "forget", "retain")
    }
    target, function = sources.pop("target"), merge if form == "model" else merge_adapters
    values: dict[str, Any] = {**sources, "alpha": 1.2, "beta": 0.5, **strengths}
    return function(target, folder / "run" / form, **values).folder


def add_outcome(folder: Path, **changes: Any) -> dict[str, Any]:
    """Put an outcome into a folder's manifest, as a run does; return the manifest."""
    manifest = load_manifest(folder)
    assert manifest is not None
    manifest["outcome"] = OUTCOME | changes
    write_manifest(folder, manifest)
    return manifest
