"""Reading safetensors by header and by rows: what is read, and what broken files and folders are told."""

from __future__ import annotations

import errno
import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from msa_lite.errors import FormatError, UsageError
from msa_lite.io.weights import checkpoint as module
from msa_lite.io.weights.blocks import Files, Scratch, pread_into, read_rows
from msa_lite.io.weights.checkpoint import FLOAT_DTYPES, INDEX_FILE, SINGLE_FILE, load_checkpoint, read_shard
from msa_lite.io.weights.companions import copied_files, left_behind
from msa_lite.merger import merge
from tests.support.merges import KINDS, Adapter, read_checkpoint, write_checkpoint


def f32(start: int, stop: int) -> dict[str, Any]:
    """Header item of a vector of floats in bytes [start, stop)."""
    return {"dtype": "F32", "shape": [(stop - start) // 4], "data_offsets": [start, stop]}


def write_raw(path: Path, header: dict[str, Any] | bytes, data: int = 0, length: int | None = None) -> Path:
    """A safetensors file from its parts; `length` lies about the header's length."""
    text = header if isinstance(header, bytes) else json.dumps(header, ensure_ascii=False).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + bytes(range(data)))
    return path


def write_shards(folder: Path, shards: dict[str, list[str]], mapped: dict[str, str] | None = None) -> Path:
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
def test_a_file_with_flipped_bytes_is_refused_by_name_or_all_its_tensors_can_be_read(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]], cut: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "flipped.safetensors"
    save_file({"a": np.ones((2, 3), np.float16), "b": np.ones(2, np.int32)}, path, {"format": "pt"})
    content = bytearray(path.read_bytes())
    for place, value in flips:
        content[place % len(content)] = value
    path.write_bytes(content[: len(content) - cut])
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


def test_a_disk_that_fails_is_named_with_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    path = write_raw(tmp_path / "x", b"{}", 100)
    files = Files()
    handle = files[path]
    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(OSError, match=r"Input/output error: .*x'"):  # no FormatError: what is finished stays
        pread_into(handle, memoryview(bytearray(90)), 15, path)


def test_shards_are_joined_by_name(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(write_shards(tmp_path, {"1.safetensors": ["a", "b"], "2.safetensors": ["c"]}))
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
        (pickled, FormatError, r"only pickled weights\..* save_pretrained"),
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
    folder = write_shards(tmp_path / "m", {"1.safetensors": ["a"], "2.safetensors": ["c"]})
    spoil(folder)
    with pytest.raises(error, match=says):
        load_checkpoint(folder)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"tensor 'a' is in .*1\.safetensors and .*2\.safetensors"):
        load_checkpoint(write_shards(tmp_path, {"1.safetensors": ["a", "b"], "2.safetensors": ["a"]}))


def test_companions_are_copied_and_what_else_is_there_is_named(tmp_path: Path) -> None:
    kept = ["LICENSE", "additional_chat_templates/tool_use.jinja", "chat_template.jinja", "config.json"]
    kept += ["generation_config.json", "merges.txt", "tekken.json", "tokenizer.model", "video_preprocessor_config.json"]
    kept += ["vocab.tiktoken"]
    left = ["adapter_config.json", "onnx/model.onnx", "optimizer.pt", "run.py", "samples.txt", "trainer_state.json"]
    others = ["manifest.json", ".msa-lite-partial.json", "README.md"]
    write_shards(tmp_path, {SINGLE_FILE: ["a"]})
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


# Headers that no tool writes: whatever is accepted, the safetensors library opens, with the same tensors.


BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
"""Bits of a number, of all dtypes that safetensors 0.8 knows."""


def opened(path: Path) -> dict[str, tuple[str, tuple[int, ...]]] | None:
    """Dtype and shape by tensor as the safetensors library sees a file; None where it refuses it."""
    try:
        with safe_open(path, "numpy") as file:
            views = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (view.get_dtype(), tuple(view.get_shape())) for name, view in views.items()}
    except SafetensorError:
        return None


def u8(shape: Any, stop: Any, start: str = "0") -> bytes:
    return f'{{"a":{{"dtype":"U8","shape":{shape},"data_offsets":[{start},{stop}]}}}}'.encode()


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (u8([8], 8), 8),
        (u8([8], 8), 9),  # a byte too many
        (u8([8], 8, "-0"), 8),
        (u8("[-0]", 0), 0),
        (u8("[8.0]", 8), 8),
        (b"\xef\xbb\xbf" + u8([8], 8), 8),
        (u8([1 << 62, 8, 0], 0), 0),
        (u8([0, 1 << 64], 0), 0),
        (u8([8], 8).replace(b"U8", b"F8"), 8),
        (u8([8], 8).replace(b'"shape"', b'"more":[],"shape"'), 8),
        (b'{"__metadata__":{"a":"\\ud800"}}', 0),
        (b'{"__metadata__":null}', 0),
        (b'{"__metadata__":{"a":1}}', 0),
        (b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1),
        *((u8([2], BITS[kind] // 4).replace(b"U8", kind.encode()), BITS[kind] // 4) for kind in BITS),
    ],
)
def test_what_is_accepted_the_library_opens_with_the_same_tensors(tmp_path: Path, header: bytes, data: int) -> None:
    path = write_raw(tmp_path / "x.safetensors", header, data)
    opens = opened(path)
    if opens is not None and not any(side >= 1 << 61 for _, shape in opens.values() for side in shape):
        assert {entry.name: (entry.dtype, entry.shape) for entry in read_shard(path).tensors} == opens
        return
    with pytest.raises(FormatError, match=r"x\.safetensors: "):
        read_shard(path)


def many(count: int, form: str = '"{}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}') -> bytes:
    return b"{" + ",".join(form.format(number) for number in range(count)).encode() + b"}"


# What the library takes and the reader does not, as its docstring says.
@pytest.mark.parametrize(
    ("header", "says"),
    [
        (
            b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
            "'a'",
        ),
        (many(1).replace(b"[0]", f"[{','.join('0' * 65)}]".encode()), "65 dimensions"),
        (b'{"a":["U8",[0],[0,0]]}', "by a list"),
        (many(1).replace(b'"0"', b'"' + b"x" * 1001 + b'"'), "1001 characters"),
        (many(1).replace(b"[0]", b"[0,9223372036854775808]"), "or too large ones: (0, 9223"),
        (many(21), "no more than 20 are read"),
        (b'{"__metadata__":' + many(21, '"{0}":"{0}"') + b"}", "no more than 20 are read"),
        (b'{"__metadata__":' + many(250, '"{0}":"{0}"') + b"}", "more than 200 values"),
        (many(1) + b" " * 5000, "no more than 5000 are read"),
    ],
)
def test_what_nobody_has_is_refused_although_the_library_opens_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header: bytes, says: str
) -> None:
    for name, limit in (("MAX_TENSORS", 20), ("_VALUES", 200), ("MAX_HEADER", 5000)):
        monkeypatch.setattr(module, name, limit)
    path = write_raw(tmp_path / "x.safetensors", header)
    assert opened(path) is not None
    with pytest.raises(FormatError, match=f"x.safetensors: .*{re.escape(says)}"):
        read_shard(path)


