"""A short run of the fuzzer, always of the same cases; `python -m tests.tools.fuzz` runs others, for longer."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--cases", "240", "--kills", "0", "--only", "merge", "--only", "merge --as adapter", "--only", "verify"),
        ("--cases", "80", "--kills", "0", "--only", "recipe", "--only", "mergekit"),
        ("--cases", "60", "--kills", "0", "--only", "run folder"),
        ("--kills", "6", "--only", "kills"),
    ],
    ids=lambda options: options[-1],
)
def test_no_case_breaks_the_contract(options: tuple[str, ...]) -> None:
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.tools.fuzz", "--seed", "0", *options],
        capture_output=True,
        text=True,
        env=os.environ | quiet,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 break the contract" in done.stdout
