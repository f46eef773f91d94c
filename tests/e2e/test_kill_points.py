"""A kill before each single step that a merge takes on the disk: the very next run ends in the files of a calm one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.merges import Adapter, write_checkpoint

# Forks a child for each step, in which everything that Python does to files below a folder is counted, and which is
# killed before the step of its number; then another child does the whole. The modules are loaded once.
DRIVER = """
import json, os, shutil, signal, sys
from pathlib import Path

from msa_lite import merger
from msa_lite.io.finished.seal import verify_folder
import filelock, msa_lite.merger.mergekit.recipes, yaml  # what a merge loads on its way

form, options, folder = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
before = json.loads(sys.argv[4])  # options of a merge whose result is replaced, or null
out = Path(folder, "out")
make = getattr(merger, form)
os.fsync = lambda handle: None  # a kill takes nothing back that was written
STEPS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "open")

def steps_of(work, last=None):
    # Do `work` in a child that is killed before step `last`; its number of steps, or None where it was killed.
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        count = 0
        def hook(event, args):
            nonlocal count
            if event not in STEPS or (event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR)):
                return
            place = os.fsdecode(args[0]) if isinstance(args[0], (str, bytes, os.PathLike)) else ""
            if os.path.isabs(place) and not place.startswith(folder):  # below a folder that is open, names are short
                return
            count += 1
            if count == last:
                os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os.write(writer, str(count).encode())
        os._exit(0)
    os.close(writer)
    status = os.waitpid(pid, 0)[1]
    said = os.read(reader, 100)
    os.close(reader)
    if os.WIFSIGNALED(status):
        return None
    assert os.WEXITSTATUS(status) == 0, f"failed at step {last}"
    return int(said)

former = Path(folder + "-former")
if before:
    assert steps_of(lambda: make(out=former, **{**options, **before})) is not None

def start():
    shutil.rmtree(folder)
    os.mkdir(folder)
    if before:
        shutil.copytree(former, out)

def contents():
    return {path.name: path.read_bytes() for path in out.iterdir()}

def work():
    make(out=out, replace=bool(before), **options)

start()
count, calm = steps_of(work), contents()
left = []
for step in range(1, count + 1):
    start()
    assert steps_of(work, step) is None, step
    there = out.exists()
    if there:
        assert verify_folder(out) == [], step  # the new one, or the former
    assert steps_of(work) is not None, step
    assert contents() == calm, step
    assert os.listdir(folder) == ["out"], step
    left.append(there)
print(json.dumps([count, sum(left)]))
"""


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A merge of two shards that takes a moment."""
    random, folder = np.random.default_rng(0), tmp_path_factory.mktemp("two shards")
    names = ["layers.0", "layers.1"]
    arrays = {f"{name}.weight": random.normal(size=(16, 8)).astype(np.float32) for name in names}
    write_checkpoint(folder / "target", arrays, {f"layers.{n}.weight": n for n in range(2)})
    halves = ((2, 8), (16, 2))
    factors = {name: tuple(random.normal(size=shape).astype(np.float32) for shape in halves) for name in names}
    return {"target": str(folder / "target"), "forget": str(Adapter(factors).write(folder / "forget"))}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("form", "before"), [("merge", None), ("merge", {"alpha": 0.5}), ("merge_adapters", {"alpha": 0.5})]
)
def test_a_kill_before_any_step_costs_the_next_run_nothing(
    options: dict[str, Any], tmp_path: Path, form: str, before: dict[str, Any] | None
) -> None:
    (tmp_path / "work").mkdir()
    arguments = [form, json.dumps(options), str(tmp_path / "work"), json.dumps(before)]
    done = subprocess.run([sys.executable, "-c", DRIVER, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    steps, finished = json.loads(done.stdout)
    assert steps > 20
    assert 0 < finished < steps or before
