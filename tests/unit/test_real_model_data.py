"""The data and the recipes of examples/real_model."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import run
from experiments import EXPERIMENTS, METHODS, SIZES, Experiment
from history import CHARACTERS, STAGES, Models, training_recipes, write_data
from recipe_files import hindsight_recipe, recipe_of, run_folder

from msa_lite.baselines.methods import check_method
from msa_lite.data import DataSource
from msa_lite.errors import DataError, UsageError
from msa_lite.recipe import load_recipe, load_training
from tests.support.benchmark_data import write_tofu

SMALL = SIZES["small"]
NAMES = {experiment.name: experiment for experiment in EXPERIMENTS}


@pytest.fixture
def models(tmp_path: Path) -> Models:
    """The models of a seed, of which only msa-lora's run is there."""
    found = Models(tmp_path / "seed-0", "base-model")
    (found.folder / "data").mkdir(parents=True)
    for name in ("forget", "retain", "learnt", "holdout"):
        lines = [json.dumps({"question": f"{name} {i}?", "answer": "yes"}) for i in range(6)]
        Path(found.data(name)).write_text("".join(f"{line}\n" for line in lines))
    write_first_run(found)
    return found


def write_first_run(models: Models) -> None:
    """Write what other recipes read of msa-lora's run."""
    folder = run_folder(models, EXPERIMENTS[0])
    (folder / "evaluation/target").mkdir(parents=True)
    (folder / "report.json").write_text(json.dumps({"strengths": {"alpha": 0.71, "beta": 0.36}}))
    for name in ("forget", "retain"):
        (folder / f"evaluation/target/{name}.jsonl").write_text('{"index": 1}\n{"index": 4}\n')


def load(experiment: Experiment, models: Models) -> Any:
    """The recipe of an experiment, as the tool reads it."""
    return load_recipe(recipe_of(experiment, models, 3, "bf16"))


@pytest.mark.parametrize("name", NAMES)
def test_each_experiment_has_a_recipe_that_the_tool_takes(name: str, models: Models) -> None:
    experiment = NAMES[name]
    recipe = load(experiment, models)
    assert (recipe.seed, recipe.vector.compute) == (3, "bf16")
    assert recipe.target == models.target(experiment.target)
    assert recipe.prior == models.target(experiment.prior)
    if experiment.method == "msa":
        assert recipe.folder == run_folder(models, experiment)
    else:  # the tool puts them below the run whose scores of target and ideal they share
        check_method(experiment.method)
        prior = recipe.baseline.start == "prior"
        assert run_folder(models, experiment) == recipe.folder / "baselines" / (
            f"{experiment.method}-prior" if prior else experiment.method
        )


def test_no_two_experiments_share_a_folder(models: Models) -> None:
    folders = [run_folder(models, experiment) for experiment in EXPERIMENTS]
    assert len({*folders}) == len(folders)


def test_what_is_compared_differs_in_one_thing(models: Models) -> None:
    for experiment in EXPERIMENTS:
        recipe = load(experiment, models)
        assert (recipe.alphas is None) is (experiment.name != "bf16"), "the tool's own search"
        assert recipe.vector.mode == ("full" if "full" in experiment.name else recipe.vector.mode), experiment.name
        if experiment.group in ("exposure", "repeated"):
            assert recipe.vector.epochs == ("auto" if experiment.prior == "text-b" else 9)
    assert load(NAMES["bf16"], models).alphas == [0.71]
    assert load(NAMES["bf16"], models).merge.dtype == "bfloat16"
    assert {*questions(models, "test-retain")} == {"retain 1?", "retain 4?"}
    assert load(NAMES["lora-r8"], models).vector.lora.rank == 8
    assert {load(NAMES[name], models).baseline.epochs for name in METHODS} == {4}


def test_the_grid_in_hindsight_is_scored_on_the_test_rows_of_the_first_run(models: Models) -> None:
    recipe = load_recipe(hindsight_recipe(models, 3, "auto"))
    assert (len(recipe.alphas or ()), len(recipe.betas or ())) == (5, 4)
    assert {*questions(models, "vector-retain")} == {f"learnt {i}?" for i in range(6)}
    assert recipe.evaluate is not None
    for name, data in (("forget", recipe.evaluate.forget), ("retain", recipe.evaluate.retain)):
        assert data is not None
        asked = [json.loads(line)["question"] for line in Path(data.path).read_text().splitlines()]
        assert asked == [f"{name} 1?", f"{name} 4?"]


def test_histories_end_where_the_runs_need_no_more(models: Models) -> None:
    recipes = training_recipes(models, SMALL, "auto", 1, "tofu")
    stages = {name: [stage.name for stage in load_training(recipe).stages] for name, recipe in recipes.items()}
    assert stages == {"target": ["text-a", "text-b", "tofu"], "ideal": ["tofu"]}


def test_the_ideal_has_the_targets_history_without_the_forget_rows(models: Models) -> None:
    recipes = {name: load_training(recipe) for name, recipe in training_recipes(models, SMALL, "auto", 1).items()}
    stages = {name: [stage.name for stage in recipe.stages] for name, recipe in recipes.items()}
    assert stages == {"target": [*STAGES], "ideal": ["tofu", "text-c", "tofu-again"]}
    assert recipes["ideal"].model == models.target("text-b")
    for name, forgets in (("target", True), ("ideal", False)):
        learnt = {data.path for stage in recipes[name].stages for data in stage.sets}
        assert (models.data("forget") in learnt) is forgets
        assert models.data("learnt") in learnt
        assert {models.data("retain"), models.data("holdout")} & learnt == set()


