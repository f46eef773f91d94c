"""Recipes that come with the package, and paths in recipes of one's own."""

from __future__ import annotations

import logging
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_table import shrink

from msa_lite.baselines.methods import check_grids, check_method
from msa_lite.cli.scores import evaluate_command
from msa_lite.comparison.published import load_published, published_tables
from msa_lite.evals.benchmarks.aggregates import resolve_compat
from msa_lite.pipeline.table.rows import table_rows
from msa_lite.recipe import (
    Recipe,
    TableRecipe,
    TrainingRecipe,
    absolute_paths,
    given_paths,
    load_any,
    load_recipe,
    load_table_recipe,
    load_training,
    shipped_recipes,
    title_of,
)

SHIPPED = shipped_recipes()
PAPER = {name.removeprefix("paper/"): path for name, path in SHIPPED.items() if name.startswith("paper/")}
PART = re.compile(r"# (Launch|Another|Needs|Override|Source|Published)[^:]*:|# (?! )|#$")
LOOP = re.compile(r"\s*for (\w) in ([^;]+); do (.+); done")


def header_of(text: str) -> list[str]:
    """The comment lines that a recipe opens with."""
    return text.partition("\n\n")[0].split("\n")


def commands_of(name: str, text: str) -> Iterator[list[str]]:
    """The words of each command in a recipe's comments. "…" stands for the command that runs the recipe itself."""
    own = f"msa-lite {'train ' * name.startswith('train/')}{name}"
    command, is_command = "", False
    for line in header_of(text):
        if part := PART.match(line):
            assert not command, f"{name}: a command without its end: {command}"
            is_command = part[1] in ("Launch", "Another", "Override")
        if not is_command:
            continue
        command += line.removeprefix("#").partition(": ")[2] if part else line.removeprefix("#")
        if command.endswith("\\"):
            command = command.removesuffix("\\")
            continue
        try:
            shlex.split(command, comments=True)
        except ValueError:  # a quotation that is still open
            continue
        yield from turns(re.sub(r"^\s*…", own, command))
        command = ""
    assert not command


def turns(command: str) -> Iterator[list[str]]:
    """The words of a command, for each turn of a loop."""
    loop = LOOP.match(command)
    for value in loop[2].split() if loop else [""]:
        yield shlex.split(loop[3].replace(f"${loop[1]}", value) if loop else command, comments=True)


def check_command(words: list[str]) -> Recipe | TrainingRecipe | TableRecipe | None:
    """Load the recipe that a command names, with its overrides; None for a command without one."""
    tool, *rest = words
    if tool in ("git", "lm_eval", "python"):
        return None
    assert tool == "msa-lite", words
    if rest[0] == "compare":
        if "--published" in rest:
            load_published(rest[rest.index("--published") + 1])
        return None
    if rest[0] == "evaluate":
        with evaluate_command.make_context("evaluate", rest[1:]) as context:
            assert context.params["out"]
        return None
    if rest[0] == "table":
        return load_table_recipe(rest[1], [word for word in rest[2:] if "=" in word])
    if rest[0] == "train":
        return load_training(rest[1], rest[2:])
    if rest[0] == "baseline":
        check_method(rest[1])
        rest = rest[2:]
    if rest[:2] == ["quickstart", "--model"]:
        rest = [f"quickstart-{rest[2]}", *rest[3:]]
    recipe = load_recipe(rest[0], rest[1:])  # `quickstart` is a command and a recipe
    check_grids(recipe.baseline.methods)
    if recipe.evaluate:
        resolve_compat(recipe.evaluate.compat, recipe.evaluate.benchmark)
    return recipe


