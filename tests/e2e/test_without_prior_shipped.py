"""The recipes of WMDP and RWKU on tiny models: each runs as it is shipped, with other models and a short fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import msa_lite
from msa_lite.recipe import load_recipe

FIT = {"vector.epochs": 2, "vector.learning_rate": 5e-3, "vector.max_length": 64, "vector.lora": "{rank: 2}"}


@pytest.mark.parametrize("name", ["wmdp/cyber", "rwku/stephen-king"])
def test_recipes_without_a_prior_make_a_model_and_score_nothing(name: str, history: Path, tmp_path: Path) -> None:
    for side in ("forget", "retain"):
        texts = [{"text": f"The {side} cat sat there on day {i}.", "subject": side} for i in range(7)]
        (tmp_path / f"{side}.jsonl").write_text("\n".join(map(json.dumps, texts)))
    plain = [f"{side}.data.{key}=null" for side in ("forget", "retain") for key in ("name", "split")]
    places = {"target": history / "target", "output": tmp_path / "run"}
    places |= {f"{side}.data.path": tmp_path / f"{side}.jsonl" for side in ("forget", "retain")}
    keys = [f"{key}={value}" for key, value in {**FIT, **places}.items()]
    msa_lite.run(load_recipe(name, [*plain, *keys]))
    assert (tmp_path / "run" / "model" / "config.json").is_file()
    assert not (tmp_path / "run" / "evaluation").exists()
