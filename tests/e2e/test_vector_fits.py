"""A forget vector that starts at the retain vector, and one that is held: the whole run, against plain tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import msa_lite
from msa_lite.errors import UsageError
from msa_lite.io.finished.seal import load_manifest
from msa_lite.io.weights.hub import fetch
from msa_lite.pipeline.prepare.run import msa_scope, prepare
from msa_lite.pipeline.run.vectors import vector_inputs
from msa_lite.pipeline.verbs.ask import open_panel
from msa_lite.pipeline.verbs.run import run_vectors
from msa_lite.recipe import load_recipe
from msa_lite.strengths import Strengths
from tests.e2e.conftest import CallCli

ALPHA = 0.8


def tensors(folder: Path | str) -> dict[str, np.ndarray]:
    return {name: value.astype(np.float64) for name, value in load_file(Path(folder) / "model.safetensors").items()}


def lora_deltas(folder: Path) -> dict[str, np.ndarray]:
    """lora_alpha / r · B A by the target's tensor names."""
    config, factors = (
        json.loads((folder / "adapter_config.json").read_text()),
        load_file(folder / "adapter_model.safetensors"),
    )
    scale = config["lora_alpha"] / config["r"]
    names = [name for name in factors if ".lora_A." in name]
    return {
        name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight"): scale
        * factors[name.replace(".lora_A.", ".lora_B.")].astype(np.float64) @ factors[name].astype(np.float64)
        for name in names
    }  # fmt: skip


@pytest.fixture
def later(recipe: dict[str, Any]) -> dict[str, Any]:
    recipe["forget"]["alpha"] = ALPHA
    del recipe["retain"]["beta"]
    recipe["vector"] |= {"start": "retain", "hold": 0.5, "learning_rate": 1e-3}
    return recipe


def test_an_adapter_starts_at_the_prior_with_the_retain_adapter_merged(later: dict[str, Any]) -> None:
    folder = msa_lite.run(later).folder
    prior, start, retain = tensors(later["prior"]), tensors(folder / "vectors/start"), folder / "vectors/retain"
    for name, delta in lora_deltas(retain).items():
        np.testing.assert_allclose(start[name], prior[name] + delta, atol=1e-6)
        assert np.abs(delta).max() > 1e-5
    inputs = (load_manifest(folder / "vectors/forget") or {})["inputs"]
    assert inputs["prior"] == fetch(str(folder / "vectors/start")).identity()
    assert inputs["objective"]["hold"] == 0.5
    target, unlearned = tensors(later["target"]), tensors(folder / "model")
    deltas = lora_deltas(folder / "vectors/forget")
    for name, value in target.items():
        np.testing.assert_allclose(unlearned[name], value - ALPHA * deltas.get(name, 0.0), atol=1e-6)
    points = open_panel(folder, several=True).points
    assert points is not None
    with pytest.raises(UsageError, match="adds no retain vector"):  # what it has is in the forget vector's start
        points.check(Strengths(ALPHA, 0.5))


@pytest.mark.parametrize("strength", [None, 1.5])
def test_a_checkpoint_starts_at_the_retain_checkpoint(
    later: dict[str, Any], strength: float | None, call_cli: CallCli
) -> None:
    later["vector"]["mode"] = "full"
    later["merge"] = {"filter": strength} if strength else {}
    folder = msa_lite.run(later).folder
    name = f"forget-filter-{strength:g}" if strength else "forget"
    late, start = tensors(folder / "vectors" / name), tensors(folder / "vectors/retain")
    target, unlearned = tensors(later["target"]), tensors(folder / "model")
    moved = 0.0
    for key, value in target.items():
        np.testing.assert_allclose(unlearned[key], value - ALPHA * (late[key] - start[key]), atol=1e-6)
        moved = max(moved, np.abs(late[key] - start[key]).max())
    assert moved > 1e-4
    assert call_cli("verify", folder)[0] == 0
    story = json.loads((folder / "report.json").read_text())
    assert "θ_12 − θ_2" in story["formula"]
    assert story["strengths"].get("beta", 0.0) == 0.0
    assert not (folder / "vectors/start").exists()
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("manifest.json")}
    msa_lite.run(later)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("manifest.json")} == before  # nothing is made anew


# Runs whose recipe does not say how long vectors are fitted: until the prior knows the rows; and their baselines.


@pytest.fixture
def auto(recipe: dict[str, Any]) -> dict[str, Any]:
    recipe["vector"] = {"mode": "full", "learning_rate": 1e-2}
    recipe["forget"]["alpha"] = 0.5
    return recipe


@pytest.mark.usefixtures("quick_fits")
def test_vectors_are_fitted_until_the_prior_knows_the_rows(auto: dict[str, Any]) -> None:
    folders, recipe = run_vectors(auto), load_recipe(auto)
    job = prepare(recipe, msa_scope(recipe))
    for folder in folders:
        manifest = load_manifest(folder) or {}
        assert manifest["inputs"] == vector_inputs(job, folder.name)  # as processes that help know it
        fit, loss = manifest["fit"], manifest["fit"]["loss"]
        assert loss["target"] < loss["prior"]
        assert fit["ended"] == "known"
        assert loss["tuned"] <= loss["prior"] - 0.95 * (loss["prior"] - loss["target"])
