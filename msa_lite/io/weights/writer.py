"""Write checkpoints: shards in the layout of a template, blocks of rows in their order, hashed on the way."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import mmap
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np

from msa_lite.io.files.reading import read_object, read_text
from msa_lite.io.files.writing import indented_json, write_json, write_text
from msa_lite.io.weights.blocks import pread_into
from msa_lite.io.weights.checkpoint import FLOAT_DTYPES, INDEX_FILE, Checkpoint, ShardFile, TensorEntry, read_index
from msa_lite.io.weights.companions import copied_files, copy_into
from msa_lite.io.weights.quantised_forms import Packed

_ROUNDED = 1 << 15  # numbers rounded at a time where rounding needs buffers
_CODES_CONFIG = "hf_quant_config.json"  # ModelOpt's, beside config.json
_CONFIG_DTYPE = re.compile(r'("(?:torch_)?dtype"\s*:\s*)"[\w.]+"')


def round_once(values: np.ndarray, dtype: str, out: np.ndarray | None = None) -> np.ndarray:
    """Round fp32 or fp64 values to a safetensors dtype, to nearest, ties to even, in one rounding.

    numpy reaches bfloat16 from fp64 by way of fp32, which rounds twice. Rounding the intermediate to odd instead
    keeps the information on which side of a tie the value lay (Boldo and Melquiond, 2008). out: contiguous.
    """
    out = np.empty(values.shape, FLOAT_DTYPES[dtype]) if out is None else out
    with np.errstate(over="ignore", invalid="ignore"):
        if values.dtype == np.float64 and FLOAT_DTYPES[dtype] == ml_dtypes.bfloat16:
            for part, rounded in _parts(values, out):
                np.copyto(rounded, _round_to_odd(part), casting="unsafe")
        else:
            np.copyto(out, values, casting="unsafe")
    return out


def _round_to_odd(values: np.ndarray) -> np.ndarray:
    """Round fp64 to fp32 to odd: cut off, and set the last bit where something was cut."""
    single = values.astype(np.float32)
    bits = single.view(np.uint32)
    away = np.where(np.abs(single) > np.abs(values), np.uint32(1), np.uint32(0))
    inexact = single != values
    np.subtract(bits, away, out=bits)
    np.bitwise_or(bits, inexact.astype(np.uint32), out=bits)
    return single


def _parts(values: np.ndarray, out: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield flat parts of both arrays, small enough that the buffers of rounding stay in the cache."""
    values, out = values.reshape(-1), out.reshape(-1)
    for start in range(0, len(values), _ROUNDED):
        yield values[start : start + _ROUNDED], out[start : start + _ROUNDED]


def round_stochastically(
    values: np.ndarray, dtype: str, generator: np.random.Generator, out: np.ndarray | None = None
) -> np.ndarray:
    """Round each value up or down with the chances that make the mean of the result the value itself.

    Unbiased where rounding to nearest would drop small updates altogether, at the cost of noise: a value that lies a
    share p of the way between two neighbours goes to the farther one with probability p. Values that the dtype
    holds, NaN and infinities stay; nothing that is finite when rounded to nearest becomes infinite. out: contiguous.
    """
    out = round_once(values, dtype, out)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for part, near in _parts(values, out):
            _move_some(part, near, generator)
    return out


def _move_some(values: np.ndarray, near: np.ndarray, generator: np.random.Generator) -> None:
    """Move nearest values to the neighbour on the other side of `values`, in place, by chance."""
    unsigned = np.dtype(f"u{near.dtype.itemsize}")
    error = values - near.astype(values.dtype)
    # Away from zero is one bit up, towards zero one bit down, of the magnitude's bits; from zero only up.
    outwards = (error > 0) == (values > 0)
    bits = near.view(unsigned)
    zero = (bits << 1) == 0
    sign = np.signbit(values).astype(unsigned) << (8 * near.dtype.itemsize - 1)
    step = np.where(outwards, bits + unsigned.type(1), bits - unsigned.type(1))
    neighbour = np.where(zero, sign | unsigned.type(1), step)
    gap = np.abs(neighbour.view(near.dtype).astype(values.dtype) - near.astype(values.dtype))
    chance = np.abs(error) / gap
    take = (error != 0) & np.isfinite(gap) & (generator.random(values.shape, np.float32) < chance)
    bits[take] = neighbour[take]


def output_dtype(entry: TensorEntry, dtype: str | None) -> str:
    """Return the dtype of a tensor in the output: `dtype` for floats; its own for others, and where `dtype` is None."""
    return dtype if dtype and entry.is_float else entry.dtype


def shard_header(shard: ShardFile, dtype: str | None) -> bytes:
    """Return the header of the output shard: the target's own, or one in the same order where the dtype changes."""
    if all(output_dtype(entry, dtype) == entry.dtype for entry in shard.tensors):
        return shard.header
    return file_header(
        ((e.name, output_dtype(e, dtype), e.shape, output_bytes([e], dtype)) for e in shard.tensors), shard.metadata
    )


