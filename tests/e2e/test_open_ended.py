"""Runs whose recipe does not say how long vectors are fitted: until the prior knows the rows; and their baselines."""

from __future__ import annotations

from typing import Any

import pytest

import msa_lite
from msa_lite.io.finished.seal import load_manifest
from msa_lite.pipeline.prepare.run import msa_scope, prepare
from msa_lite.pipeline.run.vectors import vector_inputs
from msa_lite.pipeline.verbs.run import run_vectors
from msa_lite.recipe import load_recipe

pytestmark = pytest.mark.usefixtures("quick_fits")


@pytest.fixture
def auto(recipe: dict[str, Any]) -> dict[str, Any]:
    recipe["vector"] = {"mode": "full", "learning_rate": 1e-2}
    recipe["forget"]["alpha"] = 0.5
    return recipe


def test_vectors_are_fitted_until_the_prior_knows_the_rows(auto: dict[str, Any]) -> None:
    for folder in run_vectors(auto):
        manifest = load_manifest(folder) or {}
        fit, loss = manifest["fit"], manifest["fit"]["loss"]
        assert loss["target"] < loss["prior"]
        assert fit["ended"] == "known"
        assert loss["tuned"] <= loss["prior"] - 0.95 * (loss["prior"] - loss["target"])
    labels: list[str] = []
    run_vectors(auto, progress=lambda label, done, total: labels.append(label))
    assert labels == []  # kept
    run_vectors(auto, overrides=["target=" + auto["evaluate"]["ideal"]], progress=lambda *said: labels.append(said[0]))
    assert {"forget vector", "retain vector"} <= set(labels)  # another target, another loss to reach


def test_one_vector_may_be_fitted_until_it_knows_and_the_other_for_some_epochs(auto: dict[str, Any]) -> None:
    auto["vector"] |= {"epochs": 2, "batch_size": 8}
    forget, retain = run_vectors(auto, overrides=["retain.vector={epochs: auto}"])
    (fixed, until), inputs = [load_manifest(folder) or {} for folder in (forget, retain)], "inputs"
    assert ("fit" in fixed, "until" in fixed[inputs], fixed[inputs]["settings"]["epochs"]) == (False, False, 2)
    assert until["fit"]["ended"] == "known"
    labels: list[str] = []
    run_vectors(auto, overrides=["retain.vector.epochs=1"], progress=lambda *said: labels.append(said[0]))
    assert set(labels) == {"retain vector"}  # the forget vector stays
    again = load_manifest(retain) or {}
    assert ("fit" in again, again[inputs]["settings"]["epochs"]) == (False, 1)


def test_processes_that_help_know_the_vectors_by_the_same_inputs(auto: dict[str, Any]) -> None:
    folders = run_vectors(auto)
    recipe = load_recipe(auto)
    job = prepare(recipe, msa_scope(recipe))
    for folder in folders:
        assert (load_manifest(folder) or {})["inputs"] == vector_inputs(job, folder.name)


def test_baselines_take_five_epochs_and_a_rate_in_numbers(auto: dict[str, Any]) -> None:
    auto["vector"] = {"lora": {"rank": 2}}
    result = msa_lite.run_baseline("grad_diff", auto, ["evaluate=null"])
    assert result.chosen["epoch"] == 5
    assert isinstance(result.chosen["learning_rate"], float)
    settings = (load_manifest(result.folder / "vectors/grad_diff") or {})["inputs"]["settings"]
    assert settings["learning_rate"] == result.chosen["learning_rate"]
    vector = msa_lite.run_baseline("task_vector", auto, ["evaluate=null"]).folder / "vectors/forget"
    manifest = load_manifest(vector) or {}
    assert manifest["inputs"]["settings"]["epochs"] == 5
    assert "until" not in manifest["inputs"]
