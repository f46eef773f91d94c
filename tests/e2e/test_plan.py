"""`msa-lite plan`, and the same check before the work of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import msa_lite
from msa_lite.budget.speed import Device
from msa_lite.recipe.shipped import shipped_recipes
from tests.e2e.conftest import CallCli

FITS_ALONE = ("evaluate=null", "forget.alpha=1.0", "retain.beta=0.5")
SMALL = Device("a small GPU", 10_000)
FORGET, RETAIN = "fit of the forget vector", "fit of the retain vector"


@pytest.fixture
def path(grid: dict[str, Any], tmp_path: Path) -> Path:
    """A recipe's file, with the prompt of its own rows."""
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(grid))
    return file


@pytest.fixture
def small_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have runs take this machine for one with a GPU of 10 kB; only the prediction does."""
    monkeypatch.setattr("msa_lite.pipeline.stages.forecast.this_device", lambda: SMALL)


def test_a_run_that_fits_is_planned_stage_by_stage_and_nothing_is_written(
    path: Path, call_cli: CallCli, tmp_path: Path
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


def test_what_does_not_fit_gets_exit_code_3_and_changes_with_their_figures(path: Path, call_cli: CallCli) -> None:
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


def test_models_that_cannot_be_reached_are_named(call_cli: CallCli, path: Path) -> None:
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
    command: list[str], path: Path, call_cli: CallCli, tmp_path: Path
) -> None:
    code, out, err = call_cli(*command, path)
    assert (code, out) == (3, "")
    assert "error: the run does not fit on 0 GB (a small GPU): peak" in err
    assert "--force" in err
    assert [file.name for file in tmp_path.iterdir()] == ["recipe.yaml"]


@pytest.mark.usefixtures("small_gpu")
def test_force_only_warns(path: Path, call_cli: CallCli, tmp_path: Path) -> None:
    code, _, err = call_cli("run", path, "--until", "vectors", "--force", "vector.epochs=1")
    assert code == 0
    assert "warning: the run does not fit on 0 GB (a small GPU): peak" in err
    assert (tmp_path / "run/vectors/forget/manifest.json").is_file()


@pytest.fixture
def stages(history: Path, tmp_path: Path) -> dict[str, Any]:
    """A training in stages."""
    stage = {"data": {"path": str(history / "data/forget.jsonl")}, "epochs": 2}
    return {"model": str(history / "prior"), "stages": [stage], "output": str(tmp_path / "trained")}


def test_a_training_is_planned_stage_by_stage(stages: dict[str, Any], tmp_path: Path, call_cli: CallCli) -> None:
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