def file_header(tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a safetensors file of tensors (name, dtype, shape, bytes) in this order."""
    notes = {key: text for key, text in metadata.items() if not key.startswith("total_")}  # of the file it is made from
    header: dict[str, object] = {"__metadata__": notes} if notes else {}
    position = 0
    for name, kind, shape, size in tensors:
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def output_bytes(entries: Iterable[TensorEntry], dtype: str | None) -> int:
    """Return the bytes that these tensors take in the output."""
    kinds = ((entry, output_dtype(entry, dtype)) for entry in entries)
    return sum(e.nbytes if kind == e.dtype else math.prod(e.shape) * FLOAT_DTYPES[kind].itemsize for e, kind in kinds)


def reserve(handle: int, nbytes: int) -> None:
    """Reserve disk blocks, so that a full disk shows now, not halfway. Raise OSError (ENOSPC) when it is full.

    The free space is read first: the kernel takes all there is before it finds that it is too little.
    """
    if not hasattr(os, "posix_fallocate") or not nbytes:
        return
    disk = os.fstatvfs(handle)
    if disk.f_bavail * disk.f_frsize < nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    try:
        os.posix_fallocate(handle, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            os.ftruncate(handle, 0)
            raise


def write_all(handle: int, data: bytes | memoryview, at: int) -> None:
    """Write all of `data` at an offset; a single write may take only a part of it."""
    view = memoryview(data)
    while view:
        count = os.pwrite(handle, view, at)
        view, at = view[count:], at + count


def write_companions(target: Checkpoint, out: Path, dtype: str | None) -> None:
    """Copy config, tokenizer, templates, licence and index byte for byte, as far as they are true of the output.

    Config and index follow a new dtype, weights that are no codes any more, and a head of its own. transformers loads
    weights in the dtype that config.json names, whatever their stored dtype.
    """
    for path in copied_files(target.folder):
        copy_into(out, target.folder, path)
    _write_index(target, out, dtype)
    path = target.folder / "config.json"
    text, config = read_text(path), dict(target.config)
    is_new = any(output_dtype(entry, dtype) != entry.dtype for entry in target.tensors.values())
    was_coded = dtype is not None and any(isinstance(entry, Packed) for entry in target.tensors.values())
    is_other = was_coded or config != read_object(path)
    if not (is_new or is_other):
        return
    name = FLOAT_DTYPES[dtype].name if dtype else ""
    if was_coded:
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = name
        (out / _CODES_CONFIG).unlink(missing_ok=True)
    if is_other:
        text = indented_json(config)
    if is_new:
        text = _CONFIG_DTYPE.sub(rf'\1"{name}"', text)
    write_text(out / "config.json", text)


def _write_index(target: Checkpoint, out: Path, dtype: str | None) -> None:
    """Write the target's index, if it has one, with the names, the files and the size of the output's tensors."""
    if (content := read_index(target.folder)) is None:
        return
    known = content.get("metadata")
    notes = dict(known) if isinstance(known, dict) else {}
    entries = [entry for shard in target.shards for entry in shard.tensors]
    names, size = {entry.name: entry.file.name for entry in entries}, output_bytes(entries, dtype)
    if names == content["weight_map"] and notes.get("total_size") in (None, size):
        copy_into(out, target.folder, target.folder / INDEX_FILE)
        return
    if names != content["weight_map"]:
        notes.pop("total_parameters", None)
    write_json(out / INDEX_FILE, {**content, "metadata": {**notes, "total_size": size}, "weight_map": names})


_CHUNK = 4 << 20  # bytes of one write
_ALIGN = 4096  # bytes that offsets, lengths and addresses of direct writes are multiples of
_FLUSH = 256 << 20  # bytes written through the cache between two calls to have the disk catch up
BUFFERS = 3


class Sink:
    """A new file of known size; a context manager. `append` in order, then `close` returns the SHA-256 (hex).

    size: bytes that will be written. The next call raises an error of the disk.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._handle, self._direct = _open_new(path)
        self._hash, self._size = hashlib.sha256(), size
        self._buffers = [mmap.mmap(-1, _CHUNK) for _ in range(BUFFERS)]
        self._current, self._filled = 0, 0  # the buffer that is filled, and the bytes in it
        self._writes: list[Future[None] | None] = [None] * BUFFERS
        self._writer = ThreadPoolExecutor(1)
        self._written = self._cached = 0
        try:
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
        while view:
            count = min(len(view), _CHUNK - self._filled)
            # numpy copies without holding the interpreter's lock, a slice assignment does not.
            place = np.frombuffer(self._buffers[self._current], np.uint8, count, self._filled)
            np.copyto(place, np.frombuffer(view[:count], np.uint8))
            view = view[count:]
            self._advance(count)

    def append_from(self, source: int, start: int, count: int, path: Path) -> None:
        """Hash and copy bytes [start, start + count) of another file.

        What is written are the bytes that were hashed. path: the other file's, for messages.
        """
        while count:
            nbytes = min(count, _CHUNK - self._filled)
            view = memoryview(self._buffers[self._current])[self._filled : self._filled + nbytes]
            pread_into(source, view, start, path)
            self._hash.update(view)
            start, count = start + nbytes, count - nbytes
            self._advance(nbytes)

    def close(self) -> str:
        """Write everything through to the disk; return the file's hash."""
        if self._direct:  # the last write is whole blocks, too; the excess is cut off
            self._filled = -(-self._filled // _ALIGN) * _ALIGN
        self._submit()
        for write in self._writes:
            if write:
                write.result()
        os.ftruncate(self._handle, self._size)
        os.fsync(self._handle)
        self.__exit__()
        return self._hash.hexdigest()

    def _advance(self, count: int) -> None:
        """Count bytes of the current buffer; write it when it is full."""
        self._filled += count
        if self._filled == _CHUNK:
            self._submit()

    def _submit(self) -> None:
        """Give the current buffer to the writer's thread, and take the next one, once it is written."""
        buffer = self._buffers[self._current]
        self._writes[self._current] = self._writer.submit(self._write, buffer, self._filled)
        self._current, self._filled = (self._current + 1) % BUFFERS, 0
        if write := self._writes[self._current]:
            write.result()

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
