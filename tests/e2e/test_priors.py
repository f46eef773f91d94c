"""Which prior has seen the forget set, what vectors start at and how long they are fitted, against plain tensors."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import msa_lite
from msa_lite.demo import HistorySettings, make_groups, make_history
from msa_lite.errors import UsageError
from msa_lite.io.files.writing import hash_file
from msa_lite.io.finished.seal import load_manifest, verify_folder
from msa_lite.io.weights.hub import fetch
from msa_lite.pipeline.prepare.run import Context
from msa_lite.pipeline.run.checks import CHEAP_ROWS, cheap_probe
from msa_lite.pipeline.run.vectors import vector_inputs
from msa_lite.pipeline.verbs.ask import open_panel
from msa_lite.pipeline.verbs.run import run_vectors
from msa_lite.recipe import load_recipe
from msa_lite.report.run.provenance import load_provenance
from msa_lite.strengths import Strengths
from tests.e2e.conftest import FEW, CallCli, prepared, times, write_recipe
from tests.support.pages import page_text
from tests.support.vary import model_seed

# Enough rows for an interval that ends below what counts as a sign; the models learn them in seconds.
PEOPLE = {"prior": 24, "retain": 4, "forget": 16, "holdout": 16}
SIZES = {"hidden_size": 64, "layers": 2, "vocabulary": 300}
TUNING = {"prior_epochs": 3, "tuning_epochs": 6, "prior_learning_rate": 5e-3, "tuning_learning_rate": 5e-3}


@pytest.fixture(scope="module")
def exposed(quick_fits: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A history whose target has learnt the forget rows well enough for it to show."""
    folder = tmp_path_factory.mktemp("exposed")
    make_history(folder, make_groups(PEOPLE, seed=0), HistorySettings(**SIZES, **TUNING, seed=model_seed(0)))
    return folder


@pytest.fixture
def asked(exposed: Path, tmp_path: Path) -> dict[str, Any]:
    """A recipe whose prior is from before the exposure."""
    return {
        "target": str(exposed / "target"),
        "prior": str(exposed / "prior"),
        "forget": {"data": {"path": str(exposed / "data/forget.jsonl")}},
        "evaluate": {"holdout": {"path": str(exposed / "data/holdout.jsonl")}},
        "output": str(tmp_path / "run"),
    }


def test_signs_are_found_after_the_exposure_and_not_before(asked: dict[str, Any], exposed: Path) -> None:
    del asked["prior"]
    saved = [{"checkpoint": str(exposed / name), "step": step} for name, step in (("prior", 1), ("target", 2))]
    asked["history"] = {"checkpoints": saved, "exposure": 1}
    asked["evaluate"]["ideal"] = str(exposed / "ideal")
    result = msa_lite.probe(asked)
    verdicts = {finding.name: finding.verdict for finding in result.findings}
    assert list(verdicts) == ["prior", "checkpoint-2", "target", "ideal"]
    assert (verdicts["prior"], verdicts["checkpoint-2"], verdicts["target"]) == ("no signs", "signs", "signs")
    assert verdicts["ideal"] != "signs"
    for finding in result.findings:
        assert verify_folder(result.folder / finding.name) == []
        for _, metric, (low, high) in finding.measured():
            assert low <= metric.value <= high
            assert metric.n == 6 * (PEOPLE["forget"] + PEOPLE["holdout"])


def test_the_command_prints_a_table_and_a_line_for_each_model(
    asked: dict[str, Any], tmp_path: Path, call_cli: CallCli
) -> None:
    recipe = write_recipe(asked, tmp_path)
    status, table, _ = call_cli("probe", recipe)
    assert status == 0
    assert "96 forget rows against 96 holdout rows" in table
    assert f"prior ({asked['prior']}): shows no signs" in table
    _, again, stderr = call_cli("probe", recipe, "--json")
    assert "probe: prior" not in stderr, "a probed model was asked again"
    found = json.loads(again)
    assert found["models"]["prior"]["verdict"] == "no signs"
    low, high = found["models"]["prior"]["loss_auc"]["interval"]
    assert low < 0.5 < high


