"""Which prior has seen the forget set: one before the exposure and one after it, by the command line and by Python."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

import msa_lite
from msa_lite.demo import HistorySettings, make_groups, make_history
from msa_lite.io.files.writing import hash_file
from msa_lite.io.finished.seal import verify_folder
from msa_lite.pipeline.prepare.run import Context, msa_scope, prepare
from msa_lite.pipeline.run.checks import CHEAP_ROWS, cheap_probe
from msa_lite.recipe import load_recipe
from msa_lite.report.run.provenance import load_provenance
from tests.e2e.conftest import FEW, CallCli
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
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(asked))
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
    return folder


@pytest.mark.parametrize(("prior", "warned"), [("prior", False), ("target", True)])
def test_a_run_asks_its_prior_in_short_and_once(
    asked: dict[str, Any], exposed: Path, prior: str, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = load_recipe(asked | {"prior": str(almost(exposed / prior, tmp_path / "almost"))})
    (stage,), steps = cheap_probe(Context.of(prepare(recipe, msa_scope(recipe)))), []
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
    recipe["merge"] = {"filter": 1.0}
    beside = msa_lite.run_baseline("task_vector", recipe)
    assert beside is not None
    assert "names no prior" not in caplog.text  # whoever asks for a task vector knows
    assert any("names no prior" in note for note in msa_lite.dry_run(recipe).notes)
    assert any("names no prior" in note for note in msa_lite.plan(recipe).notes)
    result = msa_lite.run(recipe)
    assert result is not None
    folder = result.folder
    assert folder == Path(recipe["output"])
    assert caplog.text.count("names no prior") == 1
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
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("manifest.json")}
    msa_lite.run(folder / "recipe.yaml")
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("manifest.json")} == before  # nothing is made anew
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
