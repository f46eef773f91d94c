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
from safetensors import SafetensorError, safe_open

from msa_lite.errors import FormatError
from msa_lite.io.weights import checkpoint as module
from msa_lite.io.weights.checkpoint import FLOAT_DTYPES, load_checkpoint, read_shard
from msa_lite.merger import merge
from tests.support.merges import KINDS, Adapter, read_checkpoint, write_checkpoint

BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
"""Bits of a number, of all dtypes that safetensors 0.8 knows."""


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
    path = write(tmp_path / "x.safetensors", header, data)
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
    with pytest.raises(FormatError, match=r"more than 1000000 values|no whole safetensors file"):
        read_shard(write(tmp_path / "x.safetensors", header))


def test_a_name_that_stands_twice_among_many_is_found_in_one_pass(tmp_path: Path) -> None:
    header = many(90_000)[:-1] + b"," + many(1).replace(b'"0"', b'"89999"')[1:]
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
