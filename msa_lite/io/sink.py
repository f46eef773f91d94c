"""Write a file in order: hash it on the way, and bypass the page cache where the system can.

A merge is finished when its files are on the disk, so a copy in the page cache would only cost time and push out the
pages of others. Where the file system shares blocks (btrfs, XFS), a file starts as a clone of another and only the
differences are written.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from msa_lite.errors import FormatError
from msa_lite.io.blocks import pread_into
from msa_lite.io.writer import clone_file, copy_range, reserve, write_all

_CHUNK = 4 << 20  # bytes of one write
_ALIGN = 4096  # bytes that offsets, lengths and addresses of direct writes are multiples of
_FLUSH = 256 << 20  # bytes written through the cache between two calls to have the disk catch up
BUFFERS = 3


class Sink:
    """A new file of known size; a context manager. `append` in order, then `close` returns the SHA-256 (hex).

    size: bytes that will be written. like: descriptor of a file to clone, from which `append_from` then has nothing to
    copy; None for no clone. The next call raises an error of the disk.
    """

    def __init__(self, path: Path, size: int, like: int | None = None) -> None:
        self._handle, self._direct = _open_new(path)
        self._hash = hashlib.sha256()
        self._at = 0  # of the file, all appended bytes included
        self._filled = 0  # of the current buffer
        self._cloned = like is not None and clone_file(like, self._handle)
        if self._cloned and self._direct:  # only ranges of any length and place are written
            self._direct = _buffered(self._handle)
        self._buffers = [mmap.mmap(-1, _CHUNK) for _ in range(BUFFERS)]
        self._free = deque(self._buffers)
        self._current = self._free.popleft()
        self._writer = ThreadPoolExecutor(1)
        self._pending: deque[tuple[mmap.mmap, Future[None]]] = deque()
        self._written = self._cached = 0
        try:
            if not self._cloned:
                reserve(self._handle, size)
        except BaseException:
            self.__exit__()
            path.unlink()  # it would keep the space that could be reserved: all that was free
            raise

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.shutdown(cancel_futures=True)
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def append(self, data: memoryview | bytes) -> None:
        """Hash and write these bytes."""
        view = memoryview(data).cast("B")
        self._hash.update(view)
        if self._cloned:
            write_all(self._handle, view, self._at)
            self._at += len(view)
            return
        while view:
            count = min(len(view), _CHUNK - self._filled)
            # numpy copies without holding the interpreter's lock, a slice assignment does not.
            place = np.frombuffer(self._current, np.uint8, count, self._filled)
            np.copyto(place, np.frombuffer(view[:count], np.uint8))
            view = view[count:]
            self._advance(count)

    def append_from(self, source: int, start: int, count: int, path: Path) -> None:
        """Hash and copy bytes [start, start + count) of another file; a clone of it has them already.

        Direct writes take the bytes that were read for the hash; else the kernel copies them (copy_file_range). path:
        the other file's, for messages.
        """
        copied = not self._direct  # read once: the writer's thread may take the flag back meanwhile
        if copied and not self._cloned:
            self._flush()
            try:
                copy_range(source, self._handle, start, count, self._at)
            except FormatError as error:
                raise FormatError(f"{path}: {error}") from None
            self._written += count
        while count:
            nbytes = min(count, _CHUNK - self._filled)
            view = memoryview(self._current)[self._filled : self._filled + nbytes]
            pread_into(source, view, start, path)
            self._hash.update(view)
            start, count = start + nbytes, count - nbytes
            if copied:
                self._at += nbytes
            else:
                self._advance(nbytes)

    def close(self) -> str:
        """Write everything through to the disk; return the file's hash."""
        size = self._at
        if self._direct:  # the last write is whole blocks, too; the excess is cut off
            self._filled = -(-self._filled // _ALIGN) * _ALIGN
        self._flush()
        if not self._cloned:
            os.ftruncate(self._handle, size)
        os.fsync(self._handle)
        self.__exit__()
        return self._hash.hexdigest()

    def _advance(self, count: int) -> None:
        """Count bytes of the current buffer; write it when it is full."""
        self._filled += count
        self._at += count
        if self._filled == _CHUNK:
            self._submit()

    def _submit(self) -> None:
        """Give the current buffer to the writer's thread, and take a free one."""
        self._pending.append((self._current, self._writer.submit(self._write, self._current, self._filled)))
        self._filled = 0
        if not self._free:
            self._settle()
        self._current = self._free.popleft()

    def _flush(self) -> None:
        """Write the content of the current buffer, and wait until nothing is pending."""
        if self._filled:
            self._submit()
        while self._pending:
            self._settle()

    def _settle(self) -> None:
        """Wait for the oldest write, and take its buffer back."""
        buffer, future = self._pending.popleft()
        future.result()
        self._free.append(buffer)

    def _write(self, buffer: mmap.mmap, count: int) -> None:
        """Write the next chunk of the file, on the writer's thread."""
        view = memoryview(buffer)[:count]
        try:
            write_all(self._handle, view, self._written)
        except OSError as error:
            if not (self._direct and error.errno == errno.EINVAL):
                raise
            self._direct = _buffered(self._handle)  # the file system took the flag, but does not write that way
            write_all(self._handle, view, self._written)
        self._written += count
        self._cached = 0 if self._direct else self._cached + count
        if self._cached >= _FLUSH:
            getattr(os, "fdatasync", os.fsync)(self._handle)
            self._cached = 0


def _open_new(path: Path) -> tuple[int, bool]:
    """Open a file that was not there before; return its descriptor, and whether it bypasses the page cache."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666), True
    except (AttributeError, OSError) as error:  # no such flag on this system, or not for this file system
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        path.unlink(missing_ok=True)  # some systems make the file all the same
        return os.open(path, flags, 0o666), False


def _buffered(handle: int) -> bool:
    """Take back the direct flag of a descriptor; return False, its new value."""
    import fcntl

    fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) & ~os.O_DIRECT)
    return False
