"""What is chosen among settings, epochs and points: with some that break, and when something else is given."""

from __future__ import annotations

import json
from typing import Any

import pytest

import msa_lite
from msa_lite.io.finished.seal import load_manifest
from msa_lite.pipeline.baseline import trials
from tests.support.pages import page_text

# Settings and epochs of a baseline


def test_a_grid_is_tried_whole_and_one_epoch_of_one_setting_is_kept(small: dict[str, Any]) -> None:
    grid = {"learning_rate": [1e-4, "1e-3"], "retain_weight": [1, 2]}
    small["baseline"] = {"epochs": 1, "methods": {"grad_diff": grid}}
    result = msa_lite.run_baseline("grad_diff", small)
    names = {f"retain_weight-{weight}_learning_rate-{rate}" for rate in ("0.0001", "0.001") for weight in (1, 2)}
    assert {path.name for path in (result.folder / "vectors").iterdir()} == {f"grad_diff_{name}" for name in names}
    sweep = {path.name for path in (result.folder / "sweep").iterdir() if path.is_dir()}
    assert sweep == {"target", *(f"{name}_epoch-1" for name in names)}
    assert result.chosen["learning_rate"] in (1e-4, 1e-3)
    choice = json.loads((result.folder / "sweep/choice.json").read_text())
    assert {key: choice[key] for key in ("learning_rate", "retain_weight", "epoch")}.items() <= result.chosen.items()
    assert "retain_weight | learning_rate | epoch |" in page_text(result.folder)
    for name in names:
        settings = (load_manifest(result.folder / f"vectors/grad_diff_{name}") or {})["inputs"]["settings"]
        assert settings["learning_rate"] == float(name.rpartition("-")[2])
    # Another value is trained beside the others, which stay.
    labels: set[str] = set()
    small["baseline"]["methods"]["grad_diff"]["learning_rate"] = [1e-4, 1e-3, 2e-3]
    msa_lite.run_baseline("grad_diff", small, progress=lambda label, done, total: labels.add(label))
    assert {label for label in labels if label.startswith("grad_diff")} == {
        f"grad_diff_retain_weight-{weight}_learning_rate-0.002" for weight in (1, 2)
    }


# Settings that break


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was warned of in a baseline's run."""
    warnings: list[str] = []
    monkeypatch.setattr(trials.logger, "warning", lambda text, *values: warnings.append(text % values))
    return warnings


def test_a_setting_that_breaks_is_left_out(small: dict[str, Any], told: list[str]) -> None:
    small["baseline"] = {"epochs": 1, "methods": {"grad_diff": {"learning_rate": [1e12, 1e-3]}}}
    result = msa_lite.run_baseline("grad_diff", small)
    assert result.chosen["learning_rate"] == 1e-3
    sweep = {path.name.partition("_scale")[0] for path in (result.folder / "sweep").iterdir() if path.is_dir()}
    assert sweep == {"target", "learning_rate-0.001_epoch-1"}
    (warning,) = told
    assert warning.startswith("grad_diff_learning_rate-1e+12: the loss is ")
    assert warning.endswith("nothing was kept. Try a lower learning_rate; it is left out of the choice")


# What a choice was made of


def labels(method: str, recipe: dict[str, Any], *overrides: str) -> set[str]:
    """What a run worked on."""
    found: set[str] = set()

    def progress(label: str, done: int, total: int) -> None:
        found.add(label)

    if method == "msa":
        msa_lite.run(recipe, overrides, progress)
    else:
        msa_lite.run_baseline(method, recipe, overrides, progress)
    return found
