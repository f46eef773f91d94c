"""The data and the recipes of examples/real_model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from experiments import EXPERIMENTS, SIZES, Experiment
from history import CHARACTERS, STAGES, Models, training_recipes, write_data
from recipe_files import recipe_of, run_folder

from msa_lite.baselines.methods import check_method
from msa_lite.data import DataSource
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
