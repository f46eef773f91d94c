"""Sweeps from recipe to merged model: what is tried, written and when, what a stop leaves, what breaks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import msa_lite
from msa_lite.choose import validation
from msa_lite.data import load_rows, rows_identity
from msa_lite.errors import StageError, UsageError
from msa_lite.evals.engine.models import Runner
from msa_lite.evals.scores.records import read_records
from msa_lite.io.files.writing import digest, json_form
from msa_lite.io.finished.seal import load_manifest, verify_folder
from msa_lite.pipeline.run.msa import merge_arguments
from msa_lite.recipe import load_recipe
from msa_lite.recipe.schema import AUTO_FILTERS
from msa_lite.report import load_report
from msa_lite.report.run.choice import candidate_name
from msa_lite.report.run.stages import load_stages
from msa_lite.settings import Columns
from tests.e2e.conftest import CallCli, read_lines, sweep_recipe, times, tiny_recipe, write_recipe
from tests.support.drawing import Drawing
from tests.support.pages import page_text

TOFU = Path(__file__).parents[3] / "shared" / "data" / "tofu"
MODELS = ("ideal", "target", "unlearned")
GRID = [(0.5, 0.0), (0.5, 0.5), (1.0, 0.0), (1.0, 0.5)]


@pytest.fixture(scope="module")
def history(learnt: Path) -> Path:
    return learnt


@pytest.fixture(scope="module")
def swept(history: Path, tmp_path_factory: pytest.TempPathFactory, drawing: Drawing) -> tuple[dict[str, Any], Any]:
    """(recipe, result) of a sweep over two by two points."""
    recipe = sweep_recipe(history, tmp_path_factory.mktemp("swept") / "run")
    with drawing():
        result = msa_lite.sweep(recipe)
    assert result is not None
    return recipe, result


def choice_of(run: Path) -> Any:
    return json.loads((run / "sweep/choice.json").read_text())


# What is tried and written


def test_the_best_point_is_merged_and_scored_again_on_the_same_rows(swept: tuple[dict[str, Any], Any]) -> None:
    _, result = swept
    run, choice = result.folder, choice_of(result.folder)
    names = {path.name for path in (run / "evaluation").glob("*_validation")}
    assert names == {f"{name}_validation" for name in ("ideal", "prior", "target", "unlearned")}
    own, merged = run / "sweep" / candidate_name(result.choice.values), run / "evaluation/unlearned_validation"
    before, after = load_report(own), load_report(merged)
    assert before.split == after.split == "validation"
    # An fp32 model is not rounded by the merge: the same answers, word for word.
    assert {name: after.metrics[name] for name in before.metrics} == dict(before.metrics)
    for name in ("forget", "retain"):
        assert read_records(own / f"{name}.jsonl") == read_records(merged / f"{name}.jsonl")
    kept = f"{choice['score']:.4f}" if choice["met"] else f"conditions not met, short by {-choice['score']:.4f}"
    assert result.notes == [f"Kept, the chosen point in memory: {kept}; as merged model: {kept}.\n"]
    assert json_form(result)["validation"] == {"in_memory": before.values(), "merged": after.values()}
    for stage in ("sweep", "model", "vectors/forget", "vectors/retain", "evaluation/unlearned_validation"):
        assert verify_folder(run / stage) == []
    assert result.merged.tensors_touched > 0


def test_each_point_of_the_grid_is_tried_and_the_best_is_chosen(swept: tuple[dict[str, Any], Any]) -> None:
    recipe, result = swept
    scores = choice_of(result.folder)["scores"]
    assert [(line["alpha"], line["beta"]) for line in scores] == GRID
    chosen = max(scores, key=lambda line: (line["met"], line["score"]))
    assert (result.choice.values["alpha"], result.choice.values["beta"]) == (chosen["alpha"], chosen["beta"])
    sets = {place: data.source(Columns()) for place, data in load_recipe(recipe).data_sets.items()}
    content = digest({place: rows_identity(load_rows(source)) for place, source in sets.items()})
    assert load_stages(result.folder).data == content, "whole sets, and not the rows that are drawn by the seed"
    markdown = (result.folder / "sweep/table.md").read_text()
    assert all(f"| {alpha:g} | {beta:g} |" in markdown for alpha, beta in GRID)
    assert {path.name for path in (result.folder / "sweep").glob("alpha-*")} == {
        f"alpha-{alpha:g}_beta-{beta:g}" for alpha, beta in GRID
    }


def test_a_second_sweep_does_nothing_and_a_run_goes_on_with_the_test_rows(swept: tuple[dict[str, Any], Any]) -> None:
    recipe, result = swept
    labels: list[str] = []
    before = times(result.folder, "*")
    again = msa_lite.sweep(recipe, progress=lambda label, done, total: labels.append(label))
    assert again is not None
    assert labels == []
    assert again.choice == result.choice
    after = times(result.folder, "*")
    assert {Path(path).name for path in before if before[path] != after[path]} == {"recipe.yaml", "stages.json"}
    whole = msa_lite.run(recipe, progress=lambda label, done, total: labels.extend([] if done else [label]))
    assert whole is not None
    assert {label for label in labels if "probe" not in label} == {
        f"scores: {name}" for name in MODELS if name != "target"
    }
    assert {report.split for report in whole.reports.values()} == {"test"}
    text = page_text(result.folder)
    assert "the model as it is written scores" in text
    assert "kept ↑ |" in text
    seen, tested = (
        {record["index"] for record in read_records(result.folder / "evaluation" / name / "retain.jsonl")}
        for name in ("unlearned_validation", "unlearned")
    )
    assert seen
    assert not seen & tested
    assert (whole.point.alpha, whole.point.beta) == (result.choice.values["alpha"], result.choice.values["beta"])


# Points that break


def test_a_point_that_breaks_is_recorded_and_never_chosen(
    grid: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", logger="msa_lite"):
        result = msa_lite.sweep(grid, ["forget.alpha=[0.001, 1e30, 1000]", "retain.beta=0.001", "evaluate.limit=16"])
    assert result is not None
    assert result.choice.values["alpha"] == 0.001
    lines = {line["alpha"]: line for line in choice_of(tmp_path / "run")["scores"]}
    assert lines[1e30]["score"] is lines[1000]["score"] is None
    assert "the model's outputs are no numbers (NaN)" in lines[1e30]["note"]
    assert "is left of the target's probability_r and rouge_l_r" in lines[1000]["note"]
    assert "alpha-1e+30_beta-0.001: the model's outputs are no numbers" in caplog.text
    assert load_report(tmp_path / "run/sweep/alpha-1e+30_beta-0.001").metrics == {}
    markdown = (tmp_path / "run/sweep/table.md").read_text()
    assert markdown.count("| broken |") == 2
    assert "no numbers" in markdown
    assert "α = 1000, β = 0.001: " in markdown


# Rules of choice, end to end


@pytest.mark.skipif(not TOFU.is_dir(), reason="no benchmark rows in ../shared/data/tofu")
def test_tofu_is_chosen_by_on_its_validation_part(grid: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    grid["evaluate"] = {"benchmark": "tofu", "split": "forget10", "data": str(TOFU), "limit": 4}
    grid["select"] = {"score": "tofu", "validation": 0.25}
    grid["retain"]["beta"] = 0.5
    ahead = [msa_lite.dry_run(grid).notes, msa_lite.plan(grid).notes]
    result = msa_lite.run(grid)
    assert result is not None
    run, choice = result.folder, choice_of(result.folder)
    tried, again = load_report(run / "sweep/alpha-1_beta-0.5"), load_report(run / "evaluation/unlearned_validation")
    assert tried.split == again.split == load_report(run / "sweep/target").split == "forget10 validation"
    assert choice["rule"] == "tofu"
    assert all(line["score"] is not None for line in choice["scores"])
    (doubt,) = [doubt for doubt in choice["doubts"] if "judge" in doubt]
    assert doubt == (
        "the choice leaves out acc_forget, acc_recover, acc_retain (3 of the 5 terms of the paper's score, 4 of its 8 "
        "weights): no judge is set. Set evaluate.judge, of kind openai; and there is no ideal, whose answers the judge "
        "compares with. Give evaluate.ideal"
    )
    assert [doubt in notes for notes in ahead] == [True, True]
    assert [record.message for record in caplog.records].count(doubt) == 1
    assert not any(f": {doubt}" in record.message for record in caplog.records), "said once, at the start"
    assert doubt in (run / "sweep/table.md").read_text()
    text = page_text(run)
    assert doubt in text
    assert "Scores on forget10 test rows" in text
    assert "on forget10 validation rows" in text
    for name in ("forget", "retain", "real_authors", "world_facts"):
        seen, tested = (
            {record["index"] for record in read_records(run / folder / f"{name}.jsonl")}
            for folder in ("sweep/target", "evaluation/unlearned")
        )
        assert (len(seen), len(tested), seen & tested) == (1, 3, set()), name


# Recipes that leave alpha and beta to the search: what is tried, written and asked once, what a stop leaves.


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


def test_a_recipe_without_strengths_ends_in_a_model(searched: tuple[dict[str, Any], Any]) -> None:
    recipe, result = searched
    run, choice = result.folder, choice_of(result.folder)
    tried = [(line["alpha"], line["beta"], line["filter"]) for line in choice["scores"]]
    assert tried[0] == (1.0, 0.0, 4.0)
    assert len(set(tried)) == len(tried) <= 12
    assert tuple(result.chosen.values()) in tried
    assert all("note" in line for line in choice["scores"] if not line["met"])
    inputs = (load_manifest(run / "sweep") or {})["inputs"]
    assert inputs["candidates"] == {"alpha": "auto", "beta": [0.0], "filter": [*AUTO_FILTERS]}
    assert [*inputs["prior"]] == ["forget.jsonl"]  # what a model scores that never saw the rows
    for stage in ("sweep", "model", "vectors/forget", "evaluation/prior_validation"):
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
    page, merging = tmp_path / "run/report.html", set[bool]()
    page.write_text("of a former model")
    shutil.rmtree(tmp_path / "run/model")
    msa_lite.sweep(recipe, progress=lambda label, done, total: merging.add(label == "merge" and page.exists()))
    assert merging == {False}, "a kill after the merge leaves no report of another model"


def test_a_request_about_a_text_ends_in_a_choice_on_that_text(
    auto: dict[str, Any], history: Path, tmp_path: Path
) -> None:
    for name in ("forget", "retain", "holdout"):
        rows = read_lines(history / f"data/{name}.jsonl")
        text = " ".join(f"{row['question']} {row['answer']}" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    data = {n: {"path": str(tmp_path / f"{n}.jsonl"), "format": "text"} for n in ("forget", "retain", "holdout")}
    auto["forget"]["data"], auto["retain"] = data["forget"], {"data": data["retain"], "beta": 0.0}
    auto["evaluate"] = {"holdout": data["holdout"]}
    auto["vector"]["max_length"] = 48
    assert msa_lite.run(auto) is not None
    choice = choice_of(tmp_path / "run")
    assert choice["rule"] == "extraction"
    assert all(line["score"] is not None or line["note"] for line in choice["scores"])
    target = json.loads((tmp_path / "run/sweep/target/report.json").read_text())["metrics"]
    assert ("probability_f" in target, "rouge_l_f" in target) == (True, False)
    assert "passages in the filter" in page_text(tmp_path / "run")


# What a sweep refuses, by the command line: each with a message of its own, before anything is written.


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["forget.alpha=[1,.nan]"], "forget.alpha"),
        (["forget.alpha=1", "retain.beta=0.5"], "forget.alpha, retain.beta: one point"),
        (["retain={beta: [0, 1]}"], "retain.data"),
        (["evaluate=null"], "do not set evaluate to null"),
        (["evaluate.ideal=null", "select.score=muse-gap"], "compares with the ideal model; give evaluate.ideal"),
        (["select.kep=1"], "did you mean 'keep'"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_written(
    overrides: list[str], told: str, grid: dict[str, Any], call_cli: CallCli, tmp_path: Path
) -> None:
    path = write_recipe(grid, tmp_path)
    found, said, err = call_cli("run", path, "--until", "sweep", *overrides)
    assert (found, said) == (2, "")
    assert told in err
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]
