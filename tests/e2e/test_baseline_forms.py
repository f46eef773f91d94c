"""Baselines that are stopped, that are given other data or a demo, and what they refuse."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

import msa_lite
from msa_lite.errors import MsaError, StageError
from msa_lite.io.files.writing import hash_file
from msa_lite.io.finished.seal import load_manifest, verify_folder
from msa_lite.pipeline.baseline import trials
from tests.e2e.conftest import write_recipe
from tests.e2e.test_baseline import short_recipe
from tests.support.pages import page_text
from tests.support.processes import fork_script

# Stopped

STOPPER = """
import contextlib, os, sys
import msa_lite.cli.arguments as arguments
label, step, signal = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
def progress(name, done, total):
    print(name, done, sep=": ")
    if name == label and done >= step:
        sys.stdout.flush()
        os.kill(os.getpid(), signal)
arguments.progress_bars = contextlib.contextmanager(lambda: (yield progress))
from msa_lite.cli import _run
sys.exit(_run(["baseline", "npo", *sys.argv[4:]]))
"""


def stopped(path: str, label: str, step: int, number: int = signal.SIGKILL) -> subprocess.CompletedProcess[str]:
    """`msa-lite baseline npo`, ended by a signal where its progress gets to a step; stdout: all progress till then."""
    return fork_script(STOPPER, label, str(step), str(int(number)), path)


def test_a_baseline_that_is_stopped_goes_on_where_it_was_and_ends_in_the_same_model(
    small: dict[str, Any], tmp_path: Path
) -> None:
    whole = msa_lite.run_baseline("npo", small | {"output": str(tmp_path / "whole")})
    path, run = write_recipe(small, tmp_path), tmp_path / "run/baselines/npo"
    partial = run / "vectors/npo.partial"

    killed = stopped(path, "npo", 5)  # 18 rows in batches of 8 are 3 steps an epoch
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (run / "vectors/npo").exists()
    first = (partial / "scores/epoch-1/report.json").stat().st_mtime_ns

    interrupted = stopped(path, "choosing the epoch", 2, signal.SIGINT)
    assert interrupted.returncode == 130, interrupted.stderr
    assert "interrupted; finished stages stay" in interrupted.stderr
    assert re.findall(r"^npo: (\d+)$", interrupted.stdout, re.MULTILINE) == ["4", "5", "6"]  # not the first epoch
    assert (run / "vectors/npo/scores/epoch-1/report.json").stat().st_mtime_ns == first
    assert not (run / "sweep").exists()

    labels: set[str] = set()
    again = msa_lite.run_baseline("npo", path, progress=lambda label, done, total: labels.add(label))
    assert "npo" not in labels
    assert {"merge", "scores: unlearned"} <= labels
    for name in ("model/model.safetensors", "evaluation/unlearned/forget.jsonl", "sweep/choice.json"):
        assert hash_file(run / name) == hash_file(whole.folder / name)
    logs = [folder / "vectors/npo/train_log.jsonl" for folder in (run, whole.folder)]
    assert logs[0].read_text() == logs[1].read_text()
    assert again.reports == whole.reports


# What is refused


@pytest.mark.parametrize(
    ("method", "overrides", "words"),
    [
        ("nop", [], "no method 'nop' (did you mean 'npo'?); choose from grad_ascent, grad_diff, npo"),
        ("npo", ["baseline.methods.simnpo.beta=-1"], "methods.simnpo:\n  beta: expected more than 0, got -1"),
        ("wga", ["baseline.methods.wga={forget_weight: 0, retain_weight: [1, 0]}"], "there is nothing to minimise"),
        ("rmu", [], "baseline.methods.rmu.layer: 7, but"),
        ("npo", ["retain=null"], "or baseline.methods.npo.retain_weight=0"),
        ("dpo", ["forget.data.format=text", "forget.data.columns.text=question"], "forget.data.format qa"),
        ("npo", ["baseline.scale=0.5"], "scale: only with start: prior"),
        ("npo", ["evaluate=null", "baseline.start=prior", "baseline.scale=[1,2]"], "do not set evaluate to null"),
        ("npo", ["vector.mode=full", "merge.as=adapter"], "vector.mode full makes no adapter"),
        ("npo", ["vector={batch_size: 32, warmup_epochs: 1}", "baseline.epochs=1"], "or warmup_epochs: 0"),
        ("task_vector", ["vector={batch_size: 32, warmup_epochs: 1, epochs: 1}"], "the first step learns nothing"),
        ("task_vector", ["baseline.start=prior"], "task_vector from the prior is MSA itself"),
        ("task_vector", ["baseline.methods.task_vector.alpha=1"], "it has forget.alpha and retain.beta"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    method: str, overrides: list[str], words: str, small: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(MsaError, match=re.escape(words)) as caught:
        msa_lite.run_baseline(method, small, overrides)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "run").exists()


def test_only_the_weights_of_the_chosen_epoch_stay_and_the_reports_of_all(knowing: Path, tmp_path: Path) -> None:
    recipe = short_recipe(knowing, tmp_path / "run")
    grid = {"npo": {"learning_rate": [1e-3, 3e-3]}}  # neither breaks the model
    recipe["baseline"] = {"methods": grid}
    run = msa_lite.run_baseline("npo", recipe)
    vectors = run.folder / "vectors"
    assert [path.name for path in vectors.glob("*/epoch-*")] == [f"epoch-{run.chosen['epoch']}"]
    assert len(json.loads((run.folder / "sweep/choice.json").read_text())["scores"]) == 4
    assert [fault for path in vectors.iterdir() for fault in verify_folder(path)] == []

    labels: set[str] = set()
    again = msa_lite.run_baseline("npo", recipe, progress=lambda label, done, total: labels.add(label))
    assert (again.chosen, labels) == (run.chosen, set()), "nothing is trained or scored again"

    other = next(rate for rate in grid["npo"]["learning_rate"] if rate != run.chosen["learning_rate"])
    narrow = [f"baseline.methods.npo.learning_rate=[{other}, 1.0e-6]"]
    with pytest.raises(StageError, match=r"dropped after an earlier choice; remove .*, and run again"):
        msa_lite.run_baseline("npo", recipe, narrow)
    shutil.rmtree(next(path for path in vectors.iterdir() if str(other) in path.name))
    assert msa_lite.run_baseline("npo", recipe, narrow).chosen["learning_rate"] in (other, 1e-6)


# What is chosen among settings and epochs, with some that break


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
