"""Safetensors checkpoints, opened by their headers, without torch and without mapping files.

A checkpoint is a folder in Hugging Face layout: `config.json` and either `model.safetensors` or shards with
`model.safetensors.index.json`. Only headers are read on opening, so all checks of names, shapes and dtypes come
before the first weight is touched.
"""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from msa_lite.errors import FormatError, UsageError, join_faults

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

FLOAT_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# What a checkpoint folder holds besides weights: config, tokenizer, chat template, licence. Never pickle.
COMPANION_PATTERNS = ("*.json", "*.model", "*.txt", "*.jinja", "LICENSE*", "NOTICE*")
_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a safetensors file: where its bytes lie (`start` counts from the beginning of the file)."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def is_float(self) -> bool:
        """True for the dtypes that arithmetic is done on: F64, F32, F16, BF16."""
        return self.dtype in FLOAT_DTYPES

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(rows, columns) of the tensor seen as a matrix; anything that is not 2-D is a single column."""
        if len(self.shape) == 2:
            return self.shape[0], self.shape[1]
        return math.prod(self.shape), 1


@dataclass(frozen=True)
class ShardFile:
    """One safetensors file: its raw header bytes (length prefix included) and its tensors by offset."""

    path: Path
    header: bytes
    metadata: dict[str, str]
    tensors: tuple[TensorEntry, ...]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder: parsed `config.json`, its shards in file-name order, and all tensors by name.

    There are no shards where only headers were fetched from the Hub.
    """

    folder: Path
    config: dict[str, Any]
    shards: tuple[ShardFile, ...]
    tensors: dict[str, TensorEntry]

    @property
    def dtype_name(self) -> str:
        """Name of the dtype that most of its floats are stored in, as "bfloat16"."""
        sizes = dict.fromkeys(FLOAT_DTYPES, 0)
        for entry in self.tensors.values():
            if entry.is_float:
                sizes[entry.dtype] += entry.nbytes
        return FLOAT_DTYPES[max(sizes, key=lambda kind: sizes[kind])].name

    @property
    def nbytes(self) -> int:
        """Bytes of all weight files."""
        return sum(shard.path.stat().st_size for shard in self.shards)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        raise ValueError(f"the name '{next(k for k in keys if keys.count(k) > 1)}' stands twice")
    return dict(pairs)


def _read_entry(name: str, item: dict[str, Any], path: Path, data: int) -> TensorEntry:
    """One item of a header; data: where the tensors' bytes begin. Raises ValueError and its like for another form."""
    start, stop = item["data_offsets"]
    shape, dtype = tuple(item["shape"]), item["dtype"]
    if not isinstance(dtype, str) or any(type(number) is not int for number in (start, stop, *shape)):
        raise ValueError(f"tensor '{name}' has no whole numbers for its shape and place, or no dtype")
    return TensorEntry(name, path, dtype, shape, data + start, stop - start)


def _check_ranges(path: Path, entries: list[TensorEntry], data: int, size: int) -> None:
    """Raise FormatError unless the tensors, by offset, cover the file from `data` to its end and fit their shapes."""
    position = data
    for entry in entries:
        if entry.start != position or entry.nbytes < 0:
            raise FormatError(f"{path}: tensor '{entry.name}' leaves a gap or overlaps at byte {entry.start}")
        needed = math.prod(entry.shape) * FLOAT_DTYPES[entry.dtype].itemsize if entry.is_float else entry.nbytes
        if entry.nbytes != needed or any(number < 0 for number in entry.shape):
            raise FormatError(f"{path}: tensor '{entry.name}' has {entry.nbytes} bytes, not what {entry.shape} needs")
        position += entry.nbytes
    if position != size:
        raise FormatError(f"{path}: {size} bytes on disk, {position} by its header: truncated or trailing bytes")


def read_shard(path: Path) -> ShardFile:
    """Read and check the header of one safetensors file.

    Raises FormatError when the header is cut off or no JSON, a name stands twice, or the byte ranges do not cover
    the file exactly (gaps, overlaps, a truncated file), as the format demands.
    """
    size = path.stat().st_size
    with open(path, "rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 0 < length <= min(_MAX_HEADER, size - 8):
            raise FormatError(f"{path}: no safetensors header fits this file of {size} bytes; download it again")
        raw = stream.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_unique_keys)
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError("__metadata__ is no mapping of texts")
        entries = [_read_entry(name, item, path, 8 + length) for name, item in header.items()]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise FormatError(f"{path}: the safetensors header cannot be read ({error})") from error
    entries.sort(key=lambda entry: (entry.start, entry.nbytes))
    _check_ranges(path, entries, 8 + length, size)
    return ShardFile(path=path, header=prefix + raw, metadata=metadata, tensors=tuple(entries))


def _shard_paths(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if not index.is_file():
        single = folder / SINGLE_FILE
        if single.is_file():
            return [single]
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
            raise FormatError(
                f"{folder}: only pickled weights; load it with transformers and save_pretrained() it as safetensors"
            )
        raise UsageError(f"{folder}: no {SINGLE_FILE} and no {INDEX_FILE}: not a checkpoint folder")
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise FormatError(f"{index}: not a safetensors index ({error})") from error
    outside = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if outside:
        raise FormatError(join_faults(f"{index}: files outside the folder:", map(str, outside)))
    missing = [name for name in names if not os.path.isfile(folder / name)]  # False also for what can be no name
    if missing:
        raise FormatError(join_faults(f"{folder}: shards named by the index are missing:", missing))
    return [folder / name for name in names]


def load_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint folder by its headers.

    Raises UsageError when it is no checkpoint folder, FormatError when a file is broken, a tensor stands in two
    shards, the index and the shards disagree, or the weights are only there as pickle.
    """
    folder = Path(folder)
    config_path = folder / "config.json"
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder")
    if not config_path.is_file():
        found = ", but a PEFT adapter" if (folder / "adapter_config.json").is_file() else ""
        raise UsageError(f"{folder}: no config.json: not a checkpoint folder{found}")
    try:
        config = json.loads(config_path.read_text())
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{config_path}: not JSON ({error})") from error
    if not isinstance(config, dict):
        raise FormatError(f"{config_path}: not a JSON object")
    shards = tuple(read_shard(path) for path in _shard_paths(folder))
    tensors: dict[str, TensorEntry] = {}
    for shard in shards:
        for entry in shard.tensors:
            if entry.name in tensors:
                raise FormatError(f"{folder}: tensor '{entry.name}' is in {tensors[entry.name].file} and {shard.path}")
            tensors[entry.name] = entry
    if (folder / INDEX_FILE).is_file():
        mapped = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
        wrong = [n for n, f in mapped.items() if n not in tensors or tensors[n].file.name != f]
        wrong += [n for n in tensors if n not in mapped]
        if wrong:
            raise FormatError(join_faults(f"{folder}: the index and the shards disagree about:", wrong))
    return Checkpoint(folder=folder, config=config, shards=shards, tensors=tensors)


def companion_files(folder: Path) -> list[Path]:
    """The files beside the weights that make a checkpoint usable, sorted; no index, no manifest."""
    found = {p for pattern in COMPANION_PATTERNS for p in folder.glob(pattern) if p.is_file()}
    return sorted(p for p in found if p.name not in {"manifest.json", INDEX_FILE} and not p.name.startswith("."))
