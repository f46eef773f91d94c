"""Read blocks of rows with pread into buffers that are used again, so that memory stays as planned."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np

from msa_lite.errors import FormatError
from msa_lite.io.checkpoint import FLOAT_DTYPES, TensorEntry


class Files:
    """Open descriptors by path, shared by threads (reads are by offset). They are closed with the object."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}
        self._lock = threading.Lock()

    def __getitem__(self, path: Path) -> int:
        with self._lock:
            if path not in self._open:
                # non-blocking: a pipe may have taken the file's place
                self._open[path] = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
            return self._open[path]

    def close(self) -> None:
        """Close all descriptors; a path that is used again is opened again."""
        with self._lock:
            while self._open:
                os.close(self._open.popitem()[1])

    def __del__(self) -> None:
        self.close()


class Scratch:
    """Named buffers of one thread. The next array of a name overwrites the last one.

    common: buffers that several objects of a thread share.
    """

    def __init__(self, common: Scratch | None = None) -> None:
        self._buffers: dict[str, np.ndarray] = {}
        self._common = common  # never itself: the buffers would wait for the garbage collector
        self._held: tuple[Any, ...] | None = None

    def take(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return an uninitialised array of this shape and dtype in the named buffer, which grows if it must."""
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape)) * dtype.itemsize
        if name not in self._buffers or self._buffers[name].nbytes < nbytes:
            self._buffers[name] = np.empty(nbytes, np.uint8)
        return self._buffers[name][:nbytes].view(dtype).reshape(shape)

    def prior_rows(self, files: Files, entry: TensorEntry, start: int, stop: int, dtype: Any) -> np.ndarray:
        """Return rows [start, stop) of the prior's tensor in `dtype`; the caller must not change them.

        They are read once for all that share `common`: both vectors of a block need the same rows.
        """
        common, key = self._common or self, (entry, start, stop, dtype)
        rows = common.take("prior", (stop - start, entry.matrix_shape[1]), dtype)
        if common._held != key:
            common._held = None
            np.copyto(rows, read_rows(files, entry, start, stop, common, "raw prior"))
            common._held = key
        return rows


def read_rows(
    files: Files, entry: TensorEntry, start: int, stop: int, scratch: Scratch | None = None, name: str = "raw"
) -> np.ndarray:
    """Read rows [start, stop) of a tensor's matrix view in its stored dtype into the scratch buffer `name`.

    Raise FormatError when the file ends early.
    """
    columns, dtype = entry.matrix_shape[1], FLOAT_DTYPES[entry.dtype]
    rows = (scratch or Scratch()).take(name, (stop - start, columns), dtype)
    offset = entry.start + start * columns * dtype.itemsize
    pread_into(files[entry.file], rows.reshape(-1).view(np.uint8).data, offset, entry.file)
    return rows


def read_whole(files: Files, entry: TensorEntry, dtype: Any) -> np.ndarray:
    """Read a whole tensor as a matrix in `dtype`. Raise FormatError when it holds NaN or infinities."""
    values = read_rows(files, entry, 0, entry.matrix_shape[0]).astype(dtype)
    if not np.isfinite(values).all():
        raise FormatError(f"{entry.file}: '{entry.name}' holds NaN or infinite values; train the vector again")
    return values


def pread_into(handle: int, buffer: memoryview, offset: int, path: Path) -> None:
    """Fill `buffer` from `offset`. One pread may return a part only, so it is called until all is there.

    path: what messages name. Raise FormatError when the file ends early, OSError with the path when it fails.
    """
    position = 0
    while position < len(buffer):
        try:
            count = os.preadv(handle, [buffer[position:]], offset + position)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        if count == 0:
            raise FormatError(
                f"{path}: the file ended {len(buffer) - position} bytes early while a tensor was read; is it still "
                "being written?"
            )
        position += count