def almost(model: Path, folder: Path) -> Path:
    """The model with one weight a little different, so that it is another one that knows the same."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] += 1e-4
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "manifest.json").unlink()
    return folder


@pytest.mark.parametrize(("prior", "warned"), [("prior", False), ("target", True)])
def test_a_run_asks_its_prior_in_short_and_once(
    asked: dict[str, Any], exposed: Path, prior: str, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = prepared(asked | {"prior": str(almost(exposed / prior, tmp_path / "almost"))})
    (stage,), steps = cheap_probe(Context.of(run)), []
    for _ in range(2):
        caplog.clear()
        stage.run(lambda *step: steps.append(step))
        assert ("take an earlier checkpoint" in caplog.text) == warned
    assert [step for step in steps if step[1] == step[2]] == [("probe: prior", 2 * CHEAP_ROWS, 2 * CHEAP_ROWS)]


# A recipe without a prior: its own run is that of the task vector, and says so.


def test_a_run_without_a_prior_is_the_task_vector_and_says_so(
    recipe: dict[str, Any], call_cli: CallCli, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    del recipe["prior"]
    for notes in (msa_lite.dry_run(recipe).notes, msa_lite.plan(recipe).notes):
        assert any("names no prior" in note for note in notes)
        assert any("no filter, because forget.alpha is given" in note for note in notes)
    recipe["merge"] = {"filter": 1.0}
    beside = msa_lite.run_baseline("task_vector", recipe)
    assert beside is not None
    assert "names no prior" not in caplog.text  # whoever asks for a task vector knows
    result = msa_lite.run(recipe)
    assert result is not None
    folder = result.folder
    assert folder == Path(recipe["output"])
    assert caplog.text.count("names no prior") == 1
    assert caplog.text.count("not of the paper: the filter λ = 1 ") == 2
    assert hash_file(folder / "model/model.safetensors") == hash_file(beside.folder / "model/model.safetensors")
    assert load_provenance(folder).method == "task_vector"
    report = json.loads((folder / "report.json").read_text())
    assert (report["method"], report["formula"].count("θ_0")) == ("task_vector", 0)
    text, card = page_text(folder), (folder / "model/README.md").read_text()
    record, config = (folder / "record.json").read_text(), (folder / "model/mergekit_config.yml").read_text()
    assert "Unlearning report:" in text
    assert "task_vector" in page_text(beside.folder)
    for told in (text.replace("as MSA did", ""), card, record, config):  # but for the note
        assert "MSA" not in told
        assert "model state" not in told.lower().replace("-", " ")
        assert "θ_0" not in told
    assert "`msa-lite` on this file" in (folder / "recipe.yaml").read_text()
    before = times(folder)
    msa_lite.run(folder / "recipe.yaml")
    assert times(folder) == before  # nothing is made anew
    status, _, errors = call_cli("mergekit", folder / "recipe.yaml")
    assert status == 0, errors
    later = recipe | {"earlier": [str(folder)], "output": f"{folder}-later"}
    later["forget"] = later["forget"] | {"data": recipe["evaluate"]["holdout"]}
    later["evaluate"] = {"ideal": recipe["evaluate"]["ideal"], "max_new_tokens": 4, "limit": 4}
    second = msa_lite.run(later)
    assert second is not None
    attacked = msa_lite.attack(second.folder, ["prompt"], overrides=FEW)  # no baseline may have earlier runs
    assert attacked.facts.attacks


# The recipes of WMDP and RWKU on tiny models: each runs as it is shipped, with other models and a short fit.


FIT = {"vector.epochs": 2, "vector.learning_rate": 5e-3, "vector.max_length": 64, "vector.lora": "{rank: 2}"}


@pytest.mark.parametrize("name", ["wmdp/cyber", "rwku/stephen-king"])
def test_recipes_without_a_prior_make_a_model_and_score_nothing(name: str, history: Path, tmp_path: Path) -> None:
    for side in ("forget", "retain"):
        texts = [{"text": f"The {side} cat sat there on day {i}.", "subject": side} for i in range(7)]
        (tmp_path / f"{side}.jsonl").write_text("\n".join(map(json.dumps, texts)))
    plain = [f"{side}.data.{key}=null" for side in ("forget", "retain") for key in ("name", "split")]
    places = {"target": history / "target", "output": tmp_path / "run"}
    places |= {f"{side}.data.path": tmp_path / f"{side}.jsonl" for side in ("forget", "retain")}
    keys = [f"{key}={value}" for key, value in {**FIT, **places}.items()]
    msa_lite.run(load_recipe(name, [*plain, *keys]))
    assert (tmp_path / "run" / "model" / "config.json").is_file()
    assert not (tmp_path / "run" / "evaluation").exists()


# A forget vector that starts at the retain vector, and one that is held: the whole run, against plain tensors.


ALPHA = 0.8


def tensors(folder: Path | str) -> dict[str, np.ndarray]:
    return {name: value.astype(np.float64) for name, value in load_file(Path(folder) / "model.safetensors").items()}


def lora_deltas(folder: Path) -> dict[str, np.ndarray]:
    """lora_alpha / r · B A by the target's tensor names."""
    config, factors = (
        json.loads((folder / "adapter_config.json").read_text()),
        load_file(folder / "adapter_model.safetensors"),
    )
    scale = config["lora_alpha"] / config["r"]
    names = [name for name in factors if ".lora_A." in name]
    return {
        name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight"): scale
        * factors[name.replace(".lora_A.", ".lora_B.")].astype(np.float64) @ factors[name].astype(np.float64)
        for name in names
    }  # fmt: skip


