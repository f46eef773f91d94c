"""Rounding once, copying byte ranges, and headers of another dtype."""

from __future__ import annotations

import errno
import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save_file

from msa_lite.io.weights.checkpoint import INDEX_FILE, load_checkpoint, read_shard
from msa_lite.io.weights.writer import (
    output_bytes,
    reserve,
    round_once,
    round_stochastically,
    shard_header,
    write_all,
    write_companions,
)

HALVES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}


def neighbours(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """All finite values ≥ 0 of a 16-bit dtype and the next above each, in fp64; the last is what rounds to infinity."""
    infinity = int(np.array(np.inf, HALVES[dtype]).view(np.uint16))
    values = np.arange(infinity, dtype=np.uint16).view(HALVES[dtype]).astype(np.float64)
    return values, np.append(values[1:], 2 * values[-1] - values[-2])


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_tie_of_a_half_goes_to_even_and_its_fp64_neighbours_to_their_side(dtype: str, sign: int) -> None:
    low, high = neighbours(dtype)
    tie = (low + high) / 2  # exact in fp64
    even = np.where(np.arange(len(low)) % 2 == 0, low, high)
    for values, expected in ((tie, even), (np.nextafter(tie, 0), low), (np.nextafter(tie, np.inf), high)):
        with np.errstate(over="ignore"):
            rounded = round_once(sign * values, dtype)
            assert np.array_equal(rounded, (sign * expected).astype(HALVES[dtype]))
            assert np.array_equal(np.signbit(rounded.astype(np.float32)), np.full(len(low), sign < 0))


@settings(deadline=None)  # the first example imports torch
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_fp32_to_bfloat16_equals_torch(bits: list[int]) -> None:
    import torch

    values = np.array(bits, np.uint32).view(np.float32)
    ours = round_once(values, "BF16")
    theirs = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(HALVES["BF16"])
    assert np.array_equal(ours.astype(np.float32), theirs.astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
@pytest.mark.parametrize("work", [np.float32, np.float64])
def test_special_values_stay_what_they_are(dtype: str, work: type) -> None:
    rounded = round_once(np.array([np.nan, np.inf, -np.inf, 0.0, -0.0], work), dtype).astype(np.float64)
    assert np.array_equal(rounded, [np.nan, np.inf, -np.inf, 0, 0], equal_nan=True)
    assert np.signbit(rounded[1:]).tolist() == [False, True, False, True]


def test_rounding_may_go_into_a_buffer_that_is_there() -> None:
    values, buffer = np.array([[1.0 + 2**-12, 3.3]], np.float32), np.zeros((1, 2), np.float16)
    assert round_once(values, "F16", buffer) is buffer
    assert np.array_equal(buffer, values.astype(np.float16))
    assert values.tolist() == [[1.0 + 2**-12, np.float32(3.3)]]
    generator = np.random.default_rng(0)
    assert round_stochastically(values, "F16", generator, buffer) is buffer
    assert np.all(np.abs(buffer - values) < 2**-8)


def spread(dtype: str, work: type) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values between any two neighbours of a half, signs mixed, and the two neighbours: lower and higher magnitude."""
    random = np.random.default_rng(1)
    low, high = neighbours(dtype)
    places = random.integers(0, len(low) - 1, 4000)
    low, high = low[places], high[places]
    sign = random.choice([-1, 1], 4000)
    return (sign * (low + (high - low) * random.random(4000))).astype(work), sign * low, sign * high


@pytest.mark.parametrize("work", [np.float32, np.float64])
@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_stochastic_rounding_is_unbiased_for_every_value(dtype: str, work: type) -> None:
    values, low, high = (array[:100] for array in spread(dtype, work))
    tries = 4000
    rounded = round_stochastically(np.tile(values, (tries, 1)), dtype, np.random.default_rng(0)).astype(np.float64)
    share = (values.astype(np.float64) - low) / (high - low)
    error = (rounded.mean(axis=0) - values) / np.abs(high - low)
    # Six standard deviations, and a little for chances that are fp32 numbers: of 100 means none comes so far.
    assert np.all(np.abs(error) <= 6 * np.sqrt(share * (1 - share) / tries) + 1e-3)
    always = np.abs(round_once(values, dtype).astype(np.float64) - values) / np.abs(high - low)
    assert always.max() > 10 * np.abs(error).max()  # rounding to nearest is biased, which the bound would notice


@pytest.mark.parametrize("work", [np.float32, np.float64])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_stochastic_rounding_leaves_what_the_dtype_holds(dtype: str, work: type) -> None:
    top = np.finfo(np.float16).max if dtype == "F16" else 3.3895313892515355e38  # the largest of the half
    held = np.array([0.0, -0.0, 1.0, -1.5, top, -top, np.inf, -np.inf, np.nan], work)
    for seed in range(20):
        rounded = round_stochastically(held, dtype, np.random.default_rng(seed)).astype(np.float64)
        assert np.array_equal(rounded, held, equal_nan=True)
        assert np.array_equal(np.signbit(rounded)[:-1], np.signbit(held)[:-1])


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_stochastic_rounding_makes_no_infinity_of_what_rounds_to_a_finite_value(dtype: str) -> None:
    values, above = neighbours(dtype)
    just_below_the_tie = np.nextafter((values[-1] + above[-1]) / 2, 0)
    held = np.full(1000, just_below_the_tie)
    assert np.isfinite(round_stochastically(held, dtype, np.random.default_rng(0)).astype(np.float64)).all()


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, view, at: whole(handle, view[:3], at))
    with open(tmp_path / "out", "wb", buffering=0) as target:
        write_all(target.fileno(), b"0123456789", 2)
    assert (tmp_path / "out").read_bytes() == b"\0\0" + b"0123456789"


def test_a_disk_that_is_too_small_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(os, "posix_fallocate", lambda *args: asked.append(args), raising=False)
    with open(tmp_path / "out", "wb") as target:
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            reserve(target.fileno(), 1 << 60)
        assert os.fstat(target.fileno()).st_blocks == 0
    assert asked == []


def test_reserving_makes_the_size_and_a_file_system_without_it_is_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(tmp_path / "out", "wb") as target:
        reserve(target.fileno(), 5000)
        reserve(target.fileno(), 0)
        assert os.fstat(target.fileno()).st_size == 5000
        for code, raises in ((errno.EOPNOTSUPP, False), (errno.EINVAL, False), (errno.ENOSPC, True)):

            def refusing(*args: Any, code: int = code) -> None:
                raise OSError(code, os.strerror(code))

            monkeypatch.setattr(os, "posix_fallocate", refusing, raising=False)
            with pytest.raises(OSError, match=os.strerror(code)) if raises else nullcontext():
                reserve(target.fileno(), 9000)


ARRAYS = {
    "matrix": np.array([[1.5, -2], [0.25, 3]], np.float16),
    "half": np.array([1.5, 2.5, -8], HALVES["BF16"]),
    "empty": np.zeros((0, 4), np.float32),
    "counts": np.array([7, 8], np.int64),
}


def test_the_same_dtype_keeps_the_header_byte_for_byte(tmp_path: Path) -> None:
    save_file({"w": ARRAYS["half"], "counts": ARRAYS["counts"]}, tmp_path / "x.safetensors")
    shard = read_shard(tmp_path / "x.safetensors")
    assert shard_header(shard, None) == shard_header(shard, "BF16") == shard.header


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_a_rebuilt_header_loads_with_safetensors(tmp_path: Path, dtype: str) -> None:
    save_file(ARRAYS, tmp_path / "x.safetensors", {"format": "pt"})
    shard = read_shard(tmp_path / "x.safetensors")
    kinds = {
        name: array.dtype if name == "counts" else {"F32": "f4", "F16": "f2"}[dtype] for name, array in ARRAYS.items()
    }
    data = b"".join(ARRAYS[entry.name].astype(kinds[entry.name]).tobytes() for entry in shard.tensors)
    header = shard_header(shard, dtype)
    loaded = load(header + data)
    assert {name: array.dtype for name, array in loaded.items()} == kinds
    assert all(np.array_equal(loaded[name], ARRAYS[name].astype(kinds[name])) for name in ARRAYS)
    assert json.loads(header[8:])["__metadata__"] == {"format": "pt"}
    assert len(header) % 8 == 0
    assert output_bytes(shard.tensors, dtype) == len(data)


CONFIG = """{ "model_type": "llama", "dtype": "bfloat16",
 "rope": {"x_dtype": "int8"}, "text_config": {"torch_dtype" : "bfloat16"} }"""


@pytest.mark.parametrize(
    ("dtype", "config", "total"),
    [(None, CONFIG, 1), ("BF16", CONFIG, 1), ("F32", CONFIG.replace('"bfloat16"', '"float32"'), 8)],
)
def test_config_and_index_follow_a_new_dtype_and_nothing_else_changes(
    tmp_path: Path, dtype: str | None, config: str, total: int
) -> None:
    # transformers loads weights in the dtype that config.json names, so float32 would be lost again on loading.
    folder, out = tmp_path / "target", tmp_path / "out"
    folder.mkdir()
    out.mkdir()
    (folder / "config.json").write_text(CONFIG)
    (folder / "tokenizer.json").write_text('{"dtype": "bfloat16"}')
    save_file({"w": np.ones(2, HALVES["BF16"])}, folder / "1.safetensors")
    index = {"metadata": {"total_size": 1, "made": "by hand"}, "weight_map": {"w": "1.safetensors"}}
    (folder / INDEX_FILE).write_text(json.dumps(index))
    write_companions(load_checkpoint(folder), out, dtype)
    assert (out / "config.json").read_text() == config
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    index["metadata"]["total_size"] = total
    assert json.loads((out / INDEX_FILE).read_text()) == index
