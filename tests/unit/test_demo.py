"""The demo of a recipe: its kinds, and that its settings and checks reach the models that it makes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from msa_lite.budget.speed import Device
from msa_lite.data import open_tokenizer
from msa_lite.demo import REAL, history, make_groups, make_history
from msa_lite.errors import MismatchError, OutputError, RecipeError
from msa_lite.io.files.writing import shutil as disk
from msa_lite.pipeline.prepare import models as making
from msa_lite.pipeline.run.folder import check_demo_memory
from msa_lite.pipeline.stages import stage as planning_check
from msa_lite.pipeline.stages.facts import has_history
from msa_lite.recipe import dump_recipe, load_recipe
from tests.support.models import make_small_smollm2

SETTINGS = replace(REAL, tuning_epochs=1, tuning_learning_rate=1e-3, batch_size=6)
PEOPLE = {"retain": 3, "forget": 2, "holdout": 2}


def test_the_two_kinds_are_told_apart_and_read_back_from_a_run() -> None:
    new, real = load_recipe("quickstart"), load_recipe("quickstart-smollm2")
    assert real.demo is not None
    assert real.demo.people == {"retain": 8, "forget": 4, "holdout": 4}
    for recipe in (new, real):
        assert load_recipe(yaml.safe_load(dump_recipe(recipe))) == recipe


def test_a_demo_refuses_more_people_than_it_has_names_for() -> None:
    with pytest.raises(RecipeError, match=r"demo: 408 people are too many"):
        load_recipe("quickstart-smollm2", ["demo.retain=400"])


def test_the_people_of_a_real_demo_reach_its_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(making, "make_history", lambda *arguments, real: calls.append((*arguments, real)))
    recipe = load_recipe("quickstart-smollm2", [f"demo.{key}={value}" for key, value in PEOPLE.items()])
    assert recipe.demo is not None
    making.make_demo(recipe.demo, tmp_path, 5, print)  # type: ignore[arg-type]
    ((folder, groups, settings, progress, real),) = calls
    assert (folder, progress, real) == (tmp_path, print, True)
    assert {name: len(rows) for name, rows in groups.items()} == {name: 6 * count for name, count in PEOPLE.items()}
    assert groups == make_groups(PEOPLE, 5)
    assert settings == replace(REAL, seed=5)


def test_a_history_of_other_people_is_made_anew(tmp_path: Path) -> None:
    recipe = load_recipe("quickstart", [f"output={tmp_path}"])
    assert not has_history(recipe)
    (tmp_path / "history/target").mkdir(parents=True)
    assert has_history(recipe), "no recipe.yaml says otherwise"
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    assert has_history(recipe)
    for change in ("demo.forget=9", "seed=1"):
        assert not has_history(load_recipe(recipe, [change])), change


def test_a_real_history_is_learnt_in_the_models_own_chat_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[list[int]] = []
    fit = history.fit_vector

    def note(source: Any, examples: Any, *arguments: Any, **options: Any) -> Any:
        encoded.extend(example.ids for example in examples)
        return fit(source, examples, *arguments, **options)

    monkeypatch.setattr(history, "make_smollm2", make_small_smollm2)
    monkeypatch.setattr(history, "_REAL_BYTES", 0)
    monkeypatch.setattr(history, "fit_vector", note)
    groups = make_groups(PEOPLE, 0)
    make_history(tmp_path, groups, SETTINGS, real=True)
    text = open_tokenizer(tmp_path / "prior", "prior").decode(encoded[0])
    assert text.startswith("<im>system")
    assert len(encoded) == 6 * (3 + 2) + 6 * 3  # target, then ideal
    made = {name: json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("target", "ideal")}
    assert {name: manifest["rows"] for name, manifest in made.items()} == {"target": 30, "ideal": 18}
    assert {manifest["inputs"]["settings"]["mode"] for manifest in made.values()} == {"full"}
    people = [json.loads(line) for line in (tmp_path / "data/forget.jsonl").read_text().splitlines()]
    assert all(row["subject"] in row["question"] for row in people)
    assert len({row["subject"] for row in people}) == PEOPLE["forget"]
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    make_history(tmp_path, groups, SETTINGS, real=True)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")} == times


def test_too_small_a_disk_is_told_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "disk_usage", lambda path: SimpleNamespace(free=10**9))
    with pytest.raises(OutputError, match=r"4\.88 GB are needed, 1 GB are free"):
        make_history(tmp_path / "history", make_groups(PEOPLE, 0), SETTINGS, real=True)
    assert list(tmp_path.iterdir()) == []


def test_too_little_memory_is_told_before_the_target_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe("quickstart-smollm2", [f"output={tmp_path / 'run'}"])
    monkeypatch.setattr(planning_check, "this_device", lambda: Device("CPU", 8 * 10**9, is_gpu=False))
    check_demo_memory(recipe, force=False)
    monkeypatch.setattr(planning_check, "this_device", lambda: Device("CPU", 10**9, is_gpu=False))
    with pytest.raises(MismatchError, match="target of the demo"):
        check_demo_memory(recipe, force=False)
    (tmp_path / "run/history/target").mkdir(parents=True)
    check_demo_memory(recipe, force=False)
