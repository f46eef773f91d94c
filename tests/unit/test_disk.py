"""A full disk is told as such, whatever a library makes of it."""

from __future__ import annotations

import errno
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from msa_lite.errors import MismatchError, MsaError, StageError
from msa_lite.io.files.writing import disk_fault, write_text
from msa_lite.io.finished.manifest import partial_folder, stage_folder
from msa_lite.record.seal import make_key


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow beyond 100 kB, which libraries meet as they meet a full disk."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, handler)


def by_safetensors(folder: Path) -> None:
    (folder / "begun").touch()
    save_file({"a": np.zeros(10**6, np.float32)}, folder / "a.safetensors")


def by_torch(folder: Path) -> None:
    torch.save({"a": torch.zeros(10**6)}, folder / "a.pt")


@pytest.mark.parametrize("write", [by_safetensors, by_torch])
@pytest.mark.parametrize("resumable", [False, True])
def test_a_stage_tells_a_librarys_error_of_a_full_disk_in_its_own_words(
    write: Callable[[Path], None], resumable: bool, small_files: None, tmp_path: Path
) -> None:
    folder = tmp_path / "vector"
    with (
        pytest.raises(StageError, match=r"vector: the disk is full \(.* free\); make room and run") as raised,
        stage_folder(folder, "vector", {}, resumable=resumable) as partial,
    ):
        write(partial)
    assert not isinstance(raised.value.__cause__, OSError | MsaError)
    assert not folder.exists()
    assert partial_folder(folder).exists() == resumable


def raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "is_full"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (Exception("Disk quota exceeded (os error 122)"), True),
        (OSError("[Errno 28] Error writing bytes to file. Detail: [errno 28] No space left on device"), True),
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), True),
        (RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed"), True),
        (raised_from(ValueError("cannot be read"), OSError(errno.ENOSPC, "full")), True),
        (OSError(errno.ENOENT, "No such file"), False),
        (ValueError("device 28"), False),
    ],
)
def test_a_full_disk_is_known_by_number_and_by_words(error: Exception, is_full: bool) -> None:
    assert (disk_fault(error) is not None) == is_full


@pytest.mark.parametrize("error", [MismatchError("no space left on device"), OSError(errno.ENOSPC, "full")])
def test_what_says_enough_stays_as_it_is(error: Any, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as raised, stage_folder(tmp_path / "vector", "vector", {}):
        raise error
    assert raised.value is error


@pytest.mark.parametrize("write", [lambda path: write_text(path, "x" * 200_000), make_key])
def test_a_full_disk_leaves_the_former_file_and_no_half_one(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)  # of the key
    monkeypatch.setattr("os.replace", fail)  # of the text
    (tmp_path / "other").write_text("former")
    path = tmp_path / ("key" if write is make_key else "other")
    with pytest.raises(OSError, match="No space"):
        write(path)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"other": "former"}
