"""Open a checkpoint's folder: its config, its index and the headers of its safetensors files. No pickle is read."""

from __future__ import annotations

import math
import os
import shlex
import struct
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from msa_lite.errors import FormatError, UsageError, clip, join_faults
from msa_lite.io.files.reading import open_file, parse_json, read_bytes, read_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_CONFIGS = ("config.json", "adapter_config.json")
CONFIG_LIMIT = 4 << 20  # bytes of a model's or adapter's config; the largest ones list thousands of modules

FLOAT_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# Limits of the headers of a checkpoint, all shards together: four checkpoints (target, prior and both vectors) at
# these limits stay below 600 MB of memory. Of the open models, Kimi K2 has most: 70,000 tensors in bf16 (61 layers of
# 384 experts), whose headers take 11 MB. DeepSeek-V3 has 46,000, and 92,000 as it is published (in fp8, with scales).
MAX_TENSORS = 100_000
MAX_HEADER = 24 << 20  # bytes
_VALUES = 10 * MAX_TENSORS  # lists, objects and commas: a tensor of three dimensions has nine
_MAX_NAME = 1000  # characters of a tensor's name; the longest that are known have 150
_MAX_DIMENSIONS = 64  # what numpy and torch can hold
_LARGEST = 1 << 60  # numbers of a tensor: numpy and torch cannot multiply larger sides, even beside one of 0


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a safetensors file, and where its bytes lie."""

    name: str
    file: Path
    dtype: str
    """As safetensors writes it: "BF16"."""
    shape: tuple[int, ...]
    start: int
    """The first byte, from the beginning of the file."""
    nbytes: int

    @property
    def is_float(self) -> bool:
        """Check whether it is of a dtype that we compute with: F64, F32, F16, BF16."""
        return self.dtype in FLOAT_DTYPES

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Return (rows, columns) of the tensor seen as a matrix.

        The matrices of a tensor of three dimensions stand one below the other; anything else is a single column.
        """
        if len(self.shape) in (2, 3):
            return math.prod(self.shape[:-1]), self.shape[-1]
        return math.prod(self.shape), 1


@dataclass(frozen=True)
class ShardFile:
    """One safetensors file."""

    path: Path
    header: bytes
    """The raw header, length prefix included."""
    metadata: dict[str, str]
    tensors: tuple[TensorEntry, ...]
    """In the order of their offsets."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder."""

    folder: Path
    config: dict[str, Any]
    """The content of `config.json`."""
    shards: tuple[ShardFile, ...]
    """In the order of file names; empty where only headers were fetched from the Hub."""
    tensors: dict[str, TensorEntry]
    """All tensors by name."""

    @property
    def dtype_name(self) -> str:
        """Return the name of the dtype that most of its floats are stored in: "bfloat16"."""
        sizes = dict.fromkeys(FLOAT_DTYPES, 0)
        for entry in self.tensors.values():
            if entry.is_float:
                sizes[entry.dtype] += entry.nbytes
        return FLOAT_DTYPES[max(sizes, key=lambda kind: sizes[kind])].name

    @property
    def nbytes(self) -> int:
        """Return the bytes of all weight files."""
        return sum(shard.path.stat().st_size for shard in self.shards)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a mapping of a JSON object. Raise ValueError for a name that stands twice."""
    content = dict(pairs)
    if len(content) != len(pairs):
        name, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the name '{name[:_MAX_NAME]}' stands twice")
    return content


def _read_entry(name: str, item: Any, path: Path, data: int) -> TensorEntry:
    """Read an item of a header. data: offset of the tensors' bytes. Raise ValueError if no known model is so large."""
    if len(name) > _MAX_NAME:
        raise ValueError(f"a tensor's name of {len(name)} characters: {name[:40]}…")
    if not isinstance(item, dict):
        raise ValueError(f"tensor '{name}' is described by a list")
    shape, (start, stop) = tuple(item["shape"]), item["data_offsets"]
    if len(shape) > _MAX_DIMENSIONS or math.prod(max(1, side) for side in shape) > _LARGEST:
        raise ValueError(f"tensor '{name}' has {len(shape)} dimensions, or too large ones: {str(shape)[:80]}")
    return TensorEntry(name, path, sys.intern(item["dtype"]), shape, data + start, stop - start)