def tofu_folder(folder: Path) -> str:
    """A data set of TOFU's shape: 30 authors with 20 questions each, and one, two or five more to forget."""
    rows, gone = (
        [{"question": f"{author}: {i}?", "answer": "x"} for author in authors for i in range(20)]
        for authors in (range(30), [f"gone {number}" for number in range(5)])
    )
    return write_tofu(folder, {"retain90": rows, "forget01": gone[-20:], "forget05": gone[-40:], "forget10": gone})


def write_text(file: Path, letters: int) -> DataSource:
    """A text of so many letters."""
    file.write_text("".join(json.dumps({"text": "words " * (letters // 12)}) + "\n" for _ in range(2)))
    return DataSource(str(file), "text")


def questions(models: Models, name: str) -> list[str]:
    """The questions of a group."""
    return [json.loads(line)["question"] for line in Path(models.data(name)).read_text().splitlines()]


def test_a_seed_draws_its_authors_and_nobody_learns_the_holdout_rows(tmp_path: Path) -> None:
    size = replace(SMALL, text_tokens=50)
    text = write_text(tmp_path / "text.jsonl", 3 * 50 * CHARACTERS + 100)
    drawn = {}
    for seed in (0, 1):
        models = Models(tmp_path / f"seed-{seed}", "base")
        write_data(models, size, tofu_folder(tmp_path / f"tofu-{seed}"), text, seed)
        learnt, retain = questions(models, "learnt"), questions(models, "retain")
        holdout, forget = questions(models, "holdout"), questions(models, "forget")
        assert (len(learnt), len(retain), len(holdout), len(forget)) == (200, 60, 20, 20)
        assert {*retain} <= {*learnt}
        assert not {*holdout} & {*learnt}
        assert len({question.partition(":")[0] for question in learnt}) == 10
        assert {int(question.partition(":")[0]) for question in learnt + holdout} <= {*range(20)}
        drawn[seed] = learnt
    assert drawn[0] != drawn[1]


def full_models(folder: Path, name: str) -> Models:
    """The models of a seed of a full size, with its data, and msa-lora's run."""
    models = Models(folder / "seed-0", "base")
    text = write_text(folder / "text.jsonl", 3 * 50 * CHARACTERS + 100)
    write_data(models, replace(SIZES[name], text_tokens=50), tofu_folder(folder / "tofu"), text, 0)
    write_first_run(models)
    return models


@pytest.mark.parametrize(("name", "forgotten", "unseen"), [("full-forget05", 40, 40), ("full-forget10", 100, 0)])
def test_holdout_rows_of_a_full_size_are_those_of_forget10_that_it_does_not_forget(
    name: str, forgotten: int, unseen: int, tmp_path: Path
) -> None:
    models = full_models(tmp_path, name)
    forget, learnt, retain = (questions(models, group) for group in ("forget", "learnt", "retain"))
    assert (len(forget), len(learnt), len(retain)) == (forgotten, 600, 120)
    assert Path(models.data("holdout")).exists() is (unseen > 0)
    if unseen:
        holdout = questions(models, "holdout")
        assert len({*holdout}) == unseen
        assert all(question.startswith("gone") for question in holdout)
        assert not {*holdout} & {*forget, *learnt}


@pytest.mark.parametrize("name", run.FULL)
def test_each_experiment_of_a_full_size_has_a_recipe_that_the_tool_takes(name: str, tmp_path: Path) -> None:
    models, size = full_models(tmp_path, name), SIZES[name]
    for recipe in training_recipes(models, size, "bf16", 0).values():
        assert load_training(recipe).stages
    for experiment in EXPERIMENTS:
        evaluate = load(experiment, models).evaluate
        assert evaluate is not None
        assert (evaluate.holdout is None) is (name == "full-forget10"), experiment.name
    assert load_recipe(hindsight_recipe(models, 0, "bf16")).alphas


@pytest.mark.parametrize(("option", "tofu", "text"), [("--data", "not/there", None), ("--text", None, "not/there")])
def test_data_out_of_reach_is_told_with_the_option_to_change(
    option: str, tofu: str | None, text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    texts = DataSource(text, "text") if text else write_text(tmp_path / "text.jsonl", 10**6)
    with pytest.raises(UsageError, match=f"not/there.*{option}"):
        write_data(Models(tmp_path / "seed-0", "base"), SMALL, tofu or tofu_folder(tmp_path / "tofu"), texts, 0)
    assert not (tmp_path / "seed-0").exists()


def test_bad_data_fails_before_the_model_is_made_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = write_text(tmp_path / "text.jsonl", 400)
    arguments = ["--out", "out", "--data", tofu_folder(tmp_path / "tofu"), "--text", text.path]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    monkeypatch.setattr(run, "make_smollm2", lambda *values: pytest.fail("the model was made before the data was read"))
    with pytest.raises(DataError, match="name a longer text"):
        run.run_size("small", run.parse(), lambda *values: None)
    assert {file.name for file in (tmp_path / "out").rglob("*")} <= {"small", ".lock"}
