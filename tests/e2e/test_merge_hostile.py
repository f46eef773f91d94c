"""Inputs that change while a merge reads them, damaged partial folders, and a kill before each step on the disk."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msa_lite.errors import StageError
from msa_lite.io.files.writing import digest
from msa_lite.io.finished.seal import JOURNAL, verify_folder
from msa_lite.merger import merge
from tests.support.merges import Adapter, contents, read_checkpoint, stamps, write_checkpoint


def append(path: Path) -> None:
    with open(path, "ab") as stream:
        stream.write(b" ")


def flip(path: Path) -> None:
    """Change a byte and nothing else."""
    with open(path, "r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last[0] ^ 1]))


def put_another(path: Path) -> None:
    """Rename a copy with the same size and time of change into its place."""
    shutil.copy2(path, path.with_suffix(".new"))
    os.rename(path.with_suffix(".new"), path)


CHANGES: list[Callable[[Path], Any]] = [append, flip, put_another, Path.unlink, os.utime, lambda p: os.truncate(p, 9)]
SHARD = "target/model-00004.safetensors"
FILES = [
    "target/config.json", "target/model.safetensors.index.json", "forget/adapter_model.safetensors",
    "forget/adapter_config.json", "prior/model.safetensors",
]  # fmt: skip


@pytest.fixture
def copies(inputs: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Inputs of a merge below tmp_path, a prior and a tuned checkpoint among them."""
    folder = tmp_path / "inputs"
    for name in ("target", "forget"):
        shutil.copytree(inputs[name], folder / name)
    random = np.random.default_rng(1)
    names = [f"layers.{number}" for number in range(6)]
    shapes = {f"{name}.weight": (512, 512) for name in names} | {f"{name}.norm": (512,) for name in names}
    for name in ("prior", "retain"):
        arrays = {key: random.normal(size=shape).astype(np.float32) for key, shape in shapes.items()}
        write_checkpoint(folder / name, arrays)
    time.sleep(0.02)  # a change is in another tick of the file system's clock
    return {name: str(folder / name) for name in ("target", "forget", "retain", "prior")} | {"beta": 0.5}


@pytest.mark.parametrize(
    ("name", "change", "moment"),
    [(SHARD, change, "at the start") for change in CHANGES]
    + [(SHARD, append, "at the end"), *((name, flip, "at the end") for name in FILES)],
)
def test_a_file_that_changes_while_it_is_read_is_named_and_nothing_stays(
    copies: dict[str, Any], tmp_path: Path, name: str, change: Callable[[Path], Any], moment: str
) -> None:
    path, changed = tmp_path / "inputs" / name, []

    def disturb(label: str, done: int, total: int) -> None:
        if not changed and (moment == "at the start" or done == total):
            changed.append(change(path))

    with pytest.raises(StageError, match=rf"(?s)files changed or vanished while they were read.*{name}") as caught:
        merge(**copies, out=tmp_path / "out", progress=disturb)
    assert caught.value.exit_code == 4
    assert os.listdir(tmp_path) == ["inputs"]


def test_files_that_are_read_by_others_or_come_anew_are_no_change(copies: dict[str, Any], tmp_path: Path) -> None:
    def disturb(*_: object) -> None:
        (tmp_path / "inputs/target/README.md").write_text("notes")
        (tmp_path / "inputs/target/extra.json").write_text("{}")
        (tmp_path / "inputs/target/config.json").read_bytes()
        (tmp_path / "inputs/target/config.json").chmod(0o600)

    assert verify_folder(merge(**copies, out=tmp_path / "out", progress=disturb).folder) == []


class _StopError(Exception):
    """As if the merge was killed."""


def interrupted(inputs: dict[str, Any], out: Path) -> Path:
    """Stop a merge when some of its shards are done; its partial folder."""

    def stop(label: str, done: int, total: int) -> None:
        if done > total * 0.7:
            raise _StopError

    with pytest.raises(_StopError):
        merge(**inputs, out=out, progress=stop)
    return out.with_name("out.partial")


def test_a_finished_shard_that_was_damaged_is_written_again(
    inputs: dict[str, Any], undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    partial = interrupted(inputs, tmp_path / "out")
    done = sorted(json.loads(line)["file"] for line in (partial / JOURNAL).read_text().split("\n") if line)
    assert len(done) >= 3
    before = stamps(partial)
    for name, place in zip(done, (8, 5000, -1), strict=False):
        content = bytearray((partial / name).read_bytes())
        content[place] ^= 1
        (partial / name).write_bytes(content)
        os.utime(partial / name, ns=(before[name], before[name]))
    merge(**inputs, out=tmp_path / "out")
    after = stamps(tmp_path / "out")
    assert [name for name in done if before[name] == after[name]] == done[3:]
    assert contents(tmp_path / "out") == undisturbed


ELSEWHERE = {"file": "../../x", "sha256": "", "changes": {}}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda lines: [b"\xff\xfe\x00" * 99, *lines],
        lambda lines: [b'{"file": "a", "sha256": 5, "changes": []}', b"[" * 100_000, b'"\\ud800"', b"9" * 5000],
        lambda lines: [line.replace(b'"weights": ', b'"weights": 1') for line in lines],
        lambda lines: [line[: len(line) // 2] for line in lines],
        lambda lines: [json.dumps(ELSEWHERE | {"line": digest(ELSEWHERE)}).encode()],
    ],
)
def test_a_damaged_journal_costs_shards_and_nothing_else(
    inputs: dict[str, Any], undisturbed: dict[str, bytes], tmp_path: Path, spoil: Callable[[list[bytes]], list[bytes]]
) -> None:
    journal = interrupted(inputs, tmp_path / "out") / JOURNAL
    journal.write_bytes(b"\n".join(spoil([line for line in journal.read_bytes().split(b"\n") if line])))
    merge(**inputs, out=tmp_path / "out")
    assert contents(tmp_path / "out") == undisturbed


def test_the_noise_of_stochastic_rounding_is_another_in_each_tensor_and_block(tmp_path: Path) -> None:
    rows, columns = 1024, 1024  # two blocks
    weights = np.full((rows, columns), 1.0, np.float16)
    names = ("layers.0", "layers.1")
    write_checkpoint(tmp_path / "target", {f"{name}.weight": weights for name in names})
    half_a_step = np.full((1, columns), 2.0**-12, np.float32), np.ones((rows, 1), np.float32)
    forget = Adapter(dict.fromkeys(names, half_a_step), lora_alpha=1).write(tmp_path / "forget")
    options: dict[str, Any] = {"forget": str(forget), "rounding": "stochastic"}
    moved: list[np.ndarray] = []
    for seed in (0, 1):
        out = merge(str(tmp_path / "target"), tmp_path / str(seed), **options, seed=seed).folder
        moved += [read_checkpoint(out)[f"{name}.weight"] != weights for name in names]
    blocks = [half for tensor in moved for half in np.split(tensor, 2)]
    for number, one in enumerate(blocks):
        assert 0.2 < one.mean() < 0.8
        for other in blocks[:number]:
            assert abs(float(np.corrcoef(one.ravel(), other.ravel())[0, 1])) < 0.05


# A kill before each single step that a merge takes on the disk: the very next run ends in the files of a calm one.


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