@pytest.mark.parametrize(
    "header",
    [
        many(1_600_000, '"{}":0'),
        b'{"a":{"dtype":"U8","shape":[' + b"0," * 2_000_000 + b'0],"data_offsets":[0,0]}}',
        b'{"a":' + b"[" * 2_000_000,
        b"{" + b'"a":{},' * 1_000_000 + b'"b":{}}',
    ],
    ids=["numbers", "dimensions", "depth", "one name"],
)
def test_headers_of_millions_of_values_are_refused_before_they_are_taken_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header: bytes
) -> None:
    monkeypatch.setattr("json.loads", lambda *_, **__: pytest.fail("taken apart"))
    with pytest.raises(FormatError, match=r"more than 1000000 values|no whole safetensors file"):
        read_shard(write_raw(tmp_path / "x.safetensors", header))


def test_a_name_that_stands_twice_among_many_is_found_in_one_pass(tmp_path: Path) -> None:
    header = many(90_000)[:-1] + b"," + many(1).replace(b'"0"', b'"89999"')[1:]
    with pytest.raises(FormatError, match="the name '89999' stands twice"):  # minutes, were each name counted
        read_shard(write_raw(tmp_path / "x.safetensors", header))


@pytest.mark.parametrize(("limit", "value"), [("MAX_TENSORS", 5), ("MAX_HEADER", 300)])
def test_limits_are_those_of_all_shards_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    arrays = {str(number): np.ones(2, np.float32) for number in range(6)}
    folder = write_checkpoint(tmp_path / "m", arrays, {name: int(name) for name in arrays})
    assert len(load_checkpoint(folder).tensors) == 6
    monkeypatch.setattr(module, limit, value)
    with pytest.raises(FormatError, match=r"m: headers of more than .* bytes or .* tensors"):
        load_checkpoint(folder)


@pytest.mark.parametrize(("sizes", "name"), [((9, 4), "bfloat16"), ((4, 9), "float32"), ((0, 1), "float32")])
def test_a_checkpoints_dtype_is_that_of_most_of_its_bytes(tmp_path: Path, sizes: tuple[int, int], name: str) -> None:
    arrays = {"a": np.ones((2, sizes[0]), KINDS["bfloat16"]), "b": np.ones(sizes[1], np.float32)}
    assert load_checkpoint(write_checkpoint(tmp_path / "m", arrays)).dtype_name == name


@pytest.mark.parametrize("dtype", ["same", "float16", "float32"])
def test_tensors_of_all_dtypes_stay_as_they_are_beside_those_that_are_merged(tmp_path: Path, dtype: str) -> None:
    random = np.random.default_rng(0)
    folder = write_checkpoint(tmp_path / "target", {"w.weight": random.normal(size=(4, 2)).astype(np.float32)})
    content = {"w.weight": ("F32", [4, 2], read_checkpoint(folder)["w.weight"].tobytes())}
    others = [(name, shape) for name in BITS if name not in FLOAT_DTYPES for shape in ([4, 2], [0, 1 << 40], [8])]
    for number, (name, shape) in enumerate(others):
        content[f"{number} ä\n\0😀"] = (name, shape, random.bytes(BITS[name] if shape[0] else 0))
    header: dict[str, Any] = {"__metadata__": {"ä": "\n😀"}}
    position = 0
    for key, (name, shape, data) in content.items():
        header[key] = {"dtype": name, "shape": shape, "data_offsets": [position, position := position + len(data)]}
    path = write_raw(folder / "model.safetensors", header)
    with open(path, "ab") as stream:
        stream.writelines(data for _, _, data in content.values())
    adapter = Adapter({"w": (random.normal(size=(1, 2)), random.normal(size=(4, 1)))}).write(tmp_path / "adapter")
    merge(str(folder), tmp_path / "out", forget=str(adapter), dtype=dtype)
    before, after = opened(path), opened(tmp_path / "out" / "model.safetensors")
    assert before is not None
    assert after is not None
    assert after.pop("w.weight")[0] == {"float16": "F16"}.get(dtype, before.pop("w.weight")[0])
    before.pop("w.weight", None)
    assert after == before
    for entry in read_shard(tmp_path / "out" / "model.safetensors").tensors:
        if entry.name != "w.weight":
            assert entry.file.read_bytes()[entry.start : entry.start + entry.nbytes] == content[entry.name][2]
