"""Every example runs, at tiny size, on the benchmarks' rows beside the repository."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared/data"


def test_there_is_a_test_for_every_example() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == {"benchmark_small.py"}


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="no benchmark rows in ../shared/data")
@pytest.mark.parametrize(
    ("benchmark", "folder", "metric", "baselines"),
    [
        ("tofu", "tofu", "forget quality", ["undial"]),
        ("restor", "restor", "accuracy", []),
        ("muse", "muse-books-pd", "PrivLeak", []),
    ],
)
def test_a_small_history_goes_from_rows_to_the_benchmarks_own_table(
    benchmark: str, folder: str, metric: str, baselines: list[str], tmp_path: Path
) -> None:
    command = [sys.executable, str(ROOT / "examples/benchmark_small.py"), benchmark, "--data", str(DATA / folder)]
    done = subprocess.run(
        [*command, "--limit", "2", "--epochs", "0.05", "--out", str(tmp_path / "out"), "--baselines", *baselines],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert metric in done.stdout
    assert (tmp_path / "out/run/report.md").is_file()
    assert all((tmp_path / f"out/run/baselines/{name}/report.md").is_file() for name in baselines)
    assert ("| MSA " in done.stdout) == bool(baselines), "the table of all methods"
