"""Kills at any moment, and two at once: a merge ends in the files of an undisturbed one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from msa_lite.errors import OutputError
from msa_lite.merger import merge
from tests.support.merges import contents


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)


WAITING = """
import json, sys, time
from pathlib import Path
from msa_lite.merger import merge

def wait(*args):
    Path(sys.argv[2], "ready").touch()
    while not Path(sys.argv[2], "go").exists():
        time.sleep(0.01)

merge(**json.loads(sys.argv[1]), progress=wait)
"""


def test_a_second_process_is_told_about_the_first(
    inputs: dict[str, Any], undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    call = inputs | {"out": str(tmp_path / "out")}
    signs = tmp_path / "signs"
    signs.mkdir()
    first = subprocess.Popen([sys.executable, "-c", WAITING, json.dumps(call), str(signs)])
    try:
        while not (signs / "ready").exists():
            assert first.poll() is None
        with pytest.raises(OutputError, match=r"out\.partial: another msa-lite is working in it"):
            merge(**call)
        with pytest.raises(OutputError, match="another msa-lite"):  # nor does one with other inputs clear it away
            merge(**(call | {"alpha": 2.0}))
    finally:
        (signs / "go").touch()
        assert first.wait(600) == 0
    assert contents(tmp_path / "out") == undisturbed


RACE = """
import json, os, sys
from msa_lite.errors import OutputError
from msa_lite.io.finished.seal import verify_folder
from msa_lite.merger import merge
import filelock, msa_lite.merger.mergekit.recipes, shutil, yaml

options, rounds, won = json.loads(sys.argv[1]), int(sys.argv[2]), []
for _ in range(rounds):
    pids = []
    for _ in range(4):
        if (pid := os.fork()) == 0:
            try:
                merge(**options)
                os._exit(0)
            except OutputError as error:
                os._exit(7 if "another msa-lite" in str(error) else 1)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(1)
        pids.append(pid)
    codes = [os.WEXITSTATUS(os.waitpid(pid, 0)[1]) for pid in pids]
    assert 0 in codes and set(codes) <= {0, 7}, codes
    assert verify_folder(__import__("pathlib").Path(options["out"])) == []
    won.append(codes.count(0))
    shutil.rmtree(options["out"])
print(json.dumps(won))
"""


def test_of_some_that_start_together_one_merges_and_none_breaks(inputs: dict[str, Any], tmp_path: Path) -> None:
    done = run(RACE, json.dumps(inputs | {"out": str(tmp_path / "out")}), "3")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) == 3
    assert list(tmp_path.iterdir()) == []
