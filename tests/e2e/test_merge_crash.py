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
from tests.support.merges import contents, stamps

KILLS = 12  # test_kill_points has one before each step

# Forks children that merge, and kills each after another delay; then lets one finish. The modules are loaded once.
DRIVER = """
import json, os, random, shutil, signal, sys, time
from pathlib import Path

from msa_lite.io.finished.seal import JOURNAL, verify_folder
from msa_lite.merger import merge
import filelock, msa_lite.merger.mergekit, yaml  # what a merge loads on its way

options, kills = json.loads(sys.argv[1]), int(sys.argv[2])
out = Path(options["out"])
partial = out.with_name(out.name + ".partial")
chance = random.Random(0)
facts = {"killed": 0, "journal": [], "finished": 0, "resumed": 0}

def child():
    try:
        merge(**options)
        os._exit(0)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)

def stamps():
    return {path.name: path.stat().st_mtime_ns for path in partial.glob("*.safetensors")} if partial.exists() else {}

def journaled():
    path = partial / JOURNAL
    lines = path.read_text().splitlines() if path.exists() else []
    return {json.loads(line)["file"] for line in lines if line.endswith("}")}

begun = time.monotonic()
if (pid := os.fork()) == 0:
    child()
assert os.waitpid(pid, 0)[1] == 0
usual = time.monotonic() - begun
shutil.rmtree(out)

def is_enough():  # on a busy machine, the first kills may all come before the first shard
    return facts["killed"] >= 20 * kills or (facts["resumed"] and max(facts["journal"]) > 1)

while facts["killed"] < kills or not is_enough():
    done, before = journaled(), stamps()
    if (pid := os.fork()) == 0:
        child()
    # Mostly short delays, so that a merge is killed some times before it is done.
    time.sleep(usual * chance.random() ** 2 * 1.5)
    os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0, "a rerun failed"
    after = stamps()
    facts["resumed"] += sum(before[name] == after.get(name) for name in done)
    facts["journal"].append(len(done))
    if os.WIFSIGNALED(status):
        facts["killed"] += 1
    if out.exists():
        assert verify_folder(out) == [], "half a folder has the final name"
        facts["finished"] += 1
        shutil.rmtree(out)
if (pid := os.fork()) == 0:
    child()
assert os.waitpid(pid, 0)[1] == 0
print(json.dumps(facts))
"""


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)


def test_kills_at_any_moment_end_in_the_same_files(
    inputs: dict[str, Any], undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    call = json.dumps(inputs | {"out": str(tmp_path / "out")})
    done = run(DRIVER, call, str(KILLS))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    facts = json.loads(done.stdout)
    assert facts["killed"] >= KILLS
    assert facts["resumed"] > 0
    assert max(facts["journal"]) > 1
    assert contents(tmp_path / "out") == undisturbed
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


KILLED_AT_THE_END = """
import json, os, signal, sys
from msa_lite.io.finished import manifest
from msa_lite.merger import merge

owner = os if sys.argv[2] == "rename" else manifest
setattr(owner, sys.argv[2], lambda *args: os.kill(os.getpid(), signal.SIGKILL))
merge(**json.loads(sys.argv[1]))
"""


@pytest.mark.parametrize("step", ["_apply_umask", "rename", "_sweep"])
def test_a_kill_while_the_folder_is_put_in_place_costs_no_shard(
    inputs: dict[str, Any], undisturbed: dict[str, bytes], tmp_path: Path, step: str
) -> None:
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    call = inputs | {"out": str(out)}
    assert run(KILLED_AT_THE_END, json.dumps(call), step).returncode == -9
    assert out.exists() == (step == "_sweep")
    before = stamps(out if out.exists() else partial)
    merge(**call)
    assert contents(out) == undisturbed
    assert stamps(out) == before
    assert list(tmp_path.iterdir()) == [out]


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
import filelock, msa_lite.merger.mergekit, shutil, yaml

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
