"""The commands of `muse/news` on a tiny history: a larger forget set, a second request, and both curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import msa_lite
from msa_lite.io.finished.seal import load_manifest
from msa_lite.recipe import load_recipe
from tests.support.benchmark_data import NEWS, write_data


@pytest.fixture(scope="module")
def small(history: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What makes the shipped recipe small: other models, the data in a folder, a short fit."""
    data = write_data(tmp_path_factory.mktemp("data") / "MUSE-News", NEWS)
    places = {"forget.data.path": data, "retain.data.path": data, "evaluate.data": data}
    models = {"target": history / "target", "prior": history / "prior", "evaluate.ideal": history / "ideal"}
    fit = {"vector.epochs": 2, "vector.learning_rate": 5e-3, "vector.max_length": 64, "vector.lora": "{rank: 2}"}
    return [f"{key}={value}" for key, value in (places | models | fit).items()] + ["verdict=false"]


def test_both_curves_come_from_runs_side_by_side(small: list[str], tmp_path: Path) -> None:
    def run(name: str, *keys: str) -> dict[str, Any]:
        msa_lite.run(load_recipe("muse/news", [*small, *keys, f"output={tmp_path}/{name}"]))
        inputs: dict[str, Any] = (load_manifest(tmp_path / name / "model") or {})["inputs"]
        return inputs

    first = run("1")
    larger = run("scal-2", "forget.data.split=forget_2")
    sust = "forget.data.name=sust", "forget.data.split=forget_2", "retain=null", f"earlier=[{tmp_path}/1]"
    second = run("2", *sust)
    # One vector of all rows; or two of disjoint rows, with the retain vector of the first request alone.
    assert first["target"] == larger["target"] == second["target"]
    assert first["forget"] != larger["forget"]
    merged = [second["forget 1"], second["forget 2"]]  # numbered by their content, not by time
    assert merged[0] != merged[1]
    assert first["forget"] in merged
    assert larger["forget"] not in merged
    assert second["strengths"] == {"forget 1": 1.0, "forget 2": 1.0, "retain": 0.75}
    for labels in (("1", "scal-2"), ("1", "2")):
        curve = msa_lite.compare([f"{label}={tmp_path}/{label}" for label in labels])
        assert [row.label for row in curve.rows] == ["Target", "Ideal", *labels]
        assert curve.title == "muse, news"
        assert all(row.cells["knowmem_r"].n == 1 for row in curve.rows)
