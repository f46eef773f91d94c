"""Standard streams that end early, are full or in a POSIX locale; names of any bytes; arguments out of measure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msa_lite.io.finished.seal import verify_folder
from msa_lite.merger import merge
from tests.e2e.conftest import CallCli
from tests.support.merges import KINDS, Adapter, write_checkpoint

POSIX = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small target and a vector, of which bfloat16 keeps so little that a merge warns."""
    folder, random = tmp_path_factory.mktemp("models"), np.random.default_rng(0)
    write_checkpoint(folder / "target", {"layers.0.weight": np.ones((64, 32), KINDS["bfloat16"])})
    factors = tuple(random.normal(0, 0.03, shape).astype(np.float32) for shape in ((2, 32), (64, 2)))
    Adapter({"layers.0": factors}).write(folder / "forget")  # type: ignore[dict-item]
    return folder


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line in bash, in which $MSA is the command."""
    environment = {**os.environ, "MSA": f"{sys.executable} -m msa_lite", **environment}
    return subprocess.run(["bash", "-c", line], env=environment, capture_output=True, check=False, timeout=120)


def line_of(models: Path, out: Path, *more: str) -> str:
    return f"$MSA merge --target {models}/target --forget {models}/forget --out {out} {' '.join(more)}"


@pytest.mark.parametrize("redirection", ["", "2>&1"])
def test_a_reader_that_goes_away_stops_no_work_and_is_no_fault(redirection: str, models: Path, tmp_path: Path) -> None:
    done = shell(f"{line_of(models, tmp_path / 'out')} {redirection} | true; exit ${{PIPESTATUS[0]}}")
    assert done.returncode == 0, done.stderr
    assert b"rror" not in done.stderr
    assert verify_folder(tmp_path / "out") == []


def test_a_full_disk_behind_stdout_is_told_and_the_model_is_there(models: Path, tmp_path: Path) -> None:
    done = shell(f"{line_of(models, tmp_path / 'out')} > /dev/full")
    assert done.returncode == 2
    assert b"could not be printed (No space left on device)" in done.stderr.splitlines()[-1]
    assert b"Traceback" not in done.stderr
    assert verify_folder(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("redirection", "command", "status"),
    [
        ("> /dev/full", "recipes list", 2),
        ("> /dev/full", "recipes show nothing-like-it", 2),
        ("2> /dev/full", "recipes list", 0),
        (">&- 2>&- <&-", "recipes list", 0),
        (">&-", "nonsense", 2),
    ],
)
def test_streams_that_take_nothing_give_no_traceback(redirection: str, command: str, status: int) -> None:
    done = shell(f"$MSA {command} {redirection}")
    assert done.returncode == status
    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr


def test_warnings_are_on_stderr_alone(models: Path, tmp_path: Path) -> None:
    done = shell(line_of(models, tmp_path / "out", "--json"))
    assert done.returncode == 0
    assert done.stderr.count(b"rounding to bfloat16 lost") == 2  # at once, and again at the end
    assert json.loads(done.stdout)["weights_changed"] > 0
    plain = shell(line_of(models, tmp_path / "again")).stdout.decode()
    assert plain.startswith(f"{tmp_path}/again: ")
    assert all(line.startswith("  ") for line in plain.splitlines()[1:])


@pytest.mark.parametrize("encoding", ["", "latin-1"])
def test_a_posix_locale_gets_the_same_result(models: Path, tmp_path: Path, encoding: str) -> None:
    environment = POSIX | ({"PYTHONIOENCODING": encoding} if encoding else {})
    done = shell(line_of(models, tmp_path / "oä", "--json"), **environment)
    assert done.returncode == 0, done.stderr
    assert Path(json.loads(done.stdout.decode("latin-1" if encoding == "latin-1" else "utf-8"))["out"]).name == "oä"
    assert verify_folder(tmp_path / "oä") == []
    calm = merge(str(models / "target"), tmp_path / "calm", forget=str(models / "forget")).folder
    for path in calm.iterdir():
        assert path.read_bytes() == (tmp_path / "oä" / path.name).read_bytes(), path.name
    for command in ("verify {out}", "recipes show tofu/forget10", "compare --published tofu-forget10-llama-3.2-1b"):
        printed = shell(f"$MSA {command.format(out=tmp_path / 'oä')}", **environment)
        assert printed.returncode == 0, printed.stderr
        assert b"Traceback" not in printed.stderr


LONG, HUGE = "x" * 300, "9" * 310


@pytest.mark.parametrize(
    ("options", "status", "says"),
    [
        ({"out": LONG}, 3, "File name too long"),
        ({"out": "{here}/file"}, 3, "a file is in the way"),
        ({"out": "~root/x"}, 3, "the home of somebody else"),
        ({"target": "{here}/file"}, 2, "is a file"),
        ({"alpha": "1e400"}, 2, "alpha is inf"),
        ({"alpha": "1e300"}, 3, "far too large"),
        ({"alpha": "1e300", "as": "adapter"}, 3, "do not fit fp32"),
        ({"max-memory": f"{HUGE}.{HUGE}GiB"}, 2, "is no size"),
        ({"max-memory": "٣MB"}, 2, "is no size"),
        ({"max-rank": HUGE, "as": "adapter"}, 0, ""),
        ({"max-rank": f"-{HUGE}", "as": "adapter"}, 2, "at least 1"),
    ],
)
def test_arguments_out_of_all_measure_have_a_message_and_leave_nothing(
    options: dict[str, str],
    status: int,
    says: str,
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call_cli: CallCli,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    given: dict[str, Any] = {"target": str(models / "target"), "forget": str(models / "forget"), "out": "out"} | options
    arguments = [text for name, value in given.items() for text in (f"--{name}", value.format(here=tmp_path))]
    before = sorted(os.listdir(tmp_path))
    code, _, stderr = call_cli("merge", *arguments)
    assert code == status, stderr
    assert says in stderr
    assert "Traceback" not in stderr
    assert "Warning" not in stderr
    assert status == 0 or sorted(os.listdir(tmp_path)) == before
