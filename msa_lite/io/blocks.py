"""Blocks of rows: read with pread into buffers that are used again, so that memory is what was planned for."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np

from msa_lite.errors import FormatError
from msa_lite.io.checkpoint import FLOAT_DTYPES, TensorEntry


class Files:
    """Open descriptors by path, shared by threads (reads are by offset); closed with the object."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}
        self._lock = threading.Lock()

    def __getitem__(self, path: Path) -> int:
        with self._lock:
            if path not in self._open:
                self._open[path] = os.open(path, os.O_RDONLY)
            return self._open[path]

    def __del__(self) -> None:
        for handle in self._open.values():
            os.close(handle)


class Scratch:
    """Named buffers of one thread. An array handed out is overwritten by the next one of the same name."""

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An uninitialised array of this shape and dtype in the buffer of that name, which grows when it must."""
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape)) * dtype.itemsize
        if name not in self._buffers or self._buffers[name].nbytes < nbytes:
            self._buffers[name] = np.empty(nbytes, np.uint8)
        return self._buffers[name][:nbytes].view(dtype).reshape(shape)


def read_rows(
    files: Files, entry: TensorEntry, start: int, stop: int, scratch: Scratch | None = None, name: str = "raw"
) -> np.ndarray:
    """Rows [start, stop) of a tensor's matrix view in its stored dtype, in the scratch buffer `name`.

    Raises FormatError when the file ends early.
    """
    columns, dtype = entry.matrix_shape[1], FLOAT_DTYPES[entry.dtype]
    rows = (scratch or Scratch()).take(name, (stop - start, columns), dtype)
    offset = entry.start + start * columns * dtype.itemsize
    try:
        pread_into(files[entry.file], rows.reshape(-1).view(np.uint8).data, offset)
    except FormatError as error:
        raise FormatError(f"{entry.file}: {error}") from None
    return rows


def read_whole(files: Files, entry: TensorEntry, dtype: Any) -> np.ndarray:
    """A whole tensor as a matrix in `dtype`. Raises FormatError when it holds NaN or infinities."""
    values = read_rows(files, entry, 0, entry.matrix_shape[0]).astype(dtype)
    if not np.isfinite(values).all():
        raise FormatError(f"{entry.file}: '{entry.name}' holds NaN or infinite values; train the vector again")
    return values


def pread_into(handle: int, buffer: memoryview, offset: int) -> None:
    """Fill `buffer` from `offset`; pread may return less than was asked for, so it is called until all is there."""
    done = 0
    while done < len(buffer):
        got = os.preadv(handle, [buffer[done:]], offset + done)
        if got == 0:
            raise FormatError(
                f"the file ended {len(buffer) - done} bytes early while a tensor was read; is it still being written?"
            )
        done += got
