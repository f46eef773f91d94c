"""Start the command line as several processes, as `accelerate launch` and torchrun do."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]

# The command line, after some code that may do otherwise in one process than in the other. `rank` is its number.
_CHANGED = """
import os, sys
rank = int(os.environ["RANK"])
exec(sys.argv.pop(1))
from msa_lite.cli import main
main()
"""


def changed(folder: Path, code: str) -> list[str]:
    """Return what to launch in the place of `-m msa_lite`, to run some code first."""
    script = folder / "changed.py"
    script.write_text(_CHANGED)
    return [str(script), code]


def launch(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with a command; when it takes too long, end all that it started."""
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    with subprocess.Popen([sys.executable, *command], env=environment, start_new_session=True, **options) as process:
        try:
            out, err = process.communicate(timeout=600)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def assert_same_scores(run: Path, alone: Path) -> None:
    """Two sweeps have the same table, but for the noise of fp32: processes may have other numbers of threads."""
    tables = [list(csv.DictReader((one / "sweep/table.csv").open(encoding="utf-8"))) for one in (run, alone)]
    assert len(tables[0]) == len(tables[1]) > 0
    for mine, other in zip(*tables, strict=True):
        assert mine.keys() == other.keys()
        for key, text in other.items():
            assert mine[key] == text or float(mine[key]) == pytest.approx(float(text), rel=1e-5), (mine["model"], key)
