"""The table of defaults in RESULTS.md: what was tried in their place, and how sure a difference is."""

from __future__ import annotations

from pathlib import Path

from collect import collect
from defaults import TRIALS, defaults_table
from experiments import EXPERIMENTS

from tests.support.real_model import IDEAL, Folder


def test_what_was_tried_stands_beside_each_default(tmp_path: Path) -> None:
    scores = {"msa-lora": (0.4, 0.8), "lora-r8": IDEAL, "lora-mlp": (0.6, 0.6), "merged": IDEAL}
    table = defaults_table(collect(Folder(tmp_path, scores=scores).write()))
    assert table is not None
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert [line[:4] for line in lines] == [
        ["vector.lora.rank, .alpha", "32, 64, rate 3.4e-4", "8, 16, rate 1.4e-3", "nearer"],
        ["vector.lora.targets", "all-linear", "MLP alone", "further"],
    ]
    # (|.4 − .3| + |.8 − .85|) / 2 = .075 with seed 0; each seed moves both models up by .004: + .004, then − .004
    assert lines[0][4:6] == ["+0.075", "+0.075 to +0.075 (seeds)"]
    assert lines[1][4] == "-0.200"


def test_an_uncertain_difference_changes_no_default(tmp_path: Path) -> None:
    scores = {"msa-lora": (0.4, 0.8), "lora-r8": IDEAL}
    table = str(defaults_table(collect(Folder(tmp_path / "one", (0,), scores).write())))  # one seed without rows
    assert "| not sure | +0.075 | – | 0: +0.075 |" in table
    rows = str(defaults_table(collect(Folder(tmp_path / "rows", (0,), scores, rows=True).write())))
    assert "| nearer, one seed | +0.075 |" in rows
    assert defaults_table(collect(Folder(tmp_path / "none", (0,), {"msa-lora": IDEAL}).write())) is None


def test_the_trials_of_defaults_are_experiments_on_the_same_history() -> None:
    target = {one.name: one.target for one in EXPERIMENTS}
    assert [target[trial.name] for trial in TRIALS] == [target[trial.of] for trial in TRIALS]
