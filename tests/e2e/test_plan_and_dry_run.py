"""`--dry-run`: what a command would do, told without writing anything, and as the command then does it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import msa_lite
from msa_lite import dry_run
from msa_lite.budget.speed import Device
from msa_lite.data import DataSource
from msa_lite.errors import DataError
from msa_lite.evals.scores.suite import OwnQuestions
from msa_lite.recipe import load_recipe
from msa_lite.recipe.files import shipped_recipes
from tests.e2e.conftest import CallCli, sweep_recipe, write_recipe
from tests.support.models import save_checkpoint, tiny_model


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of each file and folder below a folder; nothing where it is not there."""
    paths = {str(path.relative_to(folder)): path.stat() for path in folder.rglob("*")}
    return {name: (status.st_size, status.st_mtime_ns) for name, status in paths.items()}


def states(recipe: Any, command: Any = "run", *overrides: str, **options: Any) -> dict[str, str]:
    """The state of each stage by its label."""
    loaded = load_recipe(recipe, overrides)
    before = tree(loaded.folder)
    result = dry_run(loaded, command=command, **options)
    assert tree(loaded.folder) == before, "it wrote something"
    return {stage.name: stage.state for stage in result.stages}


def reasons(recipe: Any, command: Any = "run", *overrides: str, **options: Any) -> dict[str, str]:
    result = dry_run(recipe, overrides, command=command, **options)
    return {stage.name: "; ".join(stage.reasons) for stage in result.stages}


@pytest.fixture
def done(history: Path, finished: Path, tmp_path: Path) -> dict[str, Any]:
    """The recipe of a finished run, in a folder of its own."""
    recipe = sweep_recipe(history, tmp_path / "run")
    recipe["retain"]["beta"] = 0.0
    shutil.copytree(finished, tmp_path / "run")
    return recipe


