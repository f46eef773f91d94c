"""Every example runs, at tiny size; the one on TOFU needs its rows beside the repository."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOFU = ROOT.parent / "shared/data/tofu"


def test_there_is_a_test_for_every_example() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == {"tofu_small.py"}


@pytest.mark.skipif(not TOFU.is_dir(), reason="no TOFU rows in ../shared/data/tofu")
def test_tofu_small_goes_from_rows_to_a_table(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples/tofu_small.py"), "--data", str(TOFU), "--limit", "12"]
    done = subprocess.run(
        [*command, "--epochs", "2", "--out", str(tmp_path / "out")], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "ROUGE-L recall" in done.stdout
    assert (tmp_path / "out/run/report.md").is_file()
