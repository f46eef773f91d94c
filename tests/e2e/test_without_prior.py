"""A recipe without a prior: its own run is that of the task vector, and says so."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import msa_lite
from msa_lite.io.files.writing import hash_file
from msa_lite.report.run.provenance import load_provenance
from tests.e2e.conftest import FEW, CallCli
from tests.support.pages import page_text


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
