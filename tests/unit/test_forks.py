"""Children of the fork server end, print and see what they are given as new processes do."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.processes import fork_script


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pass", 0),
        ("import sys; sys.exit(7)", 7),
        ("raise SystemExit('no')", 1),
        ("raise ValueError('no')", 1),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
    ],
)
def test_the_end_of_a_child_is_its_status(code: str, status: int) -> None:
    done = fork_script(code)
    assert (done.returncode, done.stdout) == (status, "")
    assert ("no" in done.stderr) is ("no" in code)


def test_a_child_has_its_own_arguments_folder_and_environment_and_torch_already(tmp_path: Path) -> None:
    code = "import os, sys; print(sys.argv[1:], os.getcwd(), sorted(os.environ), 'torch' in sys.modules)"
    done = fork_script(code, "a", "é", cwd=tmp_path, env={"ONE": "1"})
    assert done.stdout == f"['a', 'é'] {tmp_path} ['ONE'] True\n"
    assert "ONE" not in os.environ
    full = fork_script("import pathlib; pathlib.Path('big').write_bytes(bytes(2000))", cwd=tmp_path, limit=1000)
    assert "File too large" in full.stderr
