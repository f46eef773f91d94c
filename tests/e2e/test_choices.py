"""What is chosen among settings, epochs and points: with some that break, and when something else is given."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import msa_lite
from msa_lite.errors import NotFiniteError, StageError
from msa_lite.io.files.writing import json_form
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


@pytest.mark.parametrize("start", ["target", "prior"])
def test_an_epoch_that_is_all_warm_up_is_no_candidate(start: str, small: dict[str, Any]) -> None:
    """Its one step is at learning rate 0, and leaves nothing to merge."""
    small["vector"] |= {"batch_size": 32, "warmup_epochs": 1}
    result = msa_lite.run_baseline("grad_diff", small, [f"baseline.start={start}"])
    assert result.chosen["epoch"] == 2
    epochs = {path.name.partition("_")[0] for path in (result.folder / "sweep").glob("epoch-*")}
    assert epochs == {"epoch-2"}
    assert json_form(result.merged)["weights_changed"] > 0


# Settings that break


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was warned of in a baseline's run."""
    warnings: list[str] = []
    monkeypatch.setattr(trials.logger, "warning", lambda text, *values: warnings.append(text % values))
    return warnings


@pytest.mark.parametrize(("start", "rates"), [("target", [1e-3, 1e12]), ("prior", [1e12, 1e-3])])
def test_a_setting_that_breaks_is_left_out(
    start: str, rates: list[float], small: dict[str, Any], told: list[str]
) -> None:
    small["baseline"] = {"epochs": 1, "start": start, "methods": {"grad_diff": {"learning_rate": [1e-3, 2e-3]}}}
    vectors = msa_lite.run_baseline("grad_diff", small).folder / "vectors"
    # As if an earlier run with other data had made the one that breaks now: finished, but of other inputs.
    shutil.copytree(vectors / "grad_diff_learning_rate-0.002", vectors / "grad_diff_learning_rate-1e+12")
    small["baseline"]["methods"]["grad_diff"]["learning_rate"] = rates
    result = msa_lite.run_baseline("grad_diff", small)
    assert result.chosen["learning_rate"] == 1e-3
    sweep = {path.name.partition("_scale")[0] for path in (result.folder / "sweep").iterdir() if path.is_dir()}
    assert sweep == {"target", "learning_rate-0.001_epoch-1"}
    (warning,) = told
    assert warning.startswith("grad_diff_learning_rate-1e+12: the loss is ")
    assert warning.endswith("nothing was kept. Try a lower learning_rate; it is left out of the choice")


def test_settings_that_all_break_are_an_error(small: dict[str, Any], tmp_path: Path, told: list[str]) -> None:
    small["baseline"] = {"methods": {"grad_diff": {"learning_rate": [1e11, 1e12]}}}
    with pytest.raises(NotFiniteError, match=r"1e\+12: .* nothing was kept. Try a lower learning_rate") as caught:
        msa_lite.run_baseline("grad_diff", small)
    assert caught.value.exit_code == 4
    assert len(told) == 1
    assert not list((tmp_path / "run/baselines/grad_diff/vectors").iterdir())


def test_what_is_no_fault_of_a_setting_ends_the_run(small: dict[str, Any], told: list[str]) -> None:
    def progress(label: str, done: int, total: int) -> None:
        if label.startswith("grad_diff"):
            raise StageError("no room on that disk")

    small["baseline"] = {"methods": {"grad_diff": {"learning_rate": [1e-3, 2e-3]}}}
    with pytest.raises(StageError, match="no room"):
        msa_lite.run_baseline("grad_diff", small, progress=progress)
    assert told == []


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


def test_an_epoch_whose_change_is_added_is_chosen_anew_for_another_target(small: dict[str, Any], history: Path) -> None:
    small["baseline"] = {"start": "prior", "epochs": 2, "keep": "all"}  # else the weights of other epochs are gone
    assert {"grad_diff", "choosing the epoch"} <= labels("grad_diff", small)
    override = f"target={history / 'ideal'}"
    found = labels("grad_diff", small, override)
    assert "choosing the epoch" in found
    assert "grad_diff" not in found  # the training has nothing to do with it
    assert labels("grad_diff", small, override) == set()


def test_points_are_chosen_anew_for_another_merge(small: dict[str, Any]) -> None:
    """They are scored with weights that are rounded as the merge rounds them."""
    small["forget"]["alpha"], small["vector"]["epochs"] = [0.5, 1.0], 1
    assert {"forget vector", "choosing alpha and beta"} <= labels("msa", small)
    found = labels("msa", small, "merge.dtype=bfloat16")
    assert {"choosing alpha and beta", "merge"} <= found
    assert "forget vector" not in found
