"""The runs of examples/real_model: what is fixed before them, their recipes, what a stop or a fault leaves."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import history
import numpy as np
import pytest
import run
from experiments import EXPERIMENTS, FULL, METHODS, SIZES, Experiment
from history import STAGES, Models, training_recipes, write_data
from plan import State, distance, fix_plan
from recipe_files import hindsight_recipe, recipe_of, run_folder
from safetensors.numpy import save_file

from msa_lite.baselines.methods import check_method
from msa_lite.data import DataSource
from msa_lite.errors import DataError, MismatchError, OutputError, StageError, UsageError
from msa_lite.io.lock import locked
from msa_lite.recipe import load_recipe, load_training
from tests.tofu_data import write_tofu

SMALL = SIZES["small"]
NAMES = {experiment.name: experiment for experiment in EXPERIMENTS}


@pytest.fixture
def models(tmp_path: Path) -> Models:
    """The models of a seed, of which only msa-lora's run is there."""
    found = Models(tmp_path / "seed-0", "base-model")
    folder = found.folder / "runs/msa-lora"
    (folder / "evaluation/target").mkdir(parents=True)
    (folder / "report.json").write_text(json.dumps({"strengths": {"alpha": 0.71, "beta": 0.36}}))
    (found.folder / "data").mkdir()
    for name in ("forget", "retain", "learnt", "holdout"):
        lines = [json.dumps({"question": f"{name} {i}?", "answer": "yes"}) for i in range(6)]
        Path(found.data(name)).write_text("".join(f"{line}\n" for line in lines))
        (folder / f"evaluation/target/{name}.jsonl").write_text('{"index": 1}\n{"index": 4}\n')
    return found


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


def test_settings_are_tried_with_one_seed_unless_they_are_named() -> None:
    assert run.chosen([], 0) == [*EXPERIMENTS]
    assert {one.name for one in EXPERIMENTS} - {one.name for one in run.chosen([], 1)} >= {
        "lora-r8",
        "bf16",
        "npo-prior",
    }
    assert {"msa-lora", "msa-full", "undial", "text-after"} <= {one.name for one in run.chosen([], 1)}
    assert [one.name for one in run.chosen(["bf16"], 1)] == ["bf16"]


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
    """A data set of TOFU's shape: 30 authors with 20 questions each, and one more to forget."""
    rows = [{"question": f"{author}: {i}?", "answer": "x"} for author in range(30) for i in range(20)]
    forget = [{"question": f"gone: {i}?", "answer": "x"} for i in range(20)]
    return write_tofu(folder, {"retain90": rows, "forget01": forget})