def test_rows_in_two_sets_and_too_few_rows_are_told_by_plan_dry_run_and_run(
    history: Path, recipe: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    both, forget = tmp_path / "both.jsonl", (history / "data/forget.jsonl").read_text()
    both.write_text((history / "data/retain.jsonl").read_text() + forget)
    recipe["retain"]["data"] = {"path": str(both)}
    recipe["evaluate"]["limit"] = 8
    told = ("retain: 18 of 54 rows stand in", "few forget rows (8)", "PASS cannot", "kept cannot be shown")
    planned, dry = msa_lite.plan(recipe).notes, dry_run(load_recipe(recipe), command="run").notes
    with caplog.at_level("WARNING", logger="msa_lite"):
        msa_lite.run_vectors(recipe)
    warned = [record.getMessage() for record in caplog.records]
    for lines in (planned, dry, warned):
        assert [sum(word in line for line in lines) for word in told] == [1, 1, 1, 1], lines
    assert len((tmp_path / "run/vectors/retain/rows.jsonl").read_text().splitlines()) == 36
    for content, words in (
        (forget, "retain: all 18 rows stand in the forget set"),
        (forget.replace('"answer": "', '"answer": null, "x": "', 1), "retain.data: .*\n  row 0 .*'answer': None"),
    ):
        both.write_text(content)
        for call in (msa_lite.plan, lambda made: dry_run(load_recipe(made), command="run"), msa_lite.run):
            with pytest.raises(DataError, match=words):
                call(recipe)


@pytest.mark.parametrize(
    ("options", "strength", "count"),
    [({"command": "run"}, "auto", 1), ({"command": "baseline", "method": "npo"}, "auto", 0),
     ({"command": "baseline", "method": "npo"}, 2.0, 1)],
)  # fmt: skip
def test_few_rows_for_a_filter_are_told_where_there_is_one(
    recipe: dict[str, Any], options: dict[str, Any], strength: Any, count: int
) -> None:
    recipe["forget"]["alpha"], recipe["merge"] = "auto", {"filter": strength}
    assert sum("for the filter" in note for note in dry_run(load_recipe(recipe), **options).notes) == count


def test_rows_beyond_the_window_are_told_alike_and_lost_answers_are_refused_by_plan_dry_run_and_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for seed, name in enumerate(("prior", "target")):
        save_checkpoint(tmp_path / name, tiny_model("gpt2", seed, n_positions=64))
    short, long, lost = ("Where?", "Here."), ("When?", "In May. " * 60), ("Where? " * 60, "Here.")

    def write(name: str, *rows: tuple[str, str]) -> dict[str, str]:
        lines = [json.dumps({"question": f"{name} {at} {q}", "answer": a}) for at, (q, a) in enumerate(rows)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        return {"path": str(tmp_path / f"{name}.jsonl")}

    recipe: dict[str, Any] = {
        **{name: str(tmp_path / name) for name in ("target", "prior")},
        "forget": {"data": write("forget", short, long, short), "alpha": 1.0},
        "retain": {"data": write("retain", long, short), "beta": 1.0},
        "vector": {"mode": "full", "epochs": 1, "warmup_epochs": 0, "learning_rate": 1e-3, "max_length": 512},
        "evaluate": {"holdout": write("holdout", short, long)},
        "prompt": "plain",
        "output": str(tmp_path / "run"),
    }
    planned, dry = msa_lite.plan(recipe).notes, dry_run(load_recipe(recipe), command="run").notes
    with caplog.at_level("WARNING", logger="msa_lite"):
        msa_lite.run_vectors(recipe)
    cut = "are longer than the window of 64 tokens"
    expected = [f"{kind} {cut}" for kind in ("forget: 1 of 3 rows (1)", "retain: 1 of 2 rows (0)") * 2]
    expected.append(f"holdout: 1 of 2 rows (1) {cut}")
    for lines in (planned, dry, [record.getMessage() for record in caplog.records]):
        assert sorted(re.split("[:,] (?:the|so) ", line)[0] for line in lines if " window" in line) == sorted(expected)
    write("forget", short, long, lost)
    write("holdout", lost, short)
    for call in (msa_lite.plan, lambda made: dry_run(load_recipe(made), command="run"), msa_lite.run):
        with pytest.raises(DataError, match=r"forget: 1 of 3 rows \(2\): the prompt[^$]*holdout: 1 of 2 rows \(0\)"):
            call({**recipe, "output": str(tmp_path / "other")})
    assert not (tmp_path / "other").exists()
    turns = [{"role": role, "content": f"{role} {at}"} for at in range(20) for role in ("user", "assistant")]
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": turns}))
    questions = OwnQuestions(DataSource(str(tmp_path / "talk.jsonl")), max_new_tokens=2)
    with caplog.at_level("WARNING", logger="msa_lite"):
        msa_lite.evaluate(str(tmp_path / "target"), tmp_path / "scores", questions)
    records = [json.loads(line) for line in (tmp_path / "scores/forget.jsonl").read_text().splitlines()]
    assert len(records) == 20
    assert all(record["probability"] and record["generated"] is not None for record in records)
    assert "more than 64 tokens: the oldest turns" in caplog.messages[-1]


def test_of_a_finished_run_all_is_done_until_a_key_changes(done: dict[str, Any]) -> None:
    assert set(states(done).values()) == {"done"}
    assert set(states(done, "sweep").values()) == {"done"}
    assert states(done, "vector") == {"forget vector": "done"}
    assert set(states(done, "baseline", method="task_vector").values()) == {"done"}
    changed = states(done, "run", "vector.epochs=3")
    anew = {"forget vector", "choosing alpha and beta", "merge", "validation: unlearned", "scores: unlearned"}
    assert {label for label, state in changed.items() if state == "anew"} == anew
    assert {state for label, state in changed.items() if label not in anew} == {"done"}
    why = reasons(done, "run", "vector.epochs=3")
    assert why["forget vector"] == "settings.epochs: 2 → 3"
    assert why["merge"] == "made of: forget vector, choosing alpha and beta"


@pytest.mark.slow
def test_the_dry_run_says_what_the_run_then_does(done: dict[str, Any], tmp_path: Path) -> None:
    overrides = ["forget.alpha=[0.5, 0.75]"]
    before = states(done, "run", *overrides)
    folders = {
        "forget vector": "vectors/forget",
        "choosing alpha and beta": "sweep",
        "scores: target": "evaluation/target",
    }
    marks = {label: (tmp_path / "run" / name).stat().st_ino for label, name in folders.items()}
    msa_lite.run(done, overrides)
    now = {label: (tmp_path / "run" / name).stat().st_ino for label, name in folders.items()}
    assert {label for label in folders if before[label] != "done"} == {"choosing alpha and beta"}
    assert {label for label in folders if marks[label] != now[label]} == {"choosing alpha and beta"}
    assert set(states(done, "run", *overrides).values()) == {"done"}


def test_what_was_damaged_or_stopped_is_named(done: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "vectors/forget/adapter_model.safetensors").write_bytes(b"short")
    assert reasons(done)["forget vector"].startswith("adapter_model.safetensors: ")
    shutil.move(run / "vectors/forget", run / "vectors/forget.partial")
    assert reasons(done)["forget vector"] == "goes on where it stopped"
    assert states(done)["forget vector"] == "to do"


def test_the_command_prints_stages_and_outputs(grid: dict[str, Any], tmp_path: str, call_cli: CallCli) -> None:
    file = write_recipe(grid, tmp_path)
    code, out, err = call_cli("baseline", "npo", "quickstart", f"output={tmp_path}/none", "--dry-run")
    assert (code, "../../history/target" in out) == (0, True), err  # beside the baseline's own folder
    status, out, err = call_cli(file, "--dry-run")
    assert status == 0, err
    for text in ("forget vector", "to do", "writes:  ", "vectors/forget"):
        assert text in out
    status, out, err = call_cli("run", file, "--until", "sweep", "--dry-run", "--json")
    assert status == 0, err
    values = json.loads(out)
    assert values["command"] == "sweep"
    names = [item["stage"] for item in values["stages"]]
    assert {"forget vector", "retain vector", "choosing alpha and beta"} <= set(names)
    assert names[-2:] == ["merge", "validation: unlearned"]
    assert {item["state"] for item in values["stages"]} == {"to do"}
    assert str(tmp_path / "run/vectors/forget") in values["writes"]
    assert not (tmp_path / "run").exists()


# `msa-lite plan`, and the same check before the work of a run.


FITS_ALONE = ("evaluate=null", "forget.alpha=1.0", "retain.beta=0.5")
SMALL = Device("a small GPU", 10_000)
FORGET, RETAIN = "fit of the forget vector", "fit of the retain vector"


@pytest.fixture
def path(grid: dict[str, Any], tmp_path: Path) -> str:
    """A recipe's file, with the prompt of its own rows."""
    return write_recipe(grid, tmp_path)


@pytest.fixture
def small_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have runs take this machine for one with a GPU of 10 kB; only the prediction does."""
    monkeypatch.setattr("msa_lite.pipeline.stages.stage.this_device", lambda: SMALL)


def test_a_run_that_fits_is_planned_stage_by_stage_and_nothing_is_written(
    path: str, call_cli: CallCli, tmp_path: Path
) -> None:
    code, out, _ = call_cli("plan", path, "--gpu", "8GB")
    lines = out.splitlines()
    assert code == 0
    assert lines[-1].startswith("Fits on 8 GB: yes, peak 0.")
    for name in (
        "fit of the forget vector",
        "fit of the retain vector",
        "sweep",
        "merge",
        "scores",
        "time:    about ",
        "disk:",
    ):
        assert any(line.strip().startswith(name) for line in lines), name
    assert [file.name for file in tmp_path.iterdir()] == ["recipe.yaml"]


def test_a_search_is_planned_with_all_points_that_it_may_take(path: str, call_cli: CallCli) -> None:
    listed = f"forget.alpha=[{', '.join(str(1 + number / 8) for number in range(12))}]"
    seconds = []
    for settings in (["forget.alpha=auto", "retain.beta=auto"], [listed, "retain.beta=0.5"]):
        _, out, _ = call_cli("plan", path, *settings, "merge.filter=off", "--gpu", "8GB", "--json")
        seconds += [stage["seconds"] for stage in json.loads(out)["stages"] if stage["kind"] == "sweep"]
    assert seconds[0] == seconds[1] > 0


def test_what_does_not_fit_gets_exit_code_3_and_changes_with_their_figures(path: str, call_cli: CallCli) -> None:
    code, out, _ = call_cli("plan", path, *FITS_ALONE, "vector.mode=full", "--gpu", "450300kB", "--json")
    plan = json.loads(out)
    assert code == 3
    assert plan["fits"] is False
    counted = [stage for stage in plan["stages"] if stage["on"] == "device" and stage["kind"] != "checks"]
    peak = max(stage["memory"]["bytes"] for stage in counted)
    assert plan["peak"]["bytes"] == peak
    assert all(remedy["peak"] < peak for remedy in plan["remedies"])
    assert ["vector.mode=lora"] in [remedy["overrides"] for remedy in plan["remedies"]]
    for stage in plan["stages"]:
        assert stage["memory"]["bytes"] == sum(stage["memory"]["parts"].values())
    assert "Fits on 0.5 GB: no, peak" in plan["verdict"]


def test_a_hold_on_the_cpu_counts_the_states_that_it_remembers(
    path: str, call_cli: CallCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def states(hold: float) -> int:
        _, out, _ = call_cli("plan", path, f"vector.hold={hold}", "--json")
        (fit,) = (stage for stage in json.loads(out)["stages"] if stage["stage"] == "the fit of the forget vector")
        return fit["memory"]["parts"].get("reference", 0)

    assert (states(0), states(1) > 1000) == (0, True)
    monkeypatch.setattr("msa_lite.pipeline.stages.costs.REMEMBERED", 1000)
    assert states(1) == 1000


def test_models_that_cannot_be_reached_are_named(call_cli: CallCli, path: str) -> None:
    code, out, err = call_cli(
        "plan", path, "--gpu", "8GB", "target=some/model", "prior=some/other", "evaluate.ideal=null"
    )
    assert (code, out) == (2, "")
    assert "prior some/other: not on this machine, and the Hub gives no headers" in err
    assert "offline (HF_HUB_OFFLINE is set)" in err
    assert "hf auth login" not in err, "which helps nobody without a network"


@pytest.mark.parametrize("name", [name for name in shipped_recipes() if not name.startswith(("train/", "table/"))])
def test_each_shipped_recipe_is_planned_and_looked_at_without_a_network(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    planned, dry = msa_lite.plan(name, gpu="80GB"), msa_lite.dry_run(name)
    assert planned.stages
    assert {"forget vector", "merge"} <= {stage.name for stage in dry.stages}
    assert {stage.state for stage in dry.stages} == {"to do"}
    assert len([note for note in dry.notes if "no connection" in note]) <= 1, "one line, however many rows"


@pytest.mark.usefixtures("small_gpu")
@pytest.mark.parametrize("command", [["run"], ["baseline", "grad_diff"]], ids=" ".join)
def test_a_run_that_cannot_fit_is_refused_before_any_work(
    command: list[str], path: str, call_cli: CallCli, tmp_path: Path
) -> None:
    code, out, err = call_cli(*command, path)
    assert (code, out) == (3, "")
    assert "error: the run does not fit on 0 GB (a small GPU): peak" in err
    assert "--force" in err
    assert [file.name for file in tmp_path.iterdir()] == ["recipe.yaml"]


@pytest.mark.usefixtures("small_gpu")
def test_force_only_warns(path: str, call_cli: CallCli, tmp_path: Path) -> None:
    code, _, err = call_cli("run", path, "--until", "vectors", "--force", "vector.epochs=1")
    assert code == 0
    assert "warning: the run does not fit on 0 GB (a small GPU): peak" in err
    assert (tmp_path / "run/vectors/forget/manifest.json").is_file()


@pytest.fixture
def stages(history: Path, tmp_path: Path) -> dict[str, Any]:
    """A training in stages."""
    stage = {"data": {"path": str(history / "data/forget.jsonl")}, "epochs": 2}
    return {"model": str(history / "prior"), "stages": [stage], "output": str(tmp_path / "trained")}


def test_a_training_is_planned_stage_by_stage(stages: dict[str, Any], tmp_path: str, call_cli: CallCli) -> None:
    (tmp_path / "stages.yaml").write_text(yaml.safe_dump(stages))
    code, out, _ = call_cli("plan", tmp_path / "stages.yaml", "--json")
    plan = json.loads(out)
    assert code == 0
    assert [stage["stage"] for stage in plan["stages"]] == ["the training of 1-forget"]
    assert plan["seconds"] is not None
    assert plan["disk"]["saves of a stage"] == 2 * 3 * plan["disk"]["models"]
    assert [file.name for file in tmp_path.iterdir()] == ["stages.yaml"]
    small = msa_lite.plan(stages, ["stages.0.micro_batch_size=2"], gpu="100MB")
    assert not small.fits
    assert call_cli("plan", tmp_path / "stages.yaml", "--gpu", "100MB")[0] == 3
