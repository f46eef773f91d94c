"""Write the recipe of each experiment, so that every result has a command that repeats it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from experiments import EXPERIMENTS, FROM_PRIOR, HINDSIGHT, Experiment
from history import Models, row_line

from msa_lite.data import DataSource, load_rows
from msa_lite.io.files.reading import read_object
from msa_lite.io.files.writing import write_text
from msa_lite.pipeline.prepare.questions import divide_retain
from msa_lite.recipe import load_recipe

HINDSIGHT_FOLDER = "hindsight"
Recipe = dict[str, Any]


def run_folder(models: Models, experiment: Experiment) -> Path:
    """Return the folder of an experiment's run. Baselines lie in that of the experiment whose recipe they share."""
    if experiment.method == "msa":
        return models.folder / "runs" / experiment.name
    start = "-prior" if FROM_PRIOR[0] in experiment.overrides else ""
    return run_folder(models, owner_of(experiment)) / "baselines" / f"{experiment.method}{start}"


def owner_of(experiment: Experiment) -> Experiment:
    """Return the experiment of MSA whose recipe a baseline shares; itself, if it is one."""
    if experiment.method == "msa":
        return experiment
    return next(one for one in EXPERIMENTS if one.name == experiment.owner)


def tofu_folder(models: Models, name: str) -> Path:
    """Return the folder of a model's scores by TOFU's own metrics."""
    return models.folder / "tofu" / name


def recipe_of(experiment: Experiment, models: Models, seed: int, compute: str) -> Recipe:
    """Return the recipe of an experiment. All that is not named here is a default of msa-lite."""
    owner = owner_of(experiment)
    recipe: Recipe = {
        "target": models.target(experiment.target),
        "prior": models.target(experiment.prior),
        "forget": {"data": {"path": models.data("forget")}},
        "retain": {"data": {"path": models.data("learnt"), "sample": "match_forget"}},
        "vector": {"compute": compute},
        "merge": {"filter": "off"},
        "evaluate": {
            "retain": {"path": models.data("retain")},
            "ideal": models.ideal(experiment.target),
            "max_new_tokens": 64,
        },
        "baseline": {"epochs": 4},
        "output": str(run_folder(models, owner)),
        "seed": seed,
    }
    if Path(models.data("holdout")).is_file():
        recipe["evaluate"]["holdout"] = {"path": models.data("holdout")}
    if experiment.strengths_of:
        found = read_object(models.folder / "runs" / experiment.strengths_of / "report.json")
        recipe["forget"]["alpha"], recipe["retain"]["beta"] = found["strengths"]["alpha"], found["strengths"]["beta"]
        _score_test_rows(recipe, models)  # without a choice, it would score the validation rows, too
    inherited = () if owner is experiment else owner.overrides
    return _changed(recipe, (*inherited, *experiment.overrides))


def hindsight_recipe(models: Models, seed: int, compute: str) -> Recipe:
    """Return the recipe of the sweep on test rows: the vectors of msa-lora, a grid of points, and these rows alone."""
    recipe = recipe_of(EXPERIMENTS[0], models, seed, compute)
    _score_test_rows(recipe, models)
    recipe["select"] = {"validation": 0.95}  # as good as all of them; the rest is not looked at
    recipe["verdict"] = False  # a target that does not know the rows is a result, too
    recipe["output"] = str(models.folder / HINDSIGHT_FOLDER)
    return _changed(recipe, HINDSIGHT)


def _score_test_rows(recipe: Recipe, models: Models) -> None:
    """Change a recipe with the vectors of msa-lora so that it scores the test rows of msa-lora alone."""
    recipe["retain"]["data"] = {"path": _vector_rows(models, recipe)}  # the rows to score decide what is drawn
    for name in ("forget", "retain"):
        rows = Path(models.data(name)).read_text("utf-8").splitlines()
        records = run_folder(models, EXPERIMENTS[0]) / "evaluation/target" / f"{name}.jsonl"
        tested = [rows[json.loads(line)["index"]] for line in records.read_text("utf-8").splitlines()]
        write_text(Path(models.data(f"test-{name}")), "".join(f"{row}\n" for row in tested))
        recipe["evaluate"][name] = {"path": models.data(f"test-{name}")}


def _vector_rows(models: Models, recipe: Recipe) -> str:
    """Write the retain rows that the vector of a recipe learns into a file; return its path."""
    files = {"forget": "forget", "retain": "learnt", "evaluate.retain": "retain"}
    rows = {place: load_rows(DataSource(models.data(name))) for place, name in files.items()}
    learnt = divide_retain(load_recipe(recipe), rows).sample
    write_text(Path(models.data("vector-retain")), "".join(row_line(row) for row in learnt))
    return models.data("vector-retain")


def _changed(recipe: Recipe, overrides: Iterable[str]) -> Recipe:
    """Return a recipe with keys changed, each as `key.sub=value`."""
    for override in overrides:
        path, _, value = override.partition("=")
        *sections, key = path.split(".")
        section: Any = recipe
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = yaml.safe_load(value)
    return recipe
