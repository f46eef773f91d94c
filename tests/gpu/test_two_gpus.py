"""Two GPUs under `accelerate launch`: the results of one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from msa_lite.demo import HistorySettings, make_groups, make_history
from tests.e2e.conftest import PEOPLE, SIZES, sweep_recipe
from tests.gpu.cases import ROOT, losses_of
from tests.support.fits import weights

RATES: dict[str, Any] = {"prior_learning_rate": 5e-3, "tuning_learning_rate": 5e-3}


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("history")
    sizes: dict[str, Any] = SIZES | {"hidden_size": 64}
    make_history(
        folder, make_groups(PEOPLE, seed=0), HistorySettings(**sizes, **RATES, prior_epochs=2, tuning_epochs=5)
    )
    return folder


def run_on(count: int, recipe: dict[str, Any], *command: str) -> str:
    """Run a command of msa-lite on so many GPUs; return what it wrote."""
    path = Path(recipe["output"]).with_suffix(".yaml")
    path.write_text(yaml.safe_dump(recipe))
    launcher = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--num_processes",
        str(count),
        "--mixed_precision",
        "no",
    ]
    launcher += ["--multi_gpu"] if count > 1 else []
    done = subprocess.run([*launcher, "-m", "msa_lite", *command, str(path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module", params=["lora", "full"])
def runs(history: Path, tmp_path_factory: pytest.TempPathFactory, request: Any) -> list[Path]:
    """The folders of a sweep on one GPU and on two."""
    folders = []
    for count in (1, 2):
        recipe = sweep_recipe(history, tmp_path_factory.mktemp(f"on-{count}") / "run")
        recipe["vector"]["mode"] = request.param
        run_on(count, recipe, "run")
        folders.append(Path(recipe["output"]))
    return folders


def test_vectors_are_those_of_one_gpu(runs: list[Path]) -> None:
    for name in ("forget", "retain"):
        one, two = (run / "vectors" / name for run in runs)
        assert losses_of(two) == pytest.approx(losses_of(one), rel=0.02)
        ours, wanted = weights(two), weights(one)
        assert ours.keys() == wanted.keys()
        for key, value in ours.items():
            assert (value - wanted[key]).norm() <= 0.02 * wanted[key].norm() + 1e-3, key


def test_points_are_those_of_one_gpu(runs: list[Path]) -> None:
    tables = [sorted(path.parent.name for path in run.glob("sweep/*/report.json")) for run in runs]
    assert tables[0] == tables[1]
    assert len(tables[0]) >= 4


def test_scores_are_those_of_one_gpu(runs: list[Path]) -> None:
    one, two = (json.loads((run / "evaluation/target/report.json").read_text())["metrics"] for run in runs)
    assert one.keys() == two.keys()
    for name, metric in one.items():
        assert (metric["n"], metric["value"]) == (two[name]["n"], pytest.approx(two[name]["value"], rel=0.02, abs=0.01))
