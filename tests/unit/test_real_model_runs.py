"""The runs of examples/real_model: what is fixed before them, what a stop or a fault leaves, its command."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import run
from experiments import EXPERIMENTS, FULL, SIZES, Experiment
from history import Models
from plan import State, distance, fix_plan
from recipe_files import run_folder
from safetensors.numpy import save_file

from msa_lite.errors import DataError, FormatError, MismatchError, OutputError, StageError, UsageError
from msa_lite.io.finished.seal import locked

SMALL = SIZES["small"]
NAMES = {experiment.name: experiment for experiment in EXPERIMENTS}


def test_settings_are_tried_with_one_seed_unless_they_are_named() -> None:
    assert run.chosen([], 0) == [*EXPERIMENTS]
    assert {one.name for one in EXPERIMENTS} - {one.name for one in run.chosen([], 1)} >= {
        "lora-r8",
        "bf16",
        "npo-prior",
    }
    assert {"msa-lora", "msa-full", "undial", "text-after"} <= {one.name for one in run.chosen([], 1)}
    assert [one.name for one in run.chosen(["bf16"], 1)] == ["bf16"]


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


def test_a_damaged_plan_or_state_is_named(tmp_path: Path) -> None:
    for name in ("plan.json", "state.json"):
        (tmp_path / name).write_text('{"experiments": ')
    with pytest.raises(FormatError, match=r"plan\.json: not JSON"):
        fix_plan(tmp_path, "small", SMALL, [0], EXPERIMENTS[:1], "a model")
    with pytest.raises(FormatError, match=r"state\.json: not JSON"):
        State(tmp_path / "state.json", "c0ffee")


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


@pytest.fixture
def models(tmp_path: Path) -> Models:
    """The models of a seed, none of which is made."""
    return Models(tmp_path / "seed-0", "base-model")


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


@pytest.mark.parametrize("is_rerun", [False, True])
def test_failed_attacks_are_told_and_the_next_experiment_goes_on(
    is_rerun: bool, models: Models, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[str] = []

    def make(seed: run.Seed, experiment: Experiment, file: Path) -> None:
        weights = run_folder(models, experiment) / "model/model.safetensors"
        weights.parent.mkdir(parents=True, exist_ok=True)
        weights.write_text("x")
        done.append(experiment.name)

    def fail(folder: Path, **options: object) -> None:
        raise StageError("attacks failed:\n  relearn: no room")

    monkeypatch.setattr(run.Seed, "_run", make)
    monkeypatch.setattr(run.msa_lite, "attack", fail)
    monkeypatch.setattr(run, "write_results", lambda *values: None)
    monkeypatch.setattr(State, "is_done", lambda *values: is_rerun)
    replace(seed_of(models), attacks=True).run(EXPERIMENTS[:2], keep_models=False)
    assert done == [one.name for one in EXPERIMENTS[:2]]
    assert "attacks on msa-lora failed: attacks failed: relearn: no room\n" in capsys.readouterr().err
    assert not [*models.folder.rglob("*.safetensors")]


def test_a_seed_is_run_by_one_call_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("write_data", "fix_plan"):
        monkeypatch.setattr(run, name, lambda *values: None)
    monkeypatch.setattr(sys, "argv", ["run.py", "--seeds", "0", "--model", "base", "--out", str(tmp_path)])
    with locked(tmp_path / "small/seed-0"), pytest.raises(OutputError, match="another msa-lite"):
        run.run_size("small", run.parse(), lambda *values: None)


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
    ("size", "line"),
    [("small", r"4\.5 GB of memory are needed, 2\.0 GB are free.*end other programs"), ("full", "needs a GPU")],
)
def test_a_machine_that_is_too_small_is_told_before_any_work(
    size: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(run, "free_ram", lambda: 2_000_000_000)
    with pytest.raises(MismatchError, match=line):
        run.check_memory(size)
    monkeypatch.setattr(run, "free_ram", lambda: 5_000_000_000)
    run.check_memory("small")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    run.check_memory("full")


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
    monkeypatch.setattr(run, "MEMORY", 0)
    assert run.main() == status
    assert line in capsys.readouterr().err


def test_an_unknown_experiment_and_a_negative_seed_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--only", "lora-r9"])
    with pytest.raises(SystemExit, match="2"):
        run.parse()
    assert "lora-r8" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["run.py", "--only", "distance", "npo", "--seeds", "2", "1", "2"])
    assert (run.parse().only, run.parse().seeds) == (["distance", "npo"], [2, 1])
    monkeypatch.setattr(sys, "argv", ["run.py", "--seeds", "-1"])
    with pytest.raises(SystemExit, match="2"):
        run.parse()
    assert "--seeds: 0 or more" in capsys.readouterr().err
