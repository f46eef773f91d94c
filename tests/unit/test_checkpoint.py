"""Reading safetensors by header and by rows: what is read, and what broken files and folders are told."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from msa_lite.errors import FormatError, UsageError
from msa_lite.io.weights.blocks import Files, Scratch, pread_into, read_rows
from msa_lite.io.weights.checkpoint import FLOAT_DTYPES, INDEX_FILE, SINGLE_FILE, load_checkpoint, read_shard
from msa_lite.io.weights.companions import copied_files, left_behind


def f32(start: int, stop: int) -> dict[str, Any]:
    """Header item of a vector of floats in bytes [start, stop)."""
    return {"dtype": "F32", "shape": [(stop - start) // 4], "data_offsets": [start, stop]}


def write_raw(path: Path, header: dict[str, Any] | bytes, data: int = 0, length: int | None = None) -> Path:
    """A safetensors file from its parts; `length` lies about the header's length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + bytes(range(data)))
    return path


def write_checkpoint(folder: Path, shards: dict[str, list[str]], mapped: dict[str, str] | None = None) -> Path:
    """A sharded checkpoint of tiny tensors; `mapped` replaces the right weight_map of the index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    for file, names in shards.items():
        save_file({name: np.ones(2, np.float32) for name in names}, folder / file)
    right = {name: file for file, names in shards.items() for name in names}
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": right if mapped is None else mapped}))
    return folder


def test_a_header_gives_tensors_by_offset_and_its_own_bytes(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "late": f32(8, 16), "early": f32(0, 8)}
    path = write_raw(tmp_path / "x.safetensors", header, 16)
    shard = read_shard(path)
    start = len(shard.header)
    assert shard.metadata == {"format": "pt"}
    assert [(t.name, t.start, t.nbytes, t.shape) for t in shard.tensors] == [
        ("early", start, 8, (2,)),
        ("late", start + 8, 8, (2,)),
    ]
    assert path.read_bytes() == shard.header + bytes(range(16))


@pytest.mark.parametrize(
    ("shape", "matrix"),
    [((3, 4), (3, 4)), ((5,), (5, 1)), ((), (1, 1)), ((2, 3, 4), (6, 4)), ((2, 3, 4, 5), (120, 1)), ((0, 4), (0, 4))],
)
def test_every_tensor_is_seen_as_a_matrix(tmp_path: Path, shape: tuple[int, ...], matrix: tuple[int, int]) -> None:
    save_file({"w": np.zeros(shape, np.float16)}, tmp_path / "x.safetensors")
    assert read_shard(tmp_path / "x.safetensors").tensors[0].matrix_shape == matrix


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
kinds = st.sampled_from([*FLOAT_DTYPES.values(), np.dtype(np.int64), np.dtype(np.uint8), np.dtype(np.bool_)])


@settings(max_examples=40)
@given(st.dictionaries(st.text(min_size=1, max_size=8), st.tuples(shapes, kinds), max_size=5), st.data())
def test_what_safetensors_writes_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, wanted: dict[str, Any], data: Any
) -> None:
    random = np.random.default_rng(len(wanted))
    arrays = {
        name: random.integers(0, 2, (*shape, kind.itemsize), np.uint8).view(kind).reshape(shape)
        for name, (shape, kind) in wanted.items()
        if name != "__metadata__"
    }
    path = tmp_path_factory.mktemp("property") / "x.safetensors"
    save_file(arrays, path)
    entries = {entry.name: entry for entry in read_shard(path).tensors}
    assert entries.keys() == arrays.keys()
    files, scratch = Files(), Scratch()
    for name, array in arrays.items():
        entry = entries[name]
        assert entry.shape == array.shape
        content = bytearray(entry.nbytes)
        pread_into(files[path], memoryview(content), entry.start, path)
        assert content == array.tobytes()
        if entry.is_float:
            start, stop = sorted(data.draw(st.tuples(*[st.integers(0, entry.matrix_shape[0])] * 2)))
            rows = read_rows(files, entry, start, stop, data.draw(st.sampled_from([scratch, None])))
            assert rows.dtype == array.dtype
            assert rows.tobytes() == array.reshape(entry.matrix_shape)[start:stop].tobytes()


@pytest.mark.parametrize(
    ("header", "data", "length", "says"),
    [
        (b"", 0, 0, "no safetensors header fits this file"),
        ({"a": f32(0, 8)}, 8, 12, "no whole safetensors file"),
        (b"[1, 2]", 0, None, "no whole safetensors file; download it again"),
        (b'{"a": %s, "a": %s}' % ((json.dumps(f32(0, 8)).encode(),) * 2), 8, None, "'a' stands twice"),
        ({"a": f32(0, 8)}, 7, None, "download it again .*not fully covered"),
        ({"a": f32(0, 8), "b": f32(4, 12)}, 12, None, "invalid offset for tensor `b`"),
        ({"a": f32(0, 8) | {"shape": [3]}}, 8, None, "invalid shape, data type, or offset"),
        ({"a": f32(0, 0) | {"shape": [1 << 32, 1 << 32]}}, 0, None, "no whole safetensors file"),
        (b"[" * 100_000, 0, None, "no whole safetensors file"),
    ],
)
def test_a_broken_file_is_named_with_its_fault(
    tmp_path: Path, header: Any, data: int, length: int | None, says: str
) -> None:
    path = write_raw(tmp_path / "x.safetensors", header, data, length)
    with pytest.raises(FormatError, match=f"x.safetensors: .*{says}"):
        read_shard(path)


@settings(max_examples=80)
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4), st.integers(0, 3))
def test_no_flipped_byte_breaks_the_reader(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]], cut: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "flipped.safetensors"
    save_file({"a": np.ones((2, 3), np.float16), "b": np.ones(2, np.int32)}, path, {"format": "pt"})
    content = bytearray(path.read_bytes())
    for place, value in flips:
        content[place % len(content)] = value
    path.write_bytes(content[: len(content) - cut])
    assert_read_or_refused(path)


def assert_read_or_refused(path: Path) -> None:
    """Assert that a file is either refused by name, or holds tensors that can all be read."""
    try:
        shard = read_shard(path)
    except FormatError as error:
        says, shard = str(error), None
    if shard is None:
        assert path.name in says
        return
    assert sum(entry.nbytes for entry in shard.tensors) == path.stat().st_size - len(shard.header)
    for entry in shard.tensors:
        if entry.is_float:
            assert read_rows(Files(), entry, 0, entry.matrix_shape[0]).size == np.prod(entry.shape)


def test_a_file_that_ends_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "x.safetensors", {"a": f32(0, 8)}, 8)
    entry = read_shard(path).tensors[0]
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(FormatError, match=r"x\.safetensors: the file ended 4 bytes early"):
        read_rows(Files(), entry, 0, 2)


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_raw(tmp_path / "x", b"{}", 100)
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda handle, views, offset: whole(handle, [views[0][:7]], offset))
    content, files = bytearray(90), Files()
    pread_into(files[path], memoryview(content), 15, path)
    assert content == path.read_bytes()[15:105]


def test_shards_are_joined_by_name(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(write_checkpoint(tmp_path, {"1.safetensors": ["a", "b"], "2.safetensors": ["c"]}))
    files = {name: tensor.file.name for name, tensor in checkpoint.tensors.items()}
    assert files == {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"}
    assert checkpoint.nbytes == sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))


def unlink(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def index(content: Any) -> Callable[[Path], None]:
    text = content if isinstance(content, str) else json.dumps({"weight_map": content})
    return lambda folder: (folder / INDEX_FILE).write_text(text) and None


def pickled(folder: Path) -> None:
    for path in (folder / INDEX_FILE, *folder.glob("*.safetensors")):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


@pytest.mark.parametrize(
    ("spoil", "error", "says"),
    [
        (unlink("config.json"), UsageError, "no config.json: not a checkpoint folder"),
        (lambda f: (f / "config.json").write_text("{"), FormatError, "config.json: not JSON"),
        (unlink("2.safetensors"), FormatError, "missing:\n  2.safetensors"),
        (unlink(INDEX_FILE), UsageError, f"no {SINGLE_FILE} and no {INDEX_FILE}"),
        (pickled, FormatError, r"only pickled weights; .* save_pretrained"),
        (index("{"), FormatError, "not a safetensors index"),
        (index({"a": "../1.safetensors"}), FormatError, "no shards:\n  ../1.safetensors: outside the folder"),
        (index({"a": "x" * 300 + ".safetensors"}), FormatError, "missing:\n  xxx"),
        (lambda f: (f / "config.json").write_text("[" * 100_000), FormatError, "config.json: not JSON"),
        (lambda f: (f / "config.json").write_bytes(b"\xff\xfe{}"), FormatError, "config.json: not UTF-8 text"),
        (index({"a": ".."}), FormatError, r"no shards:\n  \.\.: not called"),
        (index({"a": "1.safetensors", "c": "1.safetensors"}), FormatError, "disagree about:\n  c"),
    ],
)
def test_a_broken_folder_is_told_what_is_wrong(tmp_path: Path, spoil: Any, error: type, says: str) -> None:
    folder = write_checkpoint(tmp_path / "m", {"1.safetensors": ["a"], "2.safetensors": ["c"]})
    spoil(folder)
    with pytest.raises(error, match=says):
        load_checkpoint(folder)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"tensor 'a' is in .*1\.safetensors and .*2\.safetensors"):
        load_checkpoint(write_checkpoint(tmp_path, {"1.safetensors": ["a", "b"], "2.safetensors": ["a"]}))


def test_companions_are_copied_and_what_else_is_there_is_named(tmp_path: Path) -> None:
    kept = ["LICENSE", "additional_chat_templates/tool_use.jinja", "chat_template.jinja", "config.json"]
    kept += ["generation_config.json", "merges.txt", "tokenizer.model", "vocab.tiktoken"]
    left = ["adapter_config.json", "onnx/model.onnx", "optimizer.pt", "run.py"]
    others = ["manifest.json", ".msa-lite-partial.json", "README.md"]
    write_checkpoint(tmp_path, {SINGLE_FILE: ["a"]})
    for name in [*kept, *left, *others]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    copied = [path.relative_to(tmp_path).as_posix() for path in copied_files(tmp_path)]
    assert copied == kept
    named = [name.removesuffix("model.onnx") for name in left]
    assert left_behind(load_checkpoint(tmp_path)) == named
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoModel": "run.Model"}}')  # so the model needs it
    assert "run.py" in [path.name for path in copied_files(tmp_path)]
    assert "run.py" not in left_behind(load_checkpoint(tmp_path))
