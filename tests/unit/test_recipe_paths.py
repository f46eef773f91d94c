"""Relative paths of a recipe: beside the recipe first, then in the working folder; what is a Hub id stays one."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from msa_lite.recipe import Recipe, absolute_paths, load_recipe, load_training

RECIPE: dict[str, Any] = {
    "target": "models/target",
    "history": {"checkpoints": [{"checkpoint": "models/early", "step": 1}], "exposure": 2},
    "forget": {"data": {"path": "forget.jsonl"}},
    "retain": {"data": {"path": "../shared/keep.jsonl"}},
    "evaluate": {
        "benchmark": "tofu",
        "ideal": "./ideal",
        "data": "locuslab/TOFU",
        "holdout": {"path": "holdout.jsonl"},
    },
    "output": "runs/x",
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe's folder with what it names; the working folder is another one beside it."""
    folder, here = tmp_path / "recipes", tmp_path / "here"
    for name in ("models/target", "models/early", "ideal"):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text("{}")
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/keep.jsonl").touch()
    (folder / "forget.jsonl").touch()
    (here / "runs").mkdir(parents=True)
    (here / "holdout.jsonl").touch()
    monkeypatch.chdir(here)
    return folder


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(RECIPE | changes))
    return path


def read(path: Path, *overrides: str) -> Recipe:
    return load_recipe(path, overrides)


def test_the_prompts_of_a_judge_may_lie_beside_the_recipe(place: Path) -> None:
    (place / "prompts.yaml").touch()
    judge = {"kind": "openai", "prompts": "prompts.yaml"}
    evaluate = read(write(place, evaluate=RECIPE["evaluate"] | {"judge": judge})).evaluate
    assert evaluate is not None
    assert evaluate.judge.prompts == os.path.relpath(place / "prompts.yaml")


def test_what_lies_beside_the_recipe_is_taken_from_there_and_told_in_a_line(
    place: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("msa_lite"), "propagate", True)
    caplog.set_level(logging.INFO, "msa_lite.notices")
    recipe = read(write(place))
    assert recipe.history is not None
    assert recipe.retain is not None
    assert recipe.evaluate is not None
    assert recipe.target == os.path.relpath(place / "models/target")
    assert recipe.history.checkpoints[0].checkpoint == os.path.relpath(place / "models/early")
    assert recipe.forget.data.path == os.path.relpath(place / "forget.jsonl")
    assert recipe.retain.data.path == os.path.relpath(place.parent / "shared/keep.jsonl")
    assert recipe.evaluate.ideal == os.path.relpath(place / "ideal")
    [line] = caplog.messages
    assert str(place) in line
    assert "forget.jsonl (forget.data.path)" in line
    assert "holdout" not in line
    # Not there, so seen from the working folder; and no path at all.
    assert recipe.evaluate.holdout is not None
    assert (recipe.evaluate.holdout.path, recipe.evaluate.data) == ("holdout.jsonl", "locuslab/TOFU")
    assert recipe.output == "runs/x"


def test_the_recipes_folder_comes_before_the_working_folder(place: Path) -> None:
    (place / "holdout.jsonl").touch()
    evaluate = read(write(place)).evaluate
    assert evaluate is not None
    assert evaluate.holdout is not None
    assert evaluate.holdout.path == os.path.relpath(place / "holdout.jsonl")


def test_a_folder_that_only_has_the_name_of_a_hub_model_is_not_taken(place: Path) -> None:
    (place / "org/model").mkdir(parents=True)
    assert read(write(place, target="org/model")).target == "org/model"
    (place / "org/model/adapter_config.json").touch()
    assert read(write(place, target="org/model")).target == os.path.relpath(place / "org/model")
    assert read(write(place, target="org/model@main")).target == "org/model@main"


@pytest.mark.parametrize("name", ["$output/history/target", "~/models/target", "/models/target"])
def test_paths_that_are_not_relative_stay(place: Path, name: str) -> None:
    assert read(write(place, target=name)).target == name.replace("$output", "runs/x")


def test_the_word_for_the_demos_model_is_no_folder_of_that_name(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "smollm2").mkdir()
    (place / "smollm2/config.json").write_text("{}")
    monkeypatch.chdir(place)
    values = {"demo": {"model": "smollm2"}, "target": "smollm2"}
    assert absolute_paths(values, Path("runs")) == values | {"target": str(place / "smollm2")}


def test_recipes_of_a_training_alike(place: Path) -> None:
    recipe = {"model": "models/early", "stages": [{"data": [{"path": "forget.jsonl"}]}], "output": "x"}
    (place / "train.yaml").write_text(yaml.safe_dump(recipe))
    training = load_training(place / "train.yaml")
    assert (training.model, training.stages[0].sets[0].path) == (
        os.path.relpath(place / "models/early"),
        os.path.relpath(place / "forget.jsonl"),
    )


def test_a_run_records_full_paths_of_all_but_its_own_folder(place: Path) -> None:
    own = {"target": "holdout.jsonl", "prior": "org/model", "ideal": "runs/x/history/ideal", "output": "runs/x"}
    (place.parent / "here/runs/x/history/ideal").mkdir(parents=True)
    assert absolute_paths(own, Path("runs/x")) == own | {"target": str(place.parent / "here/holdout.jsonl")}


def test_a_runs_recipe_and_its_report_tell_paths_as_the_recipe_has_them(place: Path) -> None:
    from msa_lite.recipe import given_paths

    values = {"target": "holdout.jsonl", "forget": {"data": {"path": "./holdout.jsonl"}}, "prior": "org/model"}
    full = str(place.parent / "here/holdout.jsonl")
    assert given_paths(values, Path("runs/x")) == {full: "./holdout.jsonl"}
    assert given_paths({"target": full}, Path("runs/x")) == {}  # the recipe itself has the full path


def test_overrides_and_mappings_are_seen_from_the_working_folder(place: Path) -> None:
    assert read(write(place), "target=models/target").target == "models/target"
    assert load_recipe(RECIPE).target == "models/target"


def test_a_recipe_in_the_working_folder_stays_as_it_is_written(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    assert read(Path("mine.yaml") if write(place) else Path()).target == "models/target"
