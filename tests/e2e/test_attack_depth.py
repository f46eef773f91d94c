"""The Unlearning Depth Score of a run's model, as the command reports it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import msa_lite
from msa_lite.evals.scores.records import read_records


def test_a_run_is_told_its_depth_where_the_target_knows_something(finished: Path, tmp_path: Path) -> None:
    """The models of this run are hardly trained, so that rows may have no score; then the attack is silent."""
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    facts = msa_lite.attack(folder, ["depth"], overrides=["attack.rows=4"]).facts
    (result,) = facts.attacks
    assert list(result.models) == ["unlearned"]
    assert sorted(path.name for path in (folder / "attacks/depth").iterdir()) == ["report.json", "unlearned"]
    records = read_records(folder / "attacks/depth/unlearned/patched.forget.jsonl")
    values = [record["uds"] for record in records if "skipped" not in record]
    shallow = pytest.approx(1 - sum(values) / len(values)) if values else None
    (trial,) = result.models["unlearned"].trials
    assert (trial.share, trial.rows, trial.skipped) == (shallow, len(values), 4 - len(values))
    assert (trial.outcome == "silent") == (not values)
    metric = json.loads((folder / "attacks/depth/report.json").read_text())["metrics"]["patched.shallow.unlearned"]
    assert (metric["value"], metric["n"], metric["skipped"]) == (shallow, len(values), 4 - len(values))