def write_text(file: Path, letters: int) -> DataSource:
    """A text of so many letters."""
    file.write_text("".join(json.dumps({"text": "words " * (letters // 12)}) + "\n" for _ in range(2)))
    return DataSource(str(file), "text")


def questions(models: Models, name: str) -> list[str]:
    """The questions of a group."""
    return [json.loads(line)["question"] for line in Path(models.data(name)).read_text().splitlines()]


def test_a_seed_draws_its_authors_and_nobody_learns_the_holdout_rows(tmp_path: Path) -> None:
    size = replace(SMALL, text_tokens=50)
    text = write_text(tmp_path / "text.jsonl", 3 * 50 * history.CHARACTERS + 100)
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


def test_a_short_text_is_refused_with_the_option_to_change(tmp_path: Path) -> None:
    size = replace(SMALL, text_tokens=50)
    text = write_text(tmp_path / "text.jsonl", 400)
    with pytest.raises(DataError, match="--text"):
        write_data(Models(tmp_path / "seed-0", "base"), size, tofu_folder(tmp_path / "tofu"), text, 0)


def test_the_plan_is_fixed_once_and_may_only_grow(tmp_path: Path) -> None:
    fix_plan(tmp_path, "small", SMALL, [0], EXPERIMENTS[:2], "a model")
    first = json.loads((tmp_path / "plan.json").read_text())
    fix_plan(tmp_path, "small", SMALL, [1], EXPERIMENTS[:3], "a model")
    second = json.loads((tmp_path / "plan.json").read_text())
    assert (first["seeds"], second["seeds"]) == ([0], [0, 1])
    assert second["experiments"][:2] == first["experiments"]
    assert [entry["name"] for entry in second["experiments"]] == [one.name for one in EXPERIMENTS[:3]]
    changed = [replace(EXPERIMENTS[0], overrides=FULL), *EXPERIMENTS[1:3]]
    with pytest.raises(UsageError, match=r"msa-lora(.|\n)*") as fault:
        fix_plan(tmp_path, "small", replace(SMALL, epochs=9), [0], changed, "a model")
    assert "size small" in str(fault.value)
    assert json.loads((tmp_path / "plan.json").read_text()) == second


def test_the_words_of_an_experiment_may_change_after_it_was_fixed(tmp_path: Path) -> None:
    fix_plan(tmp_path, "small", SMALL, [0], EXPERIMENTS[:1], "a model")
    fixed = json.loads((tmp_path / "plan.json").read_text())["experiments"][0]
    fix_plan(tmp_path, "small", SMALL, [0], [replace(EXPERIMENTS[0], what="in other words")], "a model")
    assert json.loads((tmp_path / "plan.json").read_text())["experiments"] == [fixed | {"what": "in other words"}]


def test_seeds_side_by_side_wait_for_each_other(tmp_path: Path) -> None:
    events = []

    def second() -> None:
        with run.alone(tmp_path):
            events.append("second")

    with run.alone(tmp_path):
        waiting = threading.Thread(target=second)
        waiting.start()
        waiting.join(0.3)
        events.append("first")
    waiting.join(20)
    assert events == ["first", "second"]


def seed_of(models: Models) -> run.Seed:
    """A seed whose state lies beside its models."""
    state = State(models.folder / "state.json", "c0ffee")
    return run.Seed(0, SMALL, models, "tofu", "auto", state, lambda *values: None)


def test_nothing_goes_on_where_the_first_run_failed(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*values: object, **options: object) -> None:
        raise MismatchError("they do not fit")

    for name in ("train", "write_results"):
        monkeypatch.setattr(run, name, lambda *values: None)
    monkeypatch.setattr(State, "note_models", lambda *values: None)
    monkeypatch.setattr(run.Seed, "references", lambda self: None)
    monkeypatch.setattr(run.msa_lite, "run", fail)
    with pytest.raises(StageError, match=r"msa-lora failed.*they do not fit"):
        seed_of(models).run_all(EXPERIMENTS[:2], keep_models=False)


def test_a_seed_is_run_by_one_call_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("write_data", "fix_plan"):
        monkeypatch.setattr(run, name, lambda *values: None)
    monkeypatch.setattr(sys, "argv", ["run.py", "--seeds", "0", "--model", "base", "--out", str(tmp_path)])
    with locked(tmp_path / "small/seed-0"), pytest.raises(OutputError, match="another msa-lite"):
        run.run_size("small", run.parse(), lambda *values: None)


def test_bad_data_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = write_text(tmp_path / "text.jsonl", 400)
    arguments = ["--out", "out", "--data", tofu_folder(tmp_path / "tofu"), "--text", text.path, "--model", "base"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "GIGABYTES", {"small": 0})
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    assert run.main() == DataError.exit_code
    assert {file.name for file in (tmp_path / "out").rglob("*")} <= {"small", ".lock"}


@pytest.mark.parametrize(
    ("fault", "note"),
    [(MismatchError("they do not fit"), "they do not fit"), (ValueError("a bug"), "ValueError: a bug")],
)
def test_a_fault_is_noted_and_tried_again_and_a_done_experiment_is_not(
    fault: Exception, note: str, tmp_path: Path
) -> None:
    recipe = tmp_path / "a.yaml"
    recipe.write_text("seed: 0\n")
    with State(tmp_path / "state.json", "c0ffee").timed("a", recipe, "msa-lite a.yaml", tmp_path / "runs/a"):
        raise fault
    state = State(tmp_path / "state.json", "c0ffee")
    entry = json.loads((tmp_path / "state.json").read_text())["experiments"]["a"]
    assert (entry["error"], entry["folder"], entry["commit"]) == (note, "runs/a", "c0ffee")
    assert not state.is_done("a", recipe)
    with state.timed("a", recipe, "msa-lite a.yaml", tmp_path / "runs/a"):
        pass
    assert State(tmp_path / "state.json", "c0ffee").is_done("a", recipe)
    recipe.write_text("seed: 1\n")
    assert not state.is_done("a", recipe), "another recipe is another experiment"


def test_a_stop_leaves_no_entry(tmp_path: Path) -> None:
    recipe = tmp_path / "a.yaml"
    recipe.write_text("seed: 0\n")
    state = State(tmp_path / "state.json", "c0ffee")
    with pytest.raises(KeyboardInterrupt), state.timed("a", recipe, "msa-lite a.yaml", tmp_path / "runs/a"):
        raise KeyboardInterrupt
    assert not state.is_done("a", recipe)
    assert not (tmp_path / "state.json").exists()


def test_the_estimate_follows_what_was_measured(tmp_path: Path) -> None:
    recipe = tmp_path / "a.yaml"
    recipe.write_text("seed: 0\n")
    state = State(tmp_path / "state.json", "c0ffee")
    before = state.left(EXPERIMENTS, 60.0)
    assert before == pytest.approx(3600)
    with state.timed(EXPERIMENTS[0].name, recipe, "x", tmp_path / "runs/a"):
        pass
    assert state.left(EXPERIMENTS, 60.0) < before


def test_a_priors_distance_is_that_of_all_weights(tmp_path: Path) -> None:
    weights = {"a": np.array([3.0, 0.0], np.float32), "b": np.array([[4.0]], np.float32)}
    for name, tensors in (("target", weights), ("prior", {**weights, "b": np.array([[1.0]], np.float32)})):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text('{"model_type": "llama"}')
    assert distance(str(tmp_path / "target"), str(tmp_path / "prior")) == pytest.approx(3 / 5)


def test_a_new_run_shares_only_what_is_the_same(tmp_path: Path) -> None:
    first = tmp_path / "runs/msa-lora"
    for name in ("evaluation/target", "evaluation/prior", "evaluation/unlearned", "vectors/forget", "sweep"):
        (first / name).mkdir(parents=True)
        (first / name / "manifest.json").write_text("{}")
    (first / "recipe.yaml").write_text("# A run of msa-lite\n")

    def shared(name: str) -> set[str]:
        folder = tmp_path / "runs" / name
        run.share(first, folder, NAMES[name])
        found = {str(file.parent.relative_to(folder)) for file in folder.rglob("manifest.json")}
        run.share(first, folder, NAMES[name])  # what is there stays
        return found

    assert shared("lora-r8") == {"evaluation/target", "evaluation/prior"}
    assert shared("bf16") == {"evaluation/target", "evaluation/prior", "vectors/forget"}
    assert shared("prior-base") == {"evaluation/target"}
    assert shared("text-before") == set()


def test_only_weights_of_a_finished_run_are_dropped(tmp_path: Path) -> None:
    kept = ["vectors/forget/adapter_model.safetensors", "report.json", "model/config.json"]
    dropped = [
        "model/model.safetensors",
        "vectors/retain/model-00001-of-2.safetensors",
        "vectors/x/epoch-2/model.safetensors",
    ]
    for name in kept + dropped:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    run.drop_weights(tmp_path)
    assert {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()} == {*kept}


def test_a_small_disk_is_told_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"GB are needed for 9999 seeds"):
        run.check_space(tmp_path / "new", "small", 9999)
    run.check_space(tmp_path / "new", "small", 0)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("fault", "status", "line"),
    [(KeyboardInterrupt(), 130, "the same command goes on"), (DataError("no such data"), 3, "error: no such data")],
)
def test_the_command_ends_with_the_tools_exit_codes(
    fault: BaseException, status: int, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def stop(*arguments: object) -> None:
        raise fault

    monkeypatch.setattr(run, "run_size", stop)
    monkeypatch.setattr(sys, "argv", ["run.py", "--seeds", "0", "--out", str(tmp_path / "out")])
    monkeypatch.setattr(run, "GIGABYTES", {"small": 0})
    assert run.main() == status
    assert line in capsys.readouterr().err


def test_the_page_says_where_the_weights_come_from(tmp_path: Path) -> None:
    folder = tmp_path / "Small-Model"
    folder.mkdir()
    assert run.describe_base(str(folder)) == "Small-Model"
    facts = {"made_by": "msa-lite", "kind": "checkpoint", "inputs": {}, "files": {}, "origin": "a package"}
    (folder / "manifest.json").write_text(json.dumps(facts))
    assert run.describe_base(str(folder)) == "Small-Model (a package)"


def test_an_unknown_experiment_is_refused_with_the_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--only", "lora-r9"])
    with pytest.raises(SystemExit, match="2"):
        run.parse()
    assert "lora-r8" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["run.py", "--only", "distance", "npo", "--seeds", "2", "1", "2"])
    assert (run.parse().only, run.parse().seeds) == (["distance", "npo"], [2, 1])


def test_a_negative_seed_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--seeds", "-1"])
    with pytest.raises(SystemExit, match="2"):
        run.parse()
    assert "--seeds: 0 or more" in capsys.readouterr().err
