"""Read tensors in blocks of rows, and round rows: to a dtype, or to 4 and 8 bits as quantisation does."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from msa_lite.errors import FormatError
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
                # non-blocking: a pipe may have taken the file's place
                self._open[path] = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
            return self._open[path]

    def by_column(self, entry: TensorEntry, count: int) -> np.ndarray:
        """Return a matrix (rows, k · count) as (count, rows, k): every count-th column together. Do not change it.

        The latest one of each file and shape is kept, since the experts of a layer take their shares in turn. Raise
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
    if copy.shape[1:] != original.shape[1:]:
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


_NF4 = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
_MIDPOINTS = (_NF4[1:] + _NF4[:-1]) / 2
_CHUNK = 1 << 16  # weights encoded at a time: what they take stays in the cache of a core
_MAGNITUDE = np.uint32(0x7FFFFFFF)  # of the bits of an fp32 number: all but the sign
_LEAST = np.float32(1e-38)  # a group of zeros has this scale, so that its codes are those of 0


@dataclass(frozen=True)
class Quantisation:
    """A form of quantisation: how weights are grouped, and how many codes there are."""

    name: str
    """Its key in `QUANTISATIONS`."""
    label: str
    """Its name in tables."""
    width: int
    """Weights of a group; 0: a row is one."""
    top: int = 0
    """The largest code of whole numbers; 0 for nf4, whose codes are places in a table of values."""
    crosses_rows: bool = False
    """True where groups run on from one row to the next."""

    def groups(self, rows: np.ndarray) -> list[np.ndarray]:
        """Return the groups of whole rows, views of (n, weights of a group); the shorter last ones come second.

        rows: (rows, columns), contiguous; where groups cross rows, it begins with a group.
        """
        if not self.width:
            return [rows]
        if self.crosses_rows:
            rows = rows.reshape(1, -1)
        whole = rows.shape[1] // self.width * self.width
        parts = [rows[:, :whole].reshape(-1, self.width), rows[:, whole:]]
        return [part for part in parts if part.size]

    def encode(self, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the codes of groups (n, width) of fp32 weights, as 8-bit numbers, and the scales (n, 1)."""
        codes = np.empty(groups.shape, np.int8 if self.top else np.uint8)
        scales = np.empty((len(groups), 1), np.float32)
        step = max(1, _CHUNK // max(1, groups.shape[1]))
        for at in range(0, len(groups), step):
            some = slice(at, at + step)
            self._encode(groups[some], codes[some], scales[some])
        return codes, scales

    def _encode(self, groups: np.ndarray, codes: np.ndarray, scales: np.ndarray) -> None:
        magnitudes = np.bitwise_and(groups.view(np.uint32), _MAGNITUDE)  # twice as quick as their maximum as floats
        np.copyto(scales, magnitudes.max(1, keepdims=True).view(np.float32))
        with np.errstate(invalid="ignore", over="ignore"):  # weights that are not finite have no code
            scaled = groups * (1 / np.maximum(scales, _LEAST) * np.float32(self.top or 1))
            if self.top:
                np.copyto(codes, np.rint(scaled, out=scaled), casting="unsafe")
                return
        # The code is the number of midpoints below the weight. Fifteen comparisons take a tenth of a binary search.
        above = np.empty(codes.shape, np.bool_)
        np.greater(scaled, _MIDPOINTS[0], out=codes.view(np.bool_))
        for midpoint in _MIDPOINTS[1:]:
            np.greater(scaled, midpoint, out=above)
            np.add(codes, above.view(np.uint8), out=codes)

    def decode(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Return the fp32 weights that codes of groups stand for."""
        values = codes * np.float32(1 / self.top) if self.top else _NF4.take(codes)
        return np.multiply(values, scales, dtype=np.float32)

    def round(self, rows: np.ndarray) -> np.ndarray:
        """Return a whole matrix of fp32 weights, rounded."""
        rounded = np.ascontiguousarray(rows)
        parts = [self.decode(*self.encode(group)) for group in self.groups(rounded)]
        if self.crosses_rows or not self.width:
            return np.concatenate([part.reshape(-1) for part in parts]).reshape(rows.shape)
        return np.concatenate([part.reshape(len(rows), -1) for part in parts], axis=1)


QUANTISATIONS = {
    form.name: form
    for form in (
        Quantisation("nf4", "NF4", 64, crosses_rows=True),
        Quantisation("int4", "int4", 128, top=7),
        Quantisation("int8", "int8", 0, top=127),
    )
}


@contextmanager
def rounded_model(model: Any, form: str | None) -> Iterator[None]:
    """Round a model's linear weights in place; put them back bit for bit at the end, also after an error.

    form: of `QUANTISATIONS`; None leaves all as it is. The weights wait in RAM meanwhile. Head, embedding, norms and
    the factors of an adapter keep their values, as bitsandbytes leaves them.
    """
    import torch

    kept: list[tuple[Any, Any]] = []
    try:
        for module in linear_modules(model) if form else ():
            weight = module.weight.data
            kept.append((weight, weight.to("cpu", copy=True)))
            weight.copy_(round_weight(form or "", weight, is_transposed=not isinstance(module, torch.nn.Linear)))
        yield
    finally:
        for weight, values in kept:
            weight.copy_(values)


def linear_modules(model: Any) -> list[Any]:
    """Return the linear modules of a model that quantisation rounds, each weight once."""
    import torch
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers.pytorch_utils import Conv1D

    modules = list(model.modules())
    head = model.get_output_embeddings()
    inner = {
        id(module)
        for layer in modules
        if isinstance(layer, BaseTunerLayer)
        for module in layer.modules()
        if module is not layer.get_base_layer()
    }
    linear = [m for m in modules if isinstance(m, torch.nn.Linear | Conv1D) and m is not head and id(m) not in inner]
    return list({id(module.weight): module for module in linear}.values())


def round_weight(form: str, weight: Any, is_transposed: bool = False) -> Any:
    """Return a weight (outputs, inputs), rounded, in its own dtype. is_transposed: it is (inputs, outputs)."""
    import torch

    values = weight.float().cpu()
    values = values.T.contiguous() if is_transposed else values
    result = torch.from_numpy(QUANTISATIONS[form].round(values.numpy()))
    return (result.T if is_transposed else result).to(weight.dtype)
