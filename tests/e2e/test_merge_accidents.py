"""Disks that fill up or fail while a merge writes, and what a merge may and may not write to."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from msa_lite.errors import OutputError, StageError
from msa_lite.io.finished.seal import JOURNAL, MANIFEST, verify_folder
from msa_lite.merger import merge
from tests.support.merges import SHARDS, contents, stamps
from tests.support.processes import fork_cli


def size_of(undisturbed: dict[str, bytes]) -> int:
    """Bytes of the weights alone, headers left out."""
    return sum(2 * 512 * 512 + 4 * 512 for name in undisturbed if name.endswith(".safetensors"))


def fail_after(monkeypatch: pytest.MonkeyPatch, name: str, calls: float, code: int = 0) -> list[int]:
    """Have a function of `os` fail after so many calls, as a disk would; the calls are counted in the list."""
    whole = getattr(os, name)
    count: list[int] = []

    def failing(*args: Any, **options: Any) -> Any:
        count.append(1)
        if len(count) > calls:
            raise OSError(code, os.strerror(code))
        return whole(*args, **options)

    monkeypatch.setattr(os, name, failing)
    return count


@pytest.mark.parametrize(
    ("name", "share", "code", "advice"),
    [
        ("pwrite", 0.5, errno.ENOSPC, "Make room and run the same command again; finished shards stay"),
        ("pwrite", 0.5, errno.EDQUOT, "Make room and run the same command again; finished shards stay"),
        ("posix_fallocate", 0.5, errno.ENOSPC, "Make room and run the same command again; finished shards stay"),
        ("preadv", 0.7, errno.EIO, "Run the same command again; finished shards stay"),
        ("fsync", 0.3, errno.EIO, "Run the same command again; finished shards stay"),
    ],
)
def test_what_the_disk_reports_halfway_keeps_the_finished_shards(
    inputs: dict[str, Any], undisturbed: dict[str, bytes], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, name: str, share: float, code: int, advice: str,
) -> None:  # fmt: skip
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    if not hasattr(os, name):
        pytest.skip(f"this system has no {name}")
    calls = fail_after(monkeypatch, name, math.inf)
    merge(**inputs, out=tmp_path / "calm")
    monkeypatch.undo()
    fail_after(monkeypatch, name, share * len(calls), code)
    with pytest.raises(StageError, match=rf"{os.strerror(code)} .* need {size_of(undisturbed)} bytes, .*{advice}"):
        merge(**inputs, out=out)
    monkeypatch.undo()
    assert not out.exists()
    journal = (partial / JOURNAL).read_text()
    finished = {file: stamp for file, stamp in stamps(partial).items() if file in journal}
    assert 0 < len(finished) < SHARDS
    merge(**inputs, out=out)
    assert contents(out) == undisturbed
    assert finished.items() <= stamps(out).items()


def test_the_command_line_says_what_is_needed_and_ends_with_4(
    inputs: dict[str, Any], undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    given = {name: str(value) for name, value in inputs.items() if name != "threads"} | {"out": str(tmp_path / "out")}
    command = ["merge", *(text for name, value in given.items() for text in (f"--{name}", value))]
    done = fork_cli(*command, limit=100_000)
    assert done.returncode == 4
    assert re.search(rf"error: .*File too large .* need {size_of(undisturbed)} bytes, \d+ are free", done.stderr)
    assert "Traceback" not in done.stderr
    assert fork_cli(*command).returncode == 0
    assert contents(tmp_path / "out") == undisturbed


@pytest.mark.parametrize("is_direct", [True, False])
def test_a_target_that_is_cut_off_meanwhile_is_named_and_nothing_is_left(
    inputs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_direct: bool
) -> None:
    target = tmp_path / "target"
    shutil.copytree(inputs["target"], target)
    name = "model-00004.safetensors"
    if not is_direct:
        monkeypatch.setattr("msa_lite.io.weights.writer._open_new", open_buffered)

    def cut(stage: str, done: int, amount: int) -> None:
        os.truncate(target / name, 300_000 if is_direct else 3000)

    vectors = {} if is_direct else {"alpha": 0, "beta": 0}
    with pytest.raises(StageError, match=rf"(?s)files changed.*{name}$"):
        merge(**(inputs | {"target": str(target)} | vectors), out=tmp_path / "out", progress=cut)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def open_buffered(path: Path) -> tuple[int, bool]:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), False


def look(folder: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """Inode, links, time of change and content of all files below a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            stat = path.stat()
            found[str(path.relative_to(folder))] = (stat.st_ino, stat.st_nlink, stat.st_mtime_ns, path.read_bytes())
    return found


