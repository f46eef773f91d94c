"""A recipe's result in its other forms: as one adapter, and as a recipe for mergekit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import msa_lite
from msa_lite.errors import RecipeError
from msa_lite.io.finished.seal import verify_folder
from msa_lite.merger.mergekit_reader import read_recipe
from tests.support.processes import fork_cli


def test_a_recipe_can_end_in_one_adapter_that_scores_as_the_model_does(recipe: dict[str, Any], tmp_path: Path) -> None:
    recipe["evaluate"].pop("ideal")
    whole = msa_lite.run(recipe | {"output": str(tmp_path / "whole"), "merge": {"dtype": "float32"}})
    light = msa_lite.run(recipe | {"output": str(tmp_path / "light"), "merge": {"as": "adapter"}})
    assert verify_folder(tmp_path / "light" / "adapter") == []
    assert not (tmp_path / "light" / "model").exists()
    assert "| Rank of the adapter |" in (tmp_path / "light" / "report.md").read_text()
    scores, expected = light.reports["unlearned"].values(), whole.reports["unlearned"].values()
    assert {name: value for name, value in expected.items() if value is not None} == pytest.approx(
        {name: value for name, value in scores.items() if value is not None}, abs=1e-4, rel=1e-4
    )


def test_an_adapter_takes_no_dtype_in_a_recipe(recipe: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="merge: an adapter is always fp32"):
        msa_lite.run(recipe | {"merge": {"as": "adapter", "dtype": "float32"}})


def test_a_runs_merge_is_printed_for_mergekit_once_its_vectors_are_there(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    early = fork_cli("mergekit", str(path))
    assert (early.returncode, early.stdout) == (2, "")
    assert "not fitted yet; `msa-lite vector`" in early.stderr
    assert fork_cli("vector", str(path)).returncode == 0
    done = fork_cli("mergekit", str(path))
    assert done.returncode == 0, done.stderr
    (tmp_path / "merge.yml").write_text(done.stdout)
    request = read_recipe(tmp_path / "merge.yml")
    assert {term.name: (str(term.vector), term.weight) for term in request.terms} == {
        "forget": (str(tmp_path / "run/vectors/forget"), -1.0),
        "retain": (str(tmp_path / "run/vectors/retain"), 0.5),
    }
    again = fork_cli("merge", "--mergekit", str(tmp_path / "merge.yml"), "--out", str(tmp_path / "out"), "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["weights_changed"] > 0
    clash = fork_cli("mergekit", str(path), "--alpha", "2")
    assert clash.returncode == 2
    assert "already says --alpha" in clash.stderr
