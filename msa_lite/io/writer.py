"""Writing safetensors shards in the layout of an existing one: same names, same order, same offsets.

With the dtype unchanged the header is copied byte for byte, so the new shard differs from the old one only where a
tensor was merged.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from collections.abc import Iterable
from pathlib import Path

import ml_dtypes
import numpy as np

from msa_lite.io.checkpoint import FLOAT_DTYPES, INDEX_FILE, Checkpoint, ShardFile, TensorEntry, companion_files

_COPY_CHUNK = 8 << 20  # bytes
_CONFIG_DTYPE = re.compile(r'("(?:torch_)?dtype"\s*:\s*)"\w+"')


def round_once(values: np.ndarray, dtype: str) -> np.ndarray:
    """Round fp32 or fp64 values to a safetensors dtype, to nearest, ties to even, in one rounding.

    numpy reaches bfloat16 from fp64 by way of fp32, which rounds twice. Rounding the intermediate to odd instead
    keeps the information on which side of a tie the value lay (Boldo and Melquiond, 2008).
    """
    if values.dtype == np.float64 and FLOAT_DTYPES[dtype] == ml_dtypes.bfloat16:
        with np.errstate(over="ignore"):
            single = values.astype(np.float32)
        bits = single.view(np.uint32)
        away = np.where(np.abs(single) > np.abs(values), np.uint32(1), np.uint32(0))
        inexact = single != values
        # Truncate towards zero, then set the last bit where something was cut off.
        np.subtract(bits, away, out=bits)
        np.bitwise_or(bits, inexact.astype(np.uint32), out=bits)
        values = single
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(FLOAT_DTYPES[dtype])


def output_dtype(entry: TensorEntry, dtype: str | None) -> str:
    """The stored dtype of a tensor in the output: `dtype` for tensors of floats, its own otherwise or for None."""
    return dtype if dtype and entry.is_float else entry.dtype


def shard_header(shard: ShardFile, dtype: str | None) -> bytes:
    """Header bytes of the output shard: the target's own, or rebuilt in the same order where the dtype changes."""
    if all(output_dtype(entry, dtype) == entry.dtype for entry in shard.tensors):
        return shard.header
    header: dict[str, object] = {"__metadata__": shard.metadata} if shard.metadata else {}
    position = 0
    for entry in shard.tensors:
        kind = output_dtype(entry, dtype)
        size = output_bytes([entry], dtype)
        header[entry.name] = {"dtype": kind, "shape": entry.shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def output_bytes(entries: Iterable[TensorEntry], dtype: str | None) -> int:
    """Bytes that these tensors take in the output."""
    total = 0
    for entry in entries:
        kind = output_dtype(entry, dtype)
        same = kind == entry.dtype
        total += entry.nbytes if same else int(np.prod(entry.shape)) * FLOAT_DTYPES[kind].itemsize
    return total


def copy_range(source: int, target: int, start: int, count: int) -> None:
    """Append bytes [start, start + count) of one descriptor to another, in the kernel where it can."""
    while count and hasattr(os, "copy_file_range"):
        try:
            copied = os.copy_file_range(source, target, min(count, 1 << 30), offset_src=start)
        except OSError:
            break
        if copied == 0:  # some file systems answer 0 instead of an error
            break
        start, count = start + copied, count - copied
    while count:
        chunk = os.pread(source, min(count, _COPY_CHUNK), start)
        if not chunk:
            raise OSError(f"the source ended {count} bytes early")
        write_all(target, chunk)
        start, count = start + len(chunk), count - len(chunk)


def write_all(handle: int, data: bytes | memoryview) -> None:
    """Append all of `data`; a single write may take only a part of it."""
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def write_companions(target: Checkpoint, out: Path, dtype: str | None) -> None:
    """Copy config, tokenizer, templates, licence and index byte for byte; a new dtype is put into config and index.

    transformers loads weights in the dtype that config.json names, whatever the one they are stored in.
    """
    index = target.folder / INDEX_FILE
    for path in [*companion_files(target.folder), *([index] if index.is_file() else [])]:
        shutil.copyfile(path, out / path.name)
    if dtype is None or all(output_dtype(e, dtype) == e.dtype for e in target.tensors.values()):
        return
    config = (target.folder / "config.json").read_text()
    (out / "config.json").write_text(_CONFIG_DTYPE.sub(rf'\1"{FLOAT_DTYPES[dtype].name}"', config))
    if index.is_file():
        content = json.loads(index.read_text())
        content.setdefault("metadata", {})["total_size"] = output_bytes(target.tensors.values(), dtype)
        (out / INDEX_FILE).write_text(json.dumps(content, indent=2) + "\n")
