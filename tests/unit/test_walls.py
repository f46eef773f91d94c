"""Tests stay apart from whoever runs them: shown by a suite of a few tests, run by someone with a home of theirs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.walls import ROOT

CONFTEST = """
from tests.conftest import pytest_collection_finish, pytest_runtest_teardown, pytest_unconfigure
"""
TESTS = """
import os
from pathlib import Path
import pytest
from tests.support.processes import fork_script
from tests.support.walls import ROOT

def test_nothing_of_theirs_is_there():
    assert "OPENAI_API_KEY" not in os.environ
    assert Path.home() != Path(os.environ["PYTEST_TRUE_HOME"])
    assert os.listdir() == []

def test_code_may_be_read():
    assert (ROOT / "README.md").read_text()
    Path.home().joinpath("mine").write_text("")

def test_reads_their_runs():
    (ROOT / "runs").exists() and os.listdir(ROOT / "runs")
    with pytest.raises(OSError):
        open(ROOT / "runs/none/recipe.yaml")

def test_reads_their_home():
    Path(os.environ["PYTEST_TRUE_HOME"], ".token").read_text()

def test_a_child_reads_their_home():
    fork_script("open(__import__('os').environ['PYTEST_TRUE_HOME'] + '/.token')")

def test_writes_into_the_clone():
    with pytest.raises(OSError):
        os.rmdir(ROOT / "none")

def test_leaves_a_file():
    Path("left").touch()
"""


@pytest.mark.parametrize("mode", [(), ("-n", "1")], ids=["alone", "by a worker"])
def test_a_test_that_uses_what_belongs_to_its_runner_is_red(mode: tuple[str, ...], tmp_path: Path) -> None:
    home = tmp_path / "theirs/home"
    home.mkdir(parents=True)
    (home / ".token").write_text("secret")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_few.py").write_text(TESTS)
    theirs = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    theirs |= {"HOME": str(home), "OPENAI_API_KEY": "key", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-rE", *mode]
    with tempfile.TemporaryDirectory() as place:  # not in tmp_path: the address of a socket has 107 characters at most
        theirs["TMPDIR"] = place
        done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, env=theirs, cwd=tmp_path)
        left = [*Path(place).glob("msa-lite-tests-*")]
    red = {line.split()[1].partition("::")[2] for line in done.stdout.splitlines() if line.startswith("ERROR ")}
    names = ("reads_their_runs", "reads_their_home", "a_child_reads_their_home", "writes_into_the_clone")
    assert red == {f"test_{name}" for name in (*names, "leaves_a_file")}, done.stdout
    assert "7 passed, 5 errors" in done.stdout
    assert not left, "what the tests had instead is removed"
