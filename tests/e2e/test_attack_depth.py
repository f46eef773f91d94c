"""The Unlearning Depth Score of a run's model, as the command reports it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import msa_lite
from msa_lite.evals.records import read_records


def test_a_run_is_told_its_depth(finished: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    facts = msa_lite.attack(folder, ["depth"], overrides=["attack.rows=4"]).facts
    (result,) = facts.attacks
    assert list(result.models) == ["unlearned"]
    assert sorted(path.name for path in (folder / "attacks/depth").iterdir()) == ["report.json", "unlearned"]
    records = read_records(folder / "attacks/depth/unlearned/patched.forget.jsonl")
    assert len(records) == 4
    values = [record["uds"] for record in records if record["uds"] is not None]
    assert values
    mean = sum(values) / len(values)
    assert result.models["unlearned"].figures == {"UDS": pytest.approx(mean)}
    (trial,) = result.models["unlearned"].trials
    assert trial.share == pytest.approx(1 - mean)
    assert (trial.rows, trial.skipped) == (len(values), 4 - len(values))
    metrics = json.loads((folder / "attacks/depth/report.json").read_text())["metrics"]
    assert metrics["patched.shallow.unlearned"]["value"] == pytest.approx(1 - mean)