def test_every_shipped_recipe_validates_and_says_what_it_is_for() -> None:
    trainings = {f"train/{name}" for name in ("muse_books", "restor", "small", "tofu", "tofu_c4_tofu")}
    others = {"muse/books", "muse/news", "quickstart", "quickstart-smollm2", "tofu/forget05", "tofu/forget10"}
    others |= {"rwku/stephen-king", "wmdp/cyber"}
    papers = {f"{kind}/{name}" for kind in ("paper", "table") for name in published_tables()}
    assert SHIPPED.keys() == others | trainings | papers
    for name, path in SHIPPED.items():
        recipe = load_any(path)
        assert isinstance(recipe, TrainingRecipe) == (name in trainings)
        assert recipe.output.startswith("runs/")
        if isinstance(recipe, Recipe):
            check_grids(recipe.baseline.methods)
            vector = recipe.vector
            if name.startswith(("paper/", "quickstart")):
                assert "auto" not in (vector.epochs, vector.learning_rate, vector.batch_size)
        assert title_of(path)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_command_in_a_recipes_comments_is_right(name: str) -> None:
    own = load_any(name)
    loaded = [(words, check_command(words)) for words in commands_of(name, SHIPPED[name].read_text())]
    assert any(isinstance(recipe, type(own)) for _, recipe in loaded)  # it is launched
    if name.startswith("paper/"):
        assert ["msa-lite", "table", name.removeprefix("paper/")] in [words for words, _ in loaded]


def printed_table(text: str) -> tuple[list[str], dict[str, list[str]]]:
    """The metrics, and the figures by row, of the table in a recipe's comments."""
    lines = header_of(text)
    start = next(i for i, line in enumerate(lines) if line.startswith("# Published")) + 1
    metrics, *rows = [line.removeprefix("#").split() for line in lines[start:]]
    return metrics, {" ".join(row[: -len(metrics)]): row[-len(metrics) :] for row in rows}


@pytest.mark.parametrize("name", PAPER)
def test_the_figures_beside_a_recipe_are_the_papers(name: str) -> None:
    table, text = load_published(name), PAPER[name].read_text()
    metrics, rows = printed_table(text)
    assert metrics == list(table.rows["Target"])
    assert rows == {label: [table.rows[label][metric].printed for metric in metrics] for label in rows}
    assert {label for label in table.rows if label in ("Target", "Ideal") or label.startswith("MSA ")} <= {*rows}
    assert f"--published {name}" in text


def test_papers_grids_are_the_papers() -> None:
    """App. "Choosing Hyperparameters", "Experiments on RESTOR", "Experiments on MUSE-Books"; α = 1 added for the 1B."""
    most, five, three = [0.5, 0.75, 1.0, 1.25, 1.5, 3.0], [0.5, 0.75, 1.0, 1.25, 1.5], [0.5, 1.0, 1.5]
    grids = {"restor": ([0.75, 1.0, 1.5, 2.0], [0.0]), "muse": ([0.75, 1.0, 1.5], [0.0, 0.75, 1.0, 1.5])}
    for name in PAPER:
        recipe = load_recipe(f"paper/{name}")
        benchmark, vector, small = recipe.evaluate.benchmark, recipe.vector, name.find("-1b") > 0
        assert (recipe.alphas, recipe.betas) == grids.get(benchmark, (most, five if small else three))
        assert (vector.mode, vector.epochs, vector.learning_rate) == ("full", 5, 1e-5)
        assert (vector.weight_decay, vector.warmup_epochs) == (0.01, 1)
        assert recipe.vector_of("retain").epochs == (3 if benchmark == "muse" else 5)
        assert recipe.retain.data.sample == ("match_forget" if benchmark == "tofu" else None)
        assert recipe.select.validation == (0.1 if benchmark == "restor" else 0.15)
        assert (recipe.filters, recipe.hold) == ([0.0], 0.0)  # neither is of the paper
        assert (recipe.baseline.start == "prior") == name.endswith("checkpoints")
        if recipe.baseline.methods:
            assert recipe.baseline.epochs == (10 if small else None)


@pytest.mark.parametrize("name", PAPER)
def test_a_shipped_table_has_the_papers_rows_and_makes_all_its_models(name: str) -> None:
    rows = table_rows(load_table_recipe(name))
    labels = {row.label for row in rows if row.kind != "train"}
    assert labels == load_published(name).rows.keys() - {"Target", "Ideal"}
    for row in rows:
        if isinstance(row.recipe, Recipe):
            models = {row.recipe.target, row.recipe.prior, row.recipe.evaluate.ideal}
            local = {Path(str(model)).parent for model in models if str(model).startswith("runs/")}
            assert local == {other.folder for other in rows if other.label in row.needs}


