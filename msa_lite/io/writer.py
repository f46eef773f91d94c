"""Write safetensors shards in the layout of existing ones: same names, same order, same offsets.

With the dtype unchanged the header is copied byte for byte, so the new shard differs from the old one only where a
tensor was merged.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from msa_lite.errors import FormatError
from msa_lite.io.checkpoint import FLOAT_DTYPES, INDEX_FILE, Checkpoint, ShardFile, TensorEntry
from msa_lite.io.companions import companion_files
from msa_lite.io.reading import read_object, read_text

_COPY_CHUNK = 1 << 20  # bytes
_ROUNDED = 1 << 15  # numbers rounded at a time where rounding needs buffers
_FICLONE = 0x40049409  # linux/fs.h
_CONFIG_DTYPE = re.compile(r'("(?:torch_)?dtype"\s*:\s*)"\w+"')


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
    other = np.where(zero, sign | unsigned.type(1), step)
    gap = np.abs(other.view(near.dtype).astype(values.dtype) - near.astype(values.dtype))
    chance = np.abs(error) / gap
    take = (error != 0) & np.isfinite(gap) & (generator.random(values.shape, np.float32) < chance)
    bits[take] = other[take]


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
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
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


def clone_file(source: int, target: int) -> bool:
    """Share all blocks of a file with another (FICLONE: btrfs, XFS), at once; return False where that cannot be."""
    if sys.platform != "linux":
        return False
    import fcntl

    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        return False
    return True


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


def copy_range(source: int, target: int, start: int, count: int, at: int) -> None:
    """Copy bytes [start, start + count) of one descriptor to offset `at` of another, in the kernel where it can."""
    while count and hasattr(os, "copy_file_range"):
        try:
            copied = os.copy_file_range(source, target, min(count, 1 << 30), offset_src=start, offset_dst=at)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
            break
        if copied == 0:  # some file systems answer 0 instead of an error
            break
        start, at, count = start + copied, at + copied, count - copied
    while count:
        chunk = os.pread(source, min(count, _COPY_CHUNK), start)
        if not chunk:
            raise FormatError(f"the file ended {count} bytes early while it was copied; is it still being written?")
        write_all(target, chunk, at)
        start, at, count = start + len(chunk), at + len(chunk), count - len(chunk)


def write_all(handle: int, data: bytes | memoryview, at: int) -> None:
    """Write all of `data` at an offset; a single write may take only a part of it."""
    view = memoryview(data)
    while view:
        count = os.pwrite(handle, view, at)
        view, at = view[count:], at + count


def write_companions(target: Checkpoint, out: Path, dtype: str | None) -> None:
    """Copy config, tokenizer, templates, licence and index byte for byte, and put a new dtype into config and index.

    transformers loads weights in the dtype that config.json names, whatever their stored dtype.
    """
    index = target.folder / INDEX_FILE
    for path in [*companion_files(target.folder), *([index] if index.is_file() else [])]:
        if path.name == "adapter_config.json":  # transformers would load the base that it names in the model's place
            continue
        shutil.copyfile(path, out / path.name)
    if dtype is None or all(output_dtype(e, dtype) == e.dtype for e in target.tensors.values()):
        return
    config = read_text(target.folder / "config.json")
    (out / "config.json").write_text(_CONFIG_DTYPE.sub(rf'\1"{FLOAT_DTYPES[dtype].name}"', config), encoding="utf-8")
    if index.is_file():
        content = read_object(index)
        metadata = content.get("metadata")
        content["metadata"] = metadata if isinstance(metadata, dict) else {}
        content["metadata"]["total_size"] = output_bytes(target.tensors.values(), dtype)
        (out / INDEX_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
