"""The script for Slurm parses, and its command lines work, with a stand-in for Slurm's own commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.e2e.conftest import tiny_recipe

SCRIPT = Path(__file__).parents[2] / "examples/slurm/run.sbatch"
ARRAY = SCRIPT.with_name("table.sbatch")
# One node, which is this machine.
COMMANDS = {
    "scontrol": 'test "$*" = "show hostnames node[1-2]" && printf "localhost\\nother\\n"',
    "srun": 'test "$1" = --kill-on-bad-exit=1 && shift && exec "$@"',
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
}


@pytest.mark.parametrize("script", [SCRIPT, ARRAY], ids=lambda path: path.stem)
def test_the_script_parses(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0


@pytest.mark.slow
def test_the_script_launches_a_recipe(history: Path, tmp_path: Path) -> None:
    for name, line in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tiny_recipe(history, tmp_path / "run")))
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "node[1-2]"}
    job |= {"SLURM_GPUS_ON_NODE": "2", "SLURM_CPUS_PER_TASK": "2"}
    command = ["bash", str(SCRIPT), "run", "--until=vectors", str(tmp_path / "recipe.yaml"), "vector.epochs=1"]
    environment = os.environ | job | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([*command, "vector.warmup_epochs=0"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("vector: ") == 2
    assert "forget vector: done" in done.stderr