@pytest.mark.parametrize("name", PAPER)
def test_a_small_table_has_the_same_rows_and_trains_all_its_models(name: str) -> None:
    small = shrink(load_table_recipe(name, ["data=somewhere"]))
    rows = table_rows(small.table)
    labels = [row.label for row in table_rows(load_table_recipe(name)) if row.kind != "train"]
    runs = [row for row in rows if row.kind != "train"]
    assert [row.label for row in runs if row.label != "MSA (filter)"] == labels
    assert [row.label for row in runs if isinstance(row.recipe, Recipe) and any(row.recipe.filters)] == ["MSA (filter)"]
    made = {row.folder / f"{n}-{s.title}" for row in rows if isinstance(row.recipe, TrainingRecipe)
            for n, s in enumerate(row.recipe.stages, 1)}  # fmt: skip
    for row in rows:
        if isinstance(row.recipe, Recipe):
            assert {Path(str(m)) for m in (row.recipe.target, row.recipe.prior, row.recipe.evaluate.ideal)} <= made
            assert Path(row.recipe.forget.data.path).parent == small.data
            rates = {keys.get("learning_rate") for keys in row.recipe.baseline.methods.values()} - {None}
            assert rates <= {row.recipe.vector.learning_rate}, "no rate of a large model"


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


def test_what_lies_beside_the_recipe_is_taken_from_there_and_told_in_a_line(
    place: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("msa_lite"), "propagate", True)
    caplog.set_level(logging.INFO, "msa_lite.notices")
    recipe = load_recipe(write(place))
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
    assert (recipe.evaluate.holdout.path, recipe.evaluate.data) == ("holdout.jsonl", "locuslab/TOFU")
    assert recipe.output == "runs/x"


def test_the_recipes_folder_comes_before_the_working_folder_also_for_a_judges_prompts(place: Path) -> None:
    for name in ("holdout.jsonl", "prompts.yaml"):
        (place / name).touch()
    judge = {"kind": "openai", "prompts": "prompts.yaml"}
    evaluate = load_recipe(write(place, evaluate=RECIPE["evaluate"] | {"judge": judge})).evaluate
    assert evaluate.holdout.path == os.path.relpath(place / "holdout.jsonl")
    assert evaluate.judge.prompts == os.path.relpath(place / "prompts.yaml")


def test_a_folder_that_only_has_the_name_of_a_hub_model_is_not_taken(place: Path) -> None:
    (place / "org/model").mkdir(parents=True)
    assert load_recipe(write(place, target="org/model")).target == "org/model"
    (place / "org/model/adapter_config.json").touch()
    assert load_recipe(write(place, target="org/model")).target == os.path.relpath(place / "org/model")
    assert load_recipe(write(place, target="org/model@main")).target == "org/model@main"


@pytest.mark.parametrize("name", ["$output/history/target", "~/models/target", "/models/target"])
def test_paths_that_are_not_relative_stay(place: Path, name: str) -> None:
    assert load_recipe(write(place, target=name)).target == name.replace("$output", "runs/x")


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
    values = {"target": "holdout.jsonl", "forget": {"data": {"path": "./holdout.jsonl"}}, "prior": "org/model"}
    full = str(place.parent / "here/holdout.jsonl")
    assert given_paths(values, Path("runs/x")) == {full: "./holdout.jsonl"}
    assert given_paths({"target": full}, Path("runs/x")) == {}  # the recipe itself has the full path


def test_what_is_seen_from_the_working_folder_stays_as_it_is_written(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_recipe(write(place), ["target=models/target"]).target == "models/target"
    assert load_recipe(RECIPE).target == "models/target"
    monkeypatch.chdir(place)
    assert load_recipe(Path("mine.yaml")).target == "models/target"