def _read_header(path: Path) -> bytes:
    """Return a file's raw header, with its length prefix. Raise as `read_shard`."""
    with open(open_file(path), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        prefix = stream.read(8)
        if prefix == b"version ":
            raise FormatError(f"{path}: is a pointer of git-lfs, not the file itself; fetch it with `git lfs pull`")
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 0 < length <= size - 8:
            raise FormatError(f"{path}: no safetensors header fits this file of {size} bytes; download it again")
        if length > MAX_HEADER:
            raise FormatError(f"{path}: a header of {length} bytes; no more than {MAX_HEADER} are read")
        return prefix + stream.read(length)


def read_shard(path: Path) -> ShardFile:
    """Read the header of one safetensors file, once the safetensors library has checked it.

    Raise FormatError for a file that the library refuses: the header is no JSON, the byte ranges do not cover the file
    exactly or do not fit dtype and shape. We also refuse names that stand twice, and names, headers, numbers of tensors
    and of dimensions beyond all known models.
    """
    header = _read_header(path)
    try:
        with safe_open(path, "numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise FormatError(f"{path}: no whole safetensors file; download it again ({clip(str(error), 200)})") from None
    content = parse_json(header[8:], f"{path}: the safetensors header", pairs=unique_keys, values=_VALUES)
    metadata = content.pop("__metadata__", None) or {}
    try:
        if len(content) + len(metadata) > MAX_TENSORS:
            raise ValueError(f"{len(content)} tensors and {len(metadata)} texts; no more than {MAX_TENSORS} are read")
        entries = [_read_entry(name, item, path, len(header)) for name, item in content.items()]
    except ValueError as error:
        raise FormatError(f"{path}: the safetensors header cannot be used ({error})") from error
    entries.sort(key=lambda entry: (entry.start, entry.nbytes))
    return ShardFile(path=path, header=header, metadata=metadata, tensors=tuple(entries))


def _name_fault(name: Any) -> str | None:
    """Return why a file that an index names can be no shard, or None."""
    if not isinstance(name, str) or Path(name).name != name:
        return "outside the folder"
    if not name.endswith(".safetensors") or name.startswith(".") or not name.isprintable():
        return "not called NAME.safetensors, as shards are"
    # PEFT would take the merged model for an adapter.
    return "the name of an adapter's file" if name.casefold() == "adapter_model.safetensors" else None


def _shard_names(index: Path, weight_map: Any) -> list[str]:
    """Return the shards that an index names, sorted. Raise FormatError for names that are no shards of this folder."""
    if not isinstance(weight_map, dict):
        raise FormatError(f"{index}: not a safetensors index (weight_map is no object)")
    names = {str(name): _name_fault(name) for name in weight_map.values()}
    if faults := [f"{name[:200]}: {fault}" for name, fault in sorted(names.items()) if fault]:
        raise FormatError(join_faults(f"{index}: names files that are no shards:", faults))
    missing = [name for name in sorted(names) if not os.path.isfile(index.parent / name)]
    if missing:
        raise FormatError(join_faults(f"{index.parent}: shards named by the index are missing:", missing))
    single = index.parent / SINGLE_FILE
    if single.is_file() and SINGLE_FILE not in names:  # transformers takes this one, and leaves the shards alone
        raise FormatError(f"{index.parent}: holds {SINGLE_FILE} and an index of other shards; remove the old one")
    return sorted(names)


def read_index(folder: Path) -> dict[str, Any] | None:
    """Return the content of a folder's index, or None where it has none. Raise FormatError where it is no object."""
    index, what = folder / INDEX_FILE, f"{folder / INDEX_FILE}: not a safetensors index"
    if not os.path.lexists(index):
        return None
    content = parse_json(read_bytes(index, MAX_HEADER), what, values=_VALUES)
    if not isinstance(content, dict):
        raise FormatError(f"{what} (no object)")
    return content


def _find_shards(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """Return the weight files of a folder, and the file of each tensor by its index, if it has one."""
    single = folder / SINGLE_FILE
    if (content := read_index(folder)) is not None:
        weight_map = content.get("weight_map")
        return [folder / name for name in _shard_names(folder / INDEX_FILE, weight_map)], weight_map
    if os.path.lexists(single):
        return [single], None
    raise (FormatError if _kind_of(folder) else UsageError)(
        f"{folder}: no {SINGLE_FILE} and no {INDEX_FILE}: {tell_folder(folder)}"
    )


_PICKLE = "could run code when it is loaded, so msa-lite reads none"
_OTHER_KINDS = {
    "adapter_config.json adapters.safetensors": "an adapter of MLX. Make a PEFT adapter of it "
    "(docs/how-to/merge-only.md), or fuse it into its model by mlx_lm.fuse, and give that with its prior",
    "adapter_config.json adapter_model.safetensors": "a PEFT adapter, no whole model. Write the model first: msa-lite "
    "merge --target BASE --prior BASE --alpha 0 --retain ADAPTER --beta 1 --out WHOLE",
    "adapter_*.[bp]*": f"a pickled adapter. A pickle {_PICKLE}; {{save}}",
    "model_index.json": "a model of diffusers, no language model",
    "pytorch_lora_weights.safetensors": "an adapter of diffusers, for no language model",
    "zero_to_fp32.py": "a checkpoint of DeepSpeed's ZeRO. Make whole weights of it: python zero_to_fp32.py . WHOLE "
    "--safe_serialization, in that folder; give WHOLE, with the model's config.json",
    **dict.fromkeys(
        ("*.distcp", "*/*.distcp"),
        "shards of FSDP. Make whole weights of them (accelerate merge-weights), beside the model's config.json",
    ),
    "*.gguf": "weights of llama.cpp (GGUF); give the model or PEFT adapter that they were made from",
    "params.json": "weights as Meta or Mistral publish them; give the form for transformers, with config.json",
    "*model*.bin": f"only pickled weights. A pickle {_PICKLE}; load it with transformers and save_pretrained() it",
    "optimizer.*": "the state of a training, without the model; save_pretrained() that",
    "*.pt*": f"only pickled weights. A pickle {_PICKLE}; load it where it was made, and save_pretrained() the model",
}
"""What a folder holds, and what to do, by names of files that are all there; the first that fits counts."""
_SAVE = (
    'write it as safetensors: python -c "import sys, torch, safetensors.torch as s; s.save_file({k: v.clone() for k, v '
    "in torch.load(sys.argv[1], 'cpu', weights_only=True).items()}, sys.argv[2])\" "
)


def _kind_of(folder: Path) -> str | None:
    """Return what a folder holds that is no checkpoint, and what to do; None where that is not known."""
    for names, kind in _OTHER_KINDS.items():
        files = [next(iter(sorted(folder.glob(name))), None) for name in names.split()]
        if all(files):
            place = shlex.quote(str(folder / "adapter_model.safetensors"))
            return kind.replace("{save}", f"{_SAVE}{shlex.quote(str(files[-1]))} {place}")
    return None


def tell_folder(folder: Path) -> str:
    """Say what a folder is that holds no checkpoint or no adapter as msa-lite reads them, and what to do."""
    below = [
        config.parent for name in _CONFIGS for depth in ("*/", "snapshots/*/") for config in folder.glob(depth + name)
    ]
    below = [place for place in dict.fromkeys(below) if any(place.glob("*.safetensors"))]
    if folder.name.startswith("models--"):
        return f"a folder of the Hub's cache; give {folder.name.removeprefix('models--').replace('--', '/')}"
    if below:
        names = sorted((str(place) for place in below), key=lambda name: (len(name), name))
        listed = ", ".join(names[:5]) + (f", … ({len(names)} in all)" if len(names) > 5 else "")
        return f"its subfolders hold {'one' if len(names) == 1 else 'several'}; give {listed}"
    if kind := _kind_of(folder):
        return kind
    there = sorted(path.name for path in folder.iterdir())
    which = (
        "of a repository, only the files at its top count; here " if folder.parent.name == "snapshots" else "it holds "
    )
    return f"not a checkpoint folder; {which}{clip(', '.join(there), 200)}" if there else "the folder is empty"


def _load_config(folder: Path) -> dict[str, Any]:
    """Read the model's `config.json`. Raise as `load_checkpoint`."""
    path = folder / "config.json"
    if not os.path.isdir(folder):
        raise UsageError(f"{folder}: no such folder")
    if not os.path.lexists(path):
        raise UsageError(f"{folder}: no config.json: {tell_folder(folder)}")
    config = read_object(path, CONFIG_LIMIT)
    check_config(config, str(path))
    return config


def check_config(config: dict[str, Any], where: str) -> None:
    """Raise FormatError where the fields that we read hold values of another type than transformers writes."""
    text = config.get("text_config")
    faults = [] if text is None or isinstance(text, dict) else ["text_config: expected an object"]
    if isinstance(codes := config.get("quantization"), dict) and "group_size" in codes:
        faults.append("quantization: codes of MLX, which are not read; mlx_lm.convert --dequantize makes a plain model")
    for section in (config, text if isinstance(text, dict) else {}):
        size, tied = section.get("vocab_size"), section.get("tie_word_embeddings")
        if size is not None and not (type(size) is int and size >= 0):
            faults.append(f"vocab_size: {str(size)[:80]}, expected a whole number")
        if tied is not None and not isinstance(tied, bool):
            faults.append(f"tie_word_embeddings: {str(tied)[:80]}, expected true or false")
    if faults:
        raise FormatError(join_faults(f"{where}: not a model's config:", faults))


def _read_shards(folder: Path, paths: list[Path]) -> tuple[tuple[ShardFile, ...], dict[str, TensorEntry]]:
    """Read the shards and their tensors by name. Raise FormatError for a name in two shards, or too large headers."""
    shards: list[ShardFile] = []
    tensors: dict[str, TensorEntry] = {}
    left = MAX_HEADER
    for path in paths:
        shards.append(shard := read_shard(path))
        left -= len(shard.header) - 8
        for entry in shard.tensors:
            if entry.name in tensors:
                raise FormatError(f"{folder}: tensor '{entry.name}' is in {tensors[entry.name].file} and {shard.path}")
            tensors[entry.name] = entry
        if left < 0 or len(tensors) > MAX_TENSORS:
            raise FormatError(
                f"{folder}: headers of more than {MAX_HEADER} bytes or {MAX_TENSORS} tensors; no more are read"
            )
    return tuple(shards), tensors


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the text model in that of a model which also sees or hears; empty where there is none."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else {}


def load_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint folder by its headers.

    Raise UsageError when it is no checkpoint folder, FormatError when a file is broken, a tensor stands in two
    shards, the index and the shards disagree, or the weights are only stored as pickle.
    """
    folder = Path(folder)
    config = _load_config(folder)
    paths, mapped = _find_shards(folder)
    shards, tensors = _read_shards(folder, paths)
    if mapped is not None:
        wrong = [n for n, f in mapped.items() if n not in tensors or tensors[n].file.name != f]
        wrong += [n for n in tensors if n not in mapped]
        if wrong:
            raise FormatError(join_faults(f"{folder}: the index and the shards disagree about:", wrong))
    if not tensors:
        raise FormatError(f"{folder}: holds no tensors")
    return Checkpoint(folder=folder, config=config, shards=shards, tensors=tensors)
