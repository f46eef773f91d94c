"""Runs whose recipe does not say how long vectors are fitted: until the prior knows the rows; and their baselines."""

from __future__ import annotations

from typing import Any

import pytest

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
    folders, recipe = run_vectors(auto), load_recipe(auto)
    job = prepare(recipe, msa_scope(recipe))
    for folder in folders:
        manifest = load_manifest(folder) or {}
        assert manifest["inputs"] == vector_inputs(job, folder.name)  # as processes that help know it
        fit, loss = manifest["fit"], manifest["fit"]["loss"]
        assert loss["target"] < loss["prior"]
        assert fit["ended"] == "known"
        assert loss["tuned"] <= loss["prior"] - 0.95 * (loss["prior"] - loss["target"])
