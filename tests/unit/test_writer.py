"""Rounding once, copying byte ranges, and headers of another dtype."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save_file

from msa_lite.io.weights import writer as module
from msa_lite.io.weights.checkpoint import INDEX_FILE, load_checkpoint, read_shard
from msa_lite.io.weights.writer import (
    Sink,
    output_bytes,
    reserve,
    round_once,
    round_stochastically,
    shard_header,
    write_all,
    write_companions,
)
from msa_lite.merger import merge
from msa_lite.merger.checks import memory
from msa_lite.merger.stream import stream
from tests.support.merges import ROWS, SHARDS, contents, write_inputs

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
    [(None, CONFIG, 4), ("BF16", CONFIG, 4), ("F32", CONFIG.replace('"bfloat16"', '"float32"'), 8)],
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


# A file written in order: the right bytes and hash in every mode, and the disk's errors told.


CHUNK = 16 << 10
Prepare = Callable[[pytest.MonkeyPatch], None]


def no_direct_flag(patch: pytest.MonkeyPatch) -> None:
    """A system without direct writes."""
    patch.delattr(os, "O_DIRECT", raising=False)


def refuse_to_open(patch: pytest.MonkeyPatch) -> None:
    """A file system that refuses the flag, but makes the file."""
    whole = os.open

    def refuse(path: Any, flags: int, mode: int = 0o777) -> int:
        handle = whole(path, flags & ~getattr(os, "O_DIRECT", 0), mode)
        if flags & getattr(os, "O_DIRECT", 0):
            os.close(handle)
            raise OSError(errno.EINVAL, "no direct writes here")
        return handle

    patch.setattr(os, "open", refuse)


def refuse_to_write(patch: pytest.MonkeyPatch) -> None:
    """A file system that takes the flag and refuses every such write but the first."""
    import fcntl

    whole, calls = os.pwrite, []

    def refuse(handle: int, data: Any, at: int) -> int:
        calls.append(at)
        if len(calls) > 1 and fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not aligned as I like it")
        return whole(handle, data, at)

    patch.setattr(os, "pwrite", refuse)


@pytest.mark.parametrize("prepare", [lambda patch: None, no_direct_flag, refuse_to_open, refuse_to_write])
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, CHUNK - 1, CHUNK, 3 * CHUNK + 5, 9 * CHUNK])
def test_appended_bytes_and_ranges_are_the_file_and_its_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepare: Prepare, size: int
) -> None:
    monkeypatch.setattr(module, "_CHUNK", CHUNK)
    monkeypatch.setattr(module, "_FLUSH", CHUNK)
    prepare(monkeypatch)
    random = np.random.default_rng(size)
    original, wanted = random.bytes(size), bytearray()
    (tmp_path / "original").write_bytes(original)
    with open(tmp_path / "original", "rb") as source, Sink(tmp_path / "out", size) as sink:
        while len(wanted) < size:
            at, count = len(wanted), min(size - len(wanted), int(random.integers(1, 2 * CHUNK)))
            if random.random() < 0.5:
                sink.append_from(source.fileno(), at, count, tmp_path / "original")
                wanted += original[at : at + count]
            else:
                new = random.bytes(count)
                sink.append(new)
                wanted += new
        digest = sink.close()
    assert (tmp_path / "out").read_bytes() == bytes(wanted)
    assert digest == hashlib.sha256(wanted).hexdigest()
    assert (tmp_path / "original").read_bytes() == original


def test_an_existing_file_is_never_written_to(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"keep")
    (tmp_path / "out").symlink_to(tmp_path / "other")
    with pytest.raises(FileExistsError):
        Sink(tmp_path / "out", 4)
    assert (tmp_path / "other").read_bytes() == b"keep"


def test_a_disk_that_fills_up_is_told_by_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with Sink(tmp_path / "out", 3 << 20) as sink:
        sink.append(bytes(3 << 20))
        with pytest.raises(OSError, match="No space left"):
            sink.close()


def test_a_disk_that_is_full_from_the_start_is_told_at_once_and_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int, start: int, count: int) -> None:  # what there was is reserved before the error comes
        os.pwrite(handle, bytes(4096), 0)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "_open_new", lambda path: (os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL), False))
    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(OSError, match="No space left"):
        Sink(tmp_path / "out", 1 << 20)
    assert list(tmp_path.iterdir()) == []


# The stream of a merge: ranges copied in pieces, progress that counts each byte once, new noise in each block.


def test_a_range_that_is_longer_than_a_piece_is_copied_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = write_inputs(tmp_path)
    at_once = contents(merge(**inputs, out=tmp_path / "at once").folder)
    monkeypatch.setattr(stream, "_COPY", 1000)  # bytes; each norm has 2048
    in_pieces = contents(merge(**inputs, out=tmp_path / "in pieces").folder)
    assert {n: d for n, d in in_pieces.items() if n != "manifest.json"} == {
        n: d for n, d in at_once.items() if n != "manifest.json"
    }


def test_progress_ends_with_the_last_block_of_the_last_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = write_inputs(tmp_path)
    monkeypatch.setattr(memory, "BLOCK", 512 * 100)  # six blocks a tensor
    steps: list[tuple[int, int]] = []
    merge(**inputs, out=tmp_path / "out", progress=lambda title, done, amount: steps.append((done, amount)))
    (amount,) = {amount for _, amount in steps}
    done = [done for done, _ in steps]
    assert amount == SHARDS * (ROWS * 512 * 2 + 512 * 4)
    assert done == sorted(done)
    assert len({*done} - {0, amount}) >= 6 * SHARDS
    assert max(step for step in done if step < amount) >= amount - 2 * 512 * 512
