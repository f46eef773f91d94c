"""Sweeps by several processes, of torchrun and of Ray: the points are shared, the result is that of one alone."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from filelock import FileLock

import msa_lite
from msa_lite.errors import StageError, UsageError
from msa_lite.pipeline.msa import msa_plan
from msa_lite.pipeline.strengths import help_sweep
from msa_lite.recipe import Recipe, load_recipe
from tests.e2e.conftest import tiny_recipe

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
NAMES = {"target", *(f"alpha-{alpha:g}_beta-{beta:g}" for alpha in (0.5, 1.0) for beta in (0.0, 0.5))}

# The command line, but nobody is done with a first point before two processes have begun one.
MEET = """
import os, sys, time
from pathlib import Path
from msa_lite.cli import main
from msa_lite.choose.validation import Validation

meet, own = Path(sys.argv.pop(1)), Validation.score_into

def score_into(self, *arguments, **more):
    (meet / str(os.getpid())).touch()
    while len(list(meet.iterdir())) < 2:
        time.sleep(0.05)
    return own(self, *arguments, **more)

Validation.score_into = score_into
main()
"""


def sweep_recipe(history: Path, output: Path) -> dict[str, Any]:
    recipe = tiny_recipe(history, output)
    recipe["forget"]["alpha"], recipe["retain"]["beta"] = [0.5, 1.0], [0.0, 0.5]
    recipe["select"] = {"validation": 0.25}
    recipe["vector"] |= {"epochs": 1, "warmup_epochs": 0}
    return recipe


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


def launch(*command: str) -> subprocess.CompletedProcess[str]:
    """Run Python with a command; when it takes too long, end all that it started."""
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, *command], env=environment, start_new_session=True, **options) as process:
        try:
            said, told = process.communicate(timeout=600)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, said, told)


def assert_equal(run: Path, alone: Path) -> None:
    """The same choice by the same scores, and the same weights."""
    for name in ("sweep/choice.json", "sweep/table.csv", "model/model.safetensors", "vectors/forget/rows.jsonl"):
        assert (run / name).read_bytes() == (alone / name).read_bytes(), name
    assert not list(run.rglob("*.partial"))
    assert not (run / "sweep/work.json").exists()
    assert not (run / "sweep/.locks").exists()


def scorers(stderr: str) -> dict[str, set[str]]:
    """Which points each process has scored, from what it says with -v."""
    found: dict[str, list[str]] = {}
    for name, process in re.findall(r"scoring (\S+) in process (\d+)", stderr):
        found.setdefault(process, []).append(name)
    assert len({name for names in found.values() for name in names}) == sum(map(len, found.values())), "scored twice"
    return {process: set(names) for process, names in found.items()}


@pytest.mark.slow
def test_processes_share_a_sweep_from_nothing(path: str, meeting: list[str], alone: Path, tmp_path: Path) -> None:
    done = launch(*TORCHRUN, *meeting, "-v", "sweep", path, "--json")
    assert done.returncode == 0, done.stderr
    shares = scorers(done.stderr)
    assert len(shares) == 2
    assert set().union(*shares.values()) == NAMES - {"target"}  # which the check before has scored
    assert json.loads(done.stdout)["alpha"] == json.loads((alone / "sweep/choice.json").read_text())["alpha"]
    assert_equal(tmp_path / "run", alone)


def helping(recipe: Recipe) -> threading.Thread:
    """Another process than the first, at work."""
    thread = threading.Thread(target=help_sweep, args=(recipe, msa_plan(recipe)), daemon=True)
    thread.start()
    return thread


def test_a_helper_is_not_taken_in_by_an_earlier_sweep(history: Path, alone: Path, tmp_path: Path) -> None:
    changed = sweep_recipe(history, tmp_path / "changed")
    changed["vector"]["learning_rate"] = 1e-3
    assert msa_lite.sweep(changed) is not None
    shutil.copytree(alone, tmp_path / "run")
    recipe = load_recipe(changed | {"output": str(tmp_path / "run")})
    helper = helping(recipe)
    helper.join(timeout=3)
    assert helper.is_alive()  # the vectors that lie there are of other settings
    for part in ("vectors", "sweep"):
        (tmp_path / "run" / part).rename(tmp_path / f"earlier-{part}")
        (tmp_path / "changed" / part).rename(tmp_path / "run" / part)
    helper.join(timeout=600)
    assert not helper.is_alive()


def test_a_demo_is_left_to_the_first_process(history: Path, alone: Path, tmp_path: Path) -> None:
    """Its history is made anew for another seed, so what lies there when a helper comes is none to go by."""
    shutil.copytree(alone / "sweep", tmp_path / "run/sweep")
    shutil.copytree(history, tmp_path / "run/history")
    people = {"prior": 8, "retain": 8, "forget": 4, "holdout": 4}
    changed = sweep_recipe(tmp_path / "run/history", tmp_path / "run") | {"demo": people, "seed": 1}
    helper = helping(load_recipe(changed))
    helper.join(timeout=600)
    assert not helper.is_alive()


@pytest.mark.slow
def test_a_fault_of_the_recipe_ends_all_processes(path: str, tmp_path: Path) -> None:
    done = launch(*TORCHRUN, "-m", "msa_lite", "sweep", path, "forget.data.columns.question=none")
    assert done.returncode != 0
    assert done.stdout == ""
    assert "no column 'none'" in done.stderr
    assert not (tmp_path / "run").exists()


# Ray


def workers_in(folder: Path) -> list[int]:
    """Processes of Ray's workers whose work is done in a folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if b"ray::_help" in (place / "cmdline").read_bytes() and Path(os.readlink(place / "cwd")) == folder:
                found.append(int(place.name))
        except OSError:  # it has just ended, or is somebody else's
            continue
    return found


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(12_000):  # ten minutes, for a busy machine; what never comes is an error
        if condition():
            return
        time.sleep(0.05)
    raise TimeoutError("what was waited for did not come")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ray on this machine, with room for two workers, which work in tmp_path."""
    ray = pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="workers are found in /proc")
def test_two_workers_of_ray_score_the_points_and_one_that_is_killed_is_told(
    cluster: None, path: str, alone: Path, tmp_path: Path
) -> None:
    partial = tmp_path / "run/sweep.partial"
    shutil.copytree(alone / "vectors", tmp_path / "run/vectors")
    shutil.copy(alone / "recipe.yaml", tmp_path / "run")
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(msa_lite.sweep, path, ray_workers=2)
        wait_for((partial / ".locks").is_dir)
        with FileLock(partial / ".locks/alpha-1_beta-0.5"):  # a point that takes long
            wait_for(lambda: len(list(partial.glob("*/report.json"))) == 5)  # the ideal's, and of all others
            wait_for(lambda: len(workers_in(tmp_path)) == 2)
            os.kill(workers_in(tmp_path)[0], signal.SIGKILL)
            with pytest.raises(StageError, match=r"a worker of the sweep failed \(.*\); points that are scored stay"):
                first.result(timeout=600)
            wait_for(lambda: not workers_in(tmp_path))  # the cluster is the caller's, and runs on
    before = {report: report.stat().st_mtime_ns for report in partial.glob("*/report.json")}
    assert msa_lite.sweep(path, ray_workers=2) is not None
    assert_equal(tmp_path / "run", alone)
    assert all((tmp_path / "run/sweep" / p.relative_to(partial)).stat().st_mtime_ns == t for p, t in before.items())


def test_without_ray_the_extra_is_named(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "ray" else own(name, *more))
    with pytest.raises(UsageError, match=r"--ray needs Ray: pip install 'msa-lite\[ray\]'"):
        msa_lite.sweep(path, ray_workers=2)
    assert not (tmp_path / "run").exists()
