"""Sweeps by several processes, of one machine or of several: the points are shared, the result is that of one alone."""

from __future__ import annotations

import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

import msa_lite
from tests.e2e.conftest import CallCli, sweep_recipe
from tests.support.processes import TORCHRUN, assert_same_scores, launch

# The command line, but nobody is done with a first point before two processes have begun one. The process whose rank
# is in KILLED dies over its first point, once another process has scored one.
MEET = """
import os, signal, sys, time
from pathlib import Path
from msa_lite.cli import main
from msa_lite.choose.validation import Validation

meet, own, rank = Path(sys.argv.pop(1)), Validation.score_into, os.environ.get("RANK", "none")

def score_into(self, *arguments, **more):
    (meet / str(os.getpid())).touch()
    while len(list(meet.iterdir())) < 2:
        time.sleep(0.05)
    if rank == os.environ.get("KILLED"):
        while not list(arguments[0].parent.glob("alpha-*/report.json")):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    return own(self, *arguments, **more)

Validation.score_into = score_into
main()
"""


@pytest.fixture(scope="module")
def alone(history: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sweep by one process."""
    result = msa_lite.sweep(sweep_recipe(history, tmp_path_factory.mktemp("alone") / "run"))
    assert result is not None
    return result.folder


@pytest.fixture
def path(history: Path, tmp_path: Path) -> str:
    """A recipe's file; its output is tmp_path/run."""
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(sweep_recipe(history, tmp_path / "run")))
    return str(tmp_path / "recipe.yaml")


@pytest.fixture
def meeting(tmp_path: Path) -> list[str]:
    """What to launch in the place of `-m msa_lite`, so that two processes meet."""
    (tmp_path / "meet.py").write_text(MEET)
    (tmp_path / "meet").mkdir()
    return [str(tmp_path / "meet.py"), str(tmp_path / "meet")]


def assert_equal(run: Path, alone: Path) -> None:
    """The same choice by the same scores, and the same weights."""
    for name in ("sweep/choice.json", "model/model.safetensors", "vectors/forget/rows.jsonl"):
        assert (run / name).read_bytes() == (alone / name).read_bytes(), name
    assert_same_scores(run, alone)
    assert not list(run.rglob("*.partial"))


def scorers(stderr: str) -> dict[str, set[str]]:
    """Which points each process has scored, from what it says with -v."""
    found: dict[str, list[str]] = {}
    for name, process in re.findall(r"scoring (\S+) in process (\d+)", stderr):
        found.setdefault(process, []).append(name)
    assert len({name for names in found.values() for name in names}) == sum(map(len, found.values())), "scored twice"
    return {process: set(names) for process, names in found.items()}


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_others_and_scores_stay(
    path: str, meeting: list[str], alone: Path, tmp_path: Path
) -> None:
    done = launch(*TORCHRUN, *meeting, "run", path, "--until", "sweep", KILLED="1")
    assert done.returncode != 0
    assert "SIGKILL" in done.stderr  # torchrun names the process and its signal
    partial = tmp_path / "run/sweep.partial"
    before = {report: report.stat().st_mtime_ns for report in partial.glob("*/report.json")}
    assert {report.parent.name for report in before} > {"target", "ideal"}
    assert msa_lite.sweep(path) is not None
    assert_equal(tmp_path / "run", alone)
    assert all((tmp_path / "run/sweep" / p.relative_to(partial)).stat().st_mtime_ns == t for p, t in before.items())


@pytest.mark.slow
def test_machines_with_a_shared_disk_share_a_sweep(path: str, meeting: list[str], alone: Path, tmp_path: Path) -> None:
    """Two launchers, as on two machines: each starts one process, and they find each other by an address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    node = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1", "--master_addr", "127.0.0.1"]
    sweep = ["-v", "run", path, "--until", "sweep"]
    with ThreadPoolExecutor(2) as threads:
        machines = [
            threads.submit(launch, *node, "--master_port", port, "--node_rank", rank, *meeting, *sweep)
            for rank in ("0", "1")
        ]
        done = [machine.result() for machine in machines]
    assert [one.returncode for one in done] == [0, 0], done
    assert [bool(one.stdout) for one in done] == [True, False]
    assert len(scorers("".join(one.stderr for one in done))) == 2
    assert_equal(tmp_path / "run", alone)


# What a sweep refuses, by the command line: each with a message of its own, before anything is written.


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["retain.beta=[0.5,-1]"], "retain.beta"),
        (["forget.alpha=[1,1.0]"], "a value stands twice"),
        (["forget.alpha=[1,.nan]"], "forget.alpha"),
        (["forget.alpha=1", "retain.beta=0.5"], "forget.alpha, retain.beta: one point"),
        (["retain={beta: [0, 1]}"], "retain.data"),
        (["evaluate=null"], "do not set evaluate to null"),
        (["select.score=tofu"], "benchmark qa: does not measure what the choice needs (tofu)"),
        (["select.minimise=rouge_l_f"], "select.minimise: is gone: the rules are extraction and the paper's scores"),
        (["evaluate.ideal=null", "select.score=muse-gap"], "compares with the ideal model; give evaluate.ideal"),
        (["select.kep=1"], "did you mean 'keep'"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_written(
    overrides: list[str], told: str, grid: dict[str, Any], call_cli: CallCli, tmp_path: Path
) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(grid))
    found, said, err = call_cli("run", str(tmp_path / "recipe.yaml"), "--until", "sweep", *overrides)
    assert (found, said) == (2, "")
    assert told in err
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]
