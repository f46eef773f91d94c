"""Recipes that leave alpha and beta to the search: what is tried, written and asked once, what a stop leaves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import msa_lite
from msa_lite.choose import validation
from msa_lite.errors import StageError, UsageError
from msa_lite.evals.engine.models import Runner
from msa_lite.io.finished.seal import load_manifest, verify_folder
from msa_lite.pipeline.run.msa import merge_arguments
from msa_lite.recipe import load_recipe
from tests.e2e.conftest import tiny_recipe


@pytest.fixture(scope="module")
def history(learnt: Path) -> Path:
    return learnt


def auto_recipe(history: Path, output: Path) -> dict[str, Any]:
    recipe = tiny_recipe(history, output)
    del recipe["forget"]["alpha"], recipe["retain"]["beta"], recipe["evaluate"]["ideal"]
    recipe["vector"] |= {"epochs": 4, "warmup_epochs": 0}
    recipe["evaluate"] |= {"max_new_tokens": 4, "limit": 16}
    return recipe


@pytest.fixture
def auto(history: Path, tmp_path: Path) -> dict[str, Any]:
    """A recipe that names no strengths; its output is tmp_path/run."""
    return auto_recipe(history, tmp_path / "run")


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The models that were asked in a sweep."""
    models: list[Any] = []
    monkeypatch.setattr(validation, "Runner", lambda model: models.append(model) or Runner(model))
    return models


@pytest.fixture(scope="module")
def searched(history: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Any]:
    """(recipe, result) of a run with everything left to the search."""
    recipe = auto_recipe(history, tmp_path_factory.mktemp("searched") / "run")
    result = msa_lite.run(recipe)
    assert result is not None
    return recipe, result


def choice_of(run: Path) -> Any:
    return json.loads((run / "sweep/choice.json").read_text())


def test_a_recipe_without_strengths_ends_in_a_model(searched: tuple[dict[str, Any], Any]) -> None:
    recipe, result = searched
    run, choice = result.folder, choice_of(result.folder)
    tried = [(line["alpha"], line["beta"], line["filter"]) for line in choice["scores"]]
    assert tried[:2] == [(1.0, 0.0, 1.0), (1.0, 0.0, 4.0)]
    assert len(set(tried)) == len(tried) <= 10
    assert tuple(result.chosen.values()) in tried
    assert all("note" in line for line in choice["scores"] if not line["met"])
    inputs = (load_manifest(run / "sweep") or {})["inputs"]
    assert inputs["candidates"] == {"alpha": "auto", "beta": [0.0], "filter": [1.0, 4.0]}
    assert [*inputs["prior"]] == ["forget.jsonl"]  # what a model scores that never saw the rows
    for stage in ("sweep", "model", "vectors/forget", "moments", "evaluation/prior_validation"):
        assert verify_folder(run / stage) == [], stage
    given = merge_arguments(load_recipe(recipe))
    assert (given["alpha"], given["beta"]) == ([result.point.alpha], result.point.beta)
    for other in ("forget.alpha=[1,2]", "retain.beta=[0,0.5]"):
        with pytest.raises(UsageError, match="alpha and beta are not chosen yet"):
            merge_arguments(load_recipe(recipe, [other]))


def with_vectors(searched: tuple[dict[str, Any], Any], output: Path) -> dict[str, Any]:
    """The same recipe for another folder, in which its vectors lie already."""
    recipe, result = searched
    shutil.copytree(result.folder / "vectors", output / "vectors")
    shutil.copy(result.folder / "recipe.yaml", output)
    return recipe | {"output": str(output)}


def test_a_stopped_search_goes_on_where_it_was(
    searched: tuple[dict[str, Any], Any], loaded: list[Any], tmp_path: Path
) -> None:
    recipe, whole = with_vectors(searched, tmp_path / "run"), choice_of(searched[1].folder)

    def stop(label: str, done: int, total: int) -> None:
        if (
            label.startswith("choosing") and done == 5
        ):  # the target, known from the check before, the first three points and one more
            raise StageError("stopped")

    with pytest.raises(StageError, match="stopped"):
        msa_lite.sweep(recipe, progress=stop)
    assert len(loaded) == 4
    assert msa_lite.sweep(recipe) is not None
    assert choice_of(tmp_path / "run") == whole
    assert len(loaded) == len(whole["scores"])  # nothing twice


def test_a_request_about_a_text_ends_in_a_choice_on_that_text(
    auto: dict[str, Any], history: Path, tmp_path: Path
) -> None:
    for name in ("forget", "retain", "holdout"):
        rows = [json.loads(line) for line in (history / f"data/{name}.jsonl").read_text().splitlines()]
        text = " ".join(f"{row['question']} {row['answer']}" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    data = {n: {"path": str(tmp_path / f"{n}.jsonl"), "format": "text"} for n in ("forget", "retain", "holdout")}
    auto["forget"]["data"], auto["retain"] = data["forget"], {"data": data["retain"], "beta": 0.0}
    auto["evaluate"] = {"holdout": data["holdout"]}
    assert msa_lite.run(auto) is not None
    choice = choice_of(tmp_path / "run")
    assert choice["rule"] == "extraction"
    assert all(line["score"] is not None or line["note"] for line in choice["scores"])
    target = json.loads((tmp_path / "run/sweep/target/report.json").read_text())["metrics"]
    assert ("probability_f" in target, "rouge_l_f" in target) == (True, False)
