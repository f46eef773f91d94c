"""A recipe's result in its other forms: as one adapter, and as a recipe for mergekit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import msa_lite
from msa_lite.io.finished.seal import verify_folder
from msa_lite.merger.mergekit.reader import read_recipe
from msa_lite.pipeline.verbs.run import run_vectors
from tests.e2e.conftest import CallCli
from tests.support.pages import page_text


def test_a_recipe_can_end_in_one_adapter_that_scores_as_the_model_does(recipe: dict[str, Any], tmp_path: Path) -> None:
    recipe["evaluate"].pop("ideal")
    whole = msa_lite.run(recipe | {"output": str(tmp_path / "whole"), "merge": {"dtype": "float32"}})
    light = msa_lite.run(recipe | {"output": str(tmp_path / "light"), "merge": {"as": "adapter"}})
    assert verify_folder(tmp_path / "light" / "adapter") == []
    assert not (tmp_path / "light" / "model").exists()
    assert "Rank of the adapter" in page_text(tmp_path / "light")
    scores, expected = light.reports["unlearned"].values(), whole.reports["unlearned"].values()
    assert {name: value for name, value in expected.items() if value is not None} == pytest.approx(
        {name: value for name, value in scores.items() if value is not None}, abs=1e-4, rel=1e-4
    )


def test_a_runs_merge_is_printed_for_mergekit_once_its_vectors_are_there(
    recipe: dict[str, Any], tmp_path: Path, call_cli: CallCli
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    status, stdout, stderr = call_cli("mergekit", path)
    assert (status, stdout) == (2, "")
    assert "not fitted yet; `msa-lite run RECIPE --until vectors`" in stderr
    run_vectors(path)
    status, stdout, stderr = call_cli("mergekit", path)
    assert status == 0, stderr
    (tmp_path / "merge.yml").write_text(stdout)
    request = read_recipe(tmp_path / "merge.yml")
    assert {term.name: (str(term.vector), term.weight) for term in request.terms} == {
        "forget": (str(tmp_path / "run/vectors/forget"), -1.0),
        "retain": (str(tmp_path / "run/vectors/retain"), 0.5),
    }
    status, stdout, stderr = call_cli(
        "merge", "--mergekit", tmp_path / "merge.yml", "--out", tmp_path / "out", "--json"
    )
    assert status == 0, stderr
    assert json.loads(stdout)["weights_changed"] > 0
    status, _, stderr = call_cli("mergekit", path, "--alpha", "2")
    assert (status, "already says --alpha" in stderr) == (2, True)