@pytest.fixture
def later(recipe: dict[str, Any]) -> dict[str, Any]:
    recipe["forget"]["alpha"] = ALPHA
    del recipe["retain"]["beta"]
    recipe["vector"] |= {"start": "retain", "hold": 0.5, "learning_rate": 1e-3}
    return recipe


def test_an_adapter_starts_at_the_prior_with_the_retain_adapter_merged(later: dict[str, Any]) -> None:
    folder = msa_lite.run(later).folder
    prior, start, retain = tensors(later["prior"]), tensors(folder / "vectors/start"), folder / "vectors/retain"
    for name, delta in lora_deltas(retain).items():
        np.testing.assert_allclose(start[name], prior[name] + delta, atol=1e-6)
        assert np.abs(delta).max() > 1e-5
    inputs = (load_manifest(folder / "vectors/forget") or {})["inputs"]
    assert inputs["prior"] == fetch(str(folder / "vectors/start")).identity()
    assert inputs["objective"]["hold"] == 0.5
    target, unlearned = tensors(later["target"]), tensors(folder / "model")
    deltas = lora_deltas(folder / "vectors/forget")
    for name, value in target.items():
        np.testing.assert_allclose(unlearned[name], value - ALPHA * deltas.get(name, 0.0), atol=1e-6)
    points = open_panel(folder, several=True).points
    assert points is not None
    with pytest.raises(UsageError, match="adds no retain vector"):  # what it has is in the forget vector's start
        points.check(Strengths(ALPHA, 0.5))


@pytest.mark.parametrize("strength", [None, 1.5])
def test_a_checkpoint_starts_at_the_retain_checkpoint(
    later: dict[str, Any], strength: float | None, call_cli: CallCli
) -> None:
    later["vector"]["mode"] = "full"
    later["merge"] = {"filter": strength} if strength else {}
    folder = msa_lite.run(later).folder
    name = f"forget-filter-{strength:g}" if strength else "forget"
    late, start = tensors(folder / "vectors" / name), tensors(folder / "vectors/retain")
    target, unlearned = tensors(later["target"]), tensors(folder / "model")
    moved = 0.0
    for key, value in target.items():
        np.testing.assert_allclose(unlearned[key], value - ALPHA * (late[key] - start[key]), atol=1e-6)
        moved = max(moved, np.abs(late[key] - start[key]).max())
    assert moved > 1e-4
    assert call_cli("verify", folder)[0] == 0
    story = json.loads((folder / "report.json").read_text())
    assert "θ_12 − θ_2" in story["formula"]
    assert story["strengths"].get("beta", 0.0) == 0.0
    assert not (folder / "vectors/start").exists()
    before = times(folder)
    msa_lite.run(later)
    assert times(folder) == before  # nothing is made anew


# Runs whose recipe does not say how long vectors are fitted: until the prior knows the rows; and their baselines.


@pytest.fixture
def auto(recipe: dict[str, Any]) -> dict[str, Any]:
    recipe["vector"] = {"mode": "full", "learning_rate": 1e-2}
    recipe["forget"]["alpha"] = 0.5
    return recipe


@pytest.mark.usefixtures("quick_fits")
def test_vectors_are_fitted_until_the_prior_knows_the_rows(auto: dict[str, Any]) -> None:
    folders, job = run_vectors(auto), prepared(auto)
    for folder in folders:
        manifest = load_manifest(folder) or {}
        assert manifest["inputs"] == vector_inputs(job, folder.name)  # as processes that help know it
        fit, loss = manifest["fit"], manifest["fit"]["loss"]
        assert loss["target"] < loss["prior"]
        assert fit["ended"] == "known"
        assert loss["tuned"] <= loss["prior"] - 0.95 * (loss["prior"] - loss["target"])
