"""A file written in order: the right bytes and hash in every mode, and the disk's errors told."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msa_lite.io.weights import writer as module
from msa_lite.io.weights.writer import Sink

CHUNK = 16 << 10
Prepare = Callable[[pytest.MonkeyPatch], None]


def no_direct_flag(patch: pytest.MonkeyPatch) -> None:
    """A system without direct writes."""
    patch.delattr(os, "O_DIRECT", raising=False)


def refuse_to_open(patch: pytest.MonkeyPatch) -> None:
    """A file system that refuses the flag, but makes the file."""
    whole = os.open

    def refuse(path: Any, flags: int, mode: int = 0o777) -> int:
        handle = whole(path, flags & ~getattr(os, "O_DIRECT", 0), mode)
        if flags & getattr(os, "O_DIRECT", 0):
            os.close(handle)
            raise OSError(errno.EINVAL, "no direct writes here")
        return handle

    patch.setattr(os, "open", refuse)


def refuse_to_write(patch: pytest.MonkeyPatch) -> None:
    """A file system that takes the flag and refuses every such write but the first."""
    import fcntl

    whole, calls = os.pwrite, []

    def refuse(handle: int, data: Any, at: int) -> int:
        calls.append(at)
        if len(calls) > 1 and fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not aligned as I like it")
        return whole(handle, data, at)

    patch.setattr(os, "pwrite", refuse)


@pytest.mark.parametrize("prepare", [lambda patch: None, no_direct_flag, refuse_to_open, refuse_to_write])
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, CHUNK - 1, CHUNK, 3 * CHUNK + 5, 9 * CHUNK])
def test_appended_bytes_and_ranges_are_the_file_and_its_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepare: Prepare, size: int
) -> None:
    monkeypatch.setattr(module, "_CHUNK", CHUNK)
    monkeypatch.setattr(module, "_FLUSH", CHUNK)
    prepare(monkeypatch)
    random = np.random.default_rng(size)
    original, wanted = random.bytes(size), bytearray()
    (tmp_path / "original").write_bytes(original)
    with open(tmp_path / "original", "rb") as source, Sink(tmp_path / "out", size) as sink:
        while len(wanted) < size:
            at, count = len(wanted), min(size - len(wanted), int(random.integers(1, 2 * CHUNK)))
            if random.random() < 0.5:
                sink.append_from(source.fileno(), at, count, tmp_path / "original")
                wanted += original[at : at + count]
            else:
                new = random.bytes(count)
                sink.append(new)
                wanted += new
        digest = sink.close()
    assert (tmp_path / "out").read_bytes() == bytes(wanted)
    assert digest == hashlib.sha256(wanted).hexdigest()
    assert (tmp_path / "original").read_bytes() == original


def test_an_existing_file_is_never_written_to(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"keep")
    (tmp_path / "out").symlink_to(tmp_path / "other")
    with pytest.raises(FileExistsError):
        Sink(tmp_path / "out", 4)
    assert (tmp_path / "other").read_bytes() == b"keep"


def test_a_disk_that_fills_up_is_told_by_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with Sink(tmp_path / "out", 3 << 20) as sink:
        sink.append(bytes(3 << 20))
        with pytest.raises(OSError, match="No space left"):
            sink.close()


def test_a_disk_that_is_full_from_the_start_is_told_at_once_and_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int, start: int, count: int) -> None:  # what there was is reserved before the error comes
        os.pwrite(handle, bytes(4096), 0)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "_open_new", lambda path: (os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL), False))
    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(OSError, match="No space left"):
        Sink(tmp_path / "out", 1 << 20)
    assert list(tmp_path.iterdir()) == []
