"""What a user sees of a run: in the terminal, in a log, and from Python."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import msa_lite
from msa_lite.io.console.progress import Step, Watcher
from tests.e2e.conftest import CallCli


class Steps(Watcher):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.announced: list[str] = []
        self.calls: list[tuple[str, str]] = []

    def announce(self, steps: Sequence[Step]) -> None:
        self.announced = [step.label for step in steps]

    def __call__(self, label: str, done: int, total: int, note: str = "") -> None:
        self.calls.append((label, note))


def write(recipe: dict[str, Any], folder: Path) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def test_a_run_announces_the_steps_that_it_takes_and_tells_the_loss(
    grid: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers.utils import logging

    steps = Steps()
    logging.enable_progress_bar()  # another test may have switched them off
    msa_lite.run(grid, progress=steps)
    assert logging.is_progress_bar_enabled()
    labels = dict.fromkeys(label for label, _ in steps.calls)
    assert list(labels) == steps.announced
    losses = [note for label, note in steps.calls if label == "forget vector" and note]
    assert losses
    assert all(float(note.removeprefix("loss ")) > 0 for note in losses)
    shown = capfd.readouterr()
    assert "Loading weights" not in shown.err  # the bars of transformers, which nobody asked for
    assert "Writing" not in shown.err


def test_a_log_has_a_line_for_each_step_and_the_warnings_at_the_end(
    recipe: dict[str, Any], tmp_path: Path, call_cli: CallCli
) -> None:
    recipe["vector"]["learning_rate"] = 1e-7  # so little that bfloat16 keeps nothing of it
    recipe["merge"] = {"dtype": "bfloat16"}
    path = write(recipe, tmp_path)
    code, out, err = call_cli("run", path, "--json")
    assert code == 0, err
    assert out.startswith("{")
    lines = err.splitlines()
    assert lines[0] == f"msa-lite 0.1.0: {path} → {tmp_path / 'run'}"
    labels = [f"check: {name}" for name in ("target", "prior", "other rows")]
    labels += ["probe: prior", "forget vector", "retain vector", "merge"]
    labels += [f"scores: {name}" for name in ("ideal", "target", "unlearned")]
    for number, label in enumerate(labels, 1):
        assert any(f"[{number}/{len(labels)}] {label}: done in " in line for line in lines), (label, err)
    (loss,) = [line for line in lines if "forget vector: done" in line]
    assert ", loss " in loss
    told = [line.removeprefix("warning: ") for line in lines if line.startswith("warning: ")]
    assert told
    again = lines[lines.index(f"{len(told)} warning{'s' if len(told) > 1 else ''}:") + 1 :]
    assert [line.removeprefix("- ") for line in again if line.startswith("- ")] == told


def test_the_first_line_is_there_before_torch_is_loaded(recipe: dict[str, Any], tmp_path: Path) -> None:
    script = (
        "import sys, click\n"
        "echo = click.echo\n"
        "def look(text, **options):\n"
        "    echo(text, **options)\n"
        "    assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "    sys.exit(7)\n"
        "click.echo = look\n"
        "from msa_lite.cli import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", script, "run", str(write(recipe, tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == f"msa-lite 0.1.0: {tmp_path / 'recipe.yaml'} → {tmp_path / 'run'}\n"
    assert done.returncode == 7


def test_importing_the_package_sets_the_policy_of_waiting_threads_and_nothing_else() -> None:
    script = "import os; before = dict(os.environ); import msa_lite; print(dict(os.environ.items() - before.items()))"
    unset = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    for environment, changes in ((unset, {"OMP_WAIT_POLICY": "PASSIVE"}), (unset | {"OMP_WAIT_POLICY": "ACTIVE"}, {})):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
        assert done.stdout == f"{changes}\n"
