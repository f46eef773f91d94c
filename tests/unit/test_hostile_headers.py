"""Headers that no tool writes: whatever is accepted, the safetensors library opens, with the same tensors."""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from msa_lite.errors import FormatError
from msa_lite.io.weights import checkpoint as module
from msa_lite.io.weights.checkpoint import FLOAT_DTYPES, load_checkpoint, read_shard
from msa_lite.merger import merge
from tests.support.merges import KINDS, Adapter, read_checkpoint, write_checkpoint

BITS = dict(module._BITS)


def write(path: Path, header: Any, data: int = 0) -> Path:
    """A safetensors file of this header, as JSON or bytes, and so many bytes of data, as a hole."""
    text = (
        header if isinstance(header, bytes) else json.dumps(header, ensure_ascii=False).encode("utf-8", "surrogatepass")
    )
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, path.stat().st_size + data)
    return path


def opened(path: Path) -> dict[str, tuple[str, tuple[int, ...]]] | None:
    """Dtype and shape by tensor as the safetensors library sees a file; None where it refuses it."""
    try:
        with safe_open(path, "numpy") as file:
            views = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (view.get_dtype(), tuple(view.get_shape())) for name, view in views.items()}
    except SafetensorError:
        return None


def read(path: Path) -> dict[str, tuple[str, tuple[int, ...]]] | None:
    """The same by our reader."""
    try:
        return {entry.name: (entry.dtype, entry.shape) for entry in read_shard(path).tensors}
    except FormatError:
        return None


odd = st.sampled_from(
    [None, True, -1, 0, 1, 2, 8, 1.0, 1e30, 1 << 31, 1 << 61, 1 << 63, 1 << 64, 10**100, "", "8", [], [8], {}, "\ud800"]
)
names = st.text(st.characters(), max_size=3) | st.sampled_from(["__metadata__", "a\0", "x" * 1001, "\ud83d"])


@st.composite
def files(draw: Any) -> tuple[bytes, int]:
    """A header that is right but for some odd values, in JSON that is right but for some odd bytes; and its data."""
    header: dict[str, Any] = {}
    if draw(st.booleans()):
        header["__metadata__"] = draw(
            odd | st.dictionaries(names, odd | st.text(st.characters(), max_size=3), max_size=2)
        )
    position = 0
    for name in draw(st.lists(names, max_size=4, unique=True)):
        dtype, shape = draw(st.sampled_from([*BITS, "F8", "f32"])), draw(st.lists(st.integers(0, 4), max_size=3))
        size = BITS.get(dtype, 8)
        for number in shape:
            size *= number
        item = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size // 8]}
        position += size // 8
        for _ in range(draw(st.integers(0, 3)) // 3):
            field = draw(st.sampled_from([*item, "more"]))
            value = item.get(field)
            if isinstance(value, list) and value and draw(st.booleans()):
                value[draw(st.integers(0, len(value) - 1))] = draw(odd)
            else:
                item[field] = draw(odd)
        header[name] = item
    text = json.dumps(header, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    if draw(st.booleans()):
        place, spoilt = (
            draw(st.integers(0, len(text))),
            draw(st.sampled_from([b" ", b"\xef\xbb\xbf", b"-", b",", b"\t"])),
        )
        text = text[:place] + spoilt + text[place:]
    return text + b" " * draw(st.integers(0, 2)), position


def u8(shape: Any, stop: Any, start: str = "0") -> bytes:
    return f'{{"a":{{"dtype":"U8","shape":{shape},"data_offsets":[{start},{stop}]}}}}'.encode()


@settings(max_examples=150)
@given(files())
@example((u8([8], 8), 8))
@example((u8([8], 8), 9))  # a byte too many
@example((u8([8], 8, "-0"), 8))
@example((u8("[-0]", 0), 0))
@example((b"\xef\xbb\xbf" + u8([8], 8), 8))
@example((u8([1 << 62, 8, 0], 0), 0))
@example((u8([0, 1 << 64], 0), 0))
@example((b'{"__metadata__":{"a":"\\ud800"}}', 0))
@example((b'{"__metadata__":null}', 0))
@example((b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1))
def test_what_is_accepted_the_library_opens_with_the_same_tensors(
    tmp_path_factory: pytest.TempPathFactory, file: tuple[bytes, int]
) -> None:
    path = write(tmp_path_factory.getbasetemp() / "hostile.safetensors", *file)
    found = read(path)
    assert found is None or found == opened(path)


@pytest.mark.parametrize("dtype", [*BITS, "F8", "f32", "C128", "F8_E4M3FN", "INT4", ""])
def test_dtypes_and_their_sizes_are_the_librarys(tmp_path: Path, dtype: str) -> None:
    accepted = []
    for count in (1, 2, 3, 8):
        for size in range(25):
            header = {"a": {"dtype": dtype, "shape": [count], "data_offsets": [0, size]}}
            path = write(tmp_path / "x.safetensors", header, size)
            assert read(path) == opened(path)
            accepted += [size] if read(path) else []
    assert bool(accepted) == (dtype in BITS)
    assert all(BITS[name] == 8 * kind.itemsize for name, kind in FLOAT_DTYPES.items())


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
        (many(1).replace(b'"shape"', b'"more":[],"shape"'), "'0' is not described"),
        (many(1).replace(b"[0]", f"[{','.join('0' * 65)}]".encode()), "65 dimensions"),
        (many(1).replace(b'"0"', b'"' + b"x" * 1001 + b'"'), "1001 characters"),
        (many(1).replace(b"[0]", b"[0,9223372036854775808]"), "'0' has 0 bytes, not what"),
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
    path = write(tmp_path / "x.safetensors", header)
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
    with pytest.raises(FormatError, match="more than 1000000 values"):
        read_shard(write(tmp_path / "x.safetensors", header))


def test_a_name_that_stands_twice_among_many_is_found_in_one_pass(tmp_path: Path) -> None:
    header = many(90_000, '"{}":0')[:-1] + b',"89999":1}'
    with pytest.raises(FormatError, match="the name '89999' stands twice"):  # minutes, were each name counted
        read_shard(write(tmp_path / "x.safetensors", header))


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
    path = write(folder / "model.safetensors", header)
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
