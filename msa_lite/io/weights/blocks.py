"""Read tensors in blocks of rows, by descriptors that threads share."""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from msa_lite.errors import FormatError
from msa_lite.io.files.reading import open_file
from msa_lite.io.weights.checkpoint import FLOAT_DTYPES, TensorEntry
from msa_lite.io.weights.quantised_forms import Packed

_COMPARED = 1 << 19  # numbers compared at a time


class Files:
    """Open descriptors by path, shared by threads (reads are by offset). They are closed with the object."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._columns: dict[TensorEntry, np.ndarray] = {}

    def __getitem__(self, path: Path) -> int:
        with self._lock:
            if path not in self._open:
                self._open[path] = open_file(path)  # a pipe may have taken the file's place
            return self._open[path]

    def by_column(self, entry: TensorEntry, count: int) -> np.ndarray:
        """Split the columns of a matrix (rows, k · count) into `count` groups (count, rows, k); group i has columns i,
        i + count, … Do not change it.

        The last result of each file and shape is kept, since the experts of a layer ask for its groups in turn. Raise
        FormatError as `read_whole`.
        """
        with self._lock:
            known = self._columns.get(entry)
        if known is None:
            values = read_whole(self, entry, FLOAT_DTYPES[entry.dtype])
            known = np.ascontiguousarray(values.reshape(len(values), -1, count).transpose(2, 0, 1))
            with self._lock:
                place = entry.file, entry.shape
                kept = {old: array for old, array in self._columns.items() if (old.file, old.shape) != place}
                self._columns = kept | {entry: known}
        return known

    def close(self) -> None:
        """Close all descriptors, and forget what is kept; a path that is used again is opened again."""
        with self._lock:
            self._columns = {}
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
        self._common = common  # no reference to self: in a circle the buffers would wait for the garbage collector
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

    A weight that is stored as codes comes as the fp32 values that they stand for. Raise FormatError when the file ends
    early.
    """
    if isinstance(entry, Packed):
        return entry.form.rows(partial(read_part, files), start, stop)
    columns, dtype = entry.matrix_shape[1], FLOAT_DTYPES[entry.dtype]
    rows = (scratch or Scratch()).take(name, (stop - start, columns), dtype)
    offset = entry.start + start * columns * dtype.itemsize
    pread_into(files[entry.file], rows.reshape(-1).view(np.uint8).data, offset, entry.file)
    return rows


def read_part(files: Files, entry: TensorEntry, at: int, count: int) -> np.ndarray:
    """Return `count` bytes of a tensor from its byte `at` on, as stored. Raise FormatError when the file ends early."""
    content = np.empty(count, np.uint8)
    pread_into(files[entry.file], content.data, entry.start + at, entry.file)
    return content


def read_whole(files: Files, entry: TensorEntry, dtype: Any) -> np.ndarray:
    """Read a whole tensor as a matrix in `dtype`. Raise FormatError when it holds NaN or infinities."""
    values = read_rows(files, entry, 0, entry.matrix_shape[0]).astype(dtype)
    if not np.isfinite(values).all():
        raise FormatError(f"{entry.file}: '{entry.name}' holds NaN or infinite values; train the vector again")
    return values


def holds_rows(copy: TensorEntry, original: TensorEntry, count: int) -> bool:
    """Check whether the first rows of a matrix are those of another, as far as its dtype can hold them."""
    if copy.shape[1:] != original.shape[1:] or not {copy.dtype, original.dtype} <= FLOAT_DTYPES.keys():
        return False
    files, scratch, step = Files(), Scratch(), max(1, _COMPARED // max(1, copy.matrix_shape[1]))
    for start in range(0, count if copy.nbytes else 0, step):
        stop = min(start + step, count)
        rows = read_rows(files, original, start, stop, scratch, "original").astype(FLOAT_DTYPES[copy.dtype])
        if not np.array_equal(read_rows(files, copy, start, stop, scratch, "copy"), rows):
            return False
    return True


def pread_into(handle: int, buffer: memoryview, offset: int, path: Path) -> None:
    """Fill `buffer` from `offset`. One pread may return a part only, so it is called until all is there.

    path: what messages name. Raise FormatError when the file ends early, OSError with the path when the disk fails.
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