def link_as_the_hub_does(folder: Path, cache: Path) -> Path:
    """A snapshot folder of symbolic links into a folder of blobs."""
    blobs, snapshot = cache / "blobs", cache / "snapshots" / "0123abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        shutil.copyfile(path, blobs / str(number))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    return snapshot


def link_hard(folder: Path, cache: Path) -> Path:
    (cache / "original").mkdir(parents=True)
    (cache / "linked").mkdir()
    for path in folder.iterdir():
        shutil.copyfile(path, cache / "original" / path.name)
        os.link(cache / "original" / path.name, cache / "linked" / path.name)
    return cache / "linked"


@pytest.mark.parametrize("link", [link_as_the_hub_does, link_hard])
@pytest.mark.parametrize("strength", [1.0, 0.0])
def test_links_are_read_through_and_never_written_through(
    inputs: dict[str, Any], tmp_path: Path, link: Callable[[Path, Path], Path], strength: float
) -> None:
    folders = {name: link(Path(inputs[name]), tmp_path / "cache" / name) for name in ("target", "forget", "retain")}
    before = look(tmp_path / "cache")
    strengths = {"alpha": strength, "beta": strength}
    out = merge(**(inputs | {name: str(f) for name, f in folders.items()} | strengths), out=tmp_path / "out").folder
    assert look(tmp_path / "cache") == before
    assert verify_folder(out) == []
    for path in out.iterdir():
        assert not path.is_symlink()
        assert path.stat().st_nlink == 1
        path.write_bytes(b"")  # nor do the two share anything afterwards
    assert look(tmp_path / "cache") == before


@pytest.mark.parametrize(
    ("name", "place"),
    [("target", place) for place in ("the same", "deep inside", "around", "a link to it", "a link into it")]
    + [("forget", "the same"), ("forget", "inside")],
)
def test_an_output_in_or_around_an_input_is_refused_even_with_replace(
    inputs: dict[str, Any], tmp_path: Path, name: str, place: str
) -> None:
    outer = tmp_path / "outer"
    folder = merge(**inputs, out=outer / "m").folder if name == "target" else outer / "m"
    if name == "forget":
        shutil.copytree(inputs["forget"], folder)
    link = tmp_path / "link"
    link.symlink_to(folder if place == "a link to it" else outer)
    out = {
        "the same": folder, "inside": folder / "x", "deep inside": folder / "x" / "y", "around": outer,
        "a link to it": link, "a link into it": link / "m",
    }[place]  # fmt: skip
    if place == "around":  # a folder that could be replaced otherwise
        (outer / MANIFEST).write_text(json.dumps({"made_by": "msa-lite", "kind": "model", "inputs": {}, "files": {}}))
    before = look(tmp_path)
    with pytest.raises(OutputError, match=r"lies in one or around one|did not make"):
        merge(**(inputs | {name: str(folder)}), out=out, replace=True)
    assert look(tmp_path) == before


def test_a_link_and_a_dot_are_places_to_write_to(
    inputs: dict[str, Any], undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "big").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "big" / "model")
    merge(**inputs, out=tmp_path / "link")
    assert contents(tmp_path / "big" / "model") == undisturbed
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    merge(**inputs, out=".")
    assert contents(tmp_path / "here") == undisturbed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["big", "here", "link"]


# Several at once. Kills: the fuzzer's, in test_hostile_names.


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
    command = [sys.executable, "-c", RACE, json.dumps(inputs | {"out": str(tmp_path / "out")}), "3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) == 3
    assert list(tmp_path.iterdir()) == []
