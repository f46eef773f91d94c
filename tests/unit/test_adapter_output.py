"""`--as adapter`: its memory bound, disks that fill up, the file it writes, and the options that mean nothing to it."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from msa_lite.errors import MismatchError, StageError, UsageError
from msa_lite.io.weights.adapter import ADAPTER_FILE
from msa_lite.merger import merge_adapters
from tests.support.merges import KINDS, Adapter, write_checkpoint
from tests.support.processes import run_cli

MB = 1_000_000
LIMIT = 200 * MB  # bytes; the whole process with Python, numpy and the BLAS library
MODULES = (48, 192)  # even of the few, what is written fills all buffers of the output file
WIDTH, RANK = 512, 96

# VmHWM is this program's own peak; ru_maxrss would count that of the process that started it.
MERGE = """
import json, sys
from msa_lite.io.files.writing import json_form
from msa_lite.merger import merge_adapters

made = merge_adapters(sys.argv[1], sys.argv[2], **json.loads(sys.argv[3]))
peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM:"))
print(json.dumps({"peak": peak, **json_form(made)}))
"""

needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")


def write_inputs(folder: Path, modules: int, shape: tuple[int, int], rank: int) -> dict[str, str]:
    """A target of so many weights of one shape, and two adapters on all of them."""
    random = np.random.default_rng(0)
    names = [f"layers.{number}.proj" for number in range(modules)]
    write_checkpoint(folder / "target", {f"{name}.weight": np.ones(shape, KINDS["bfloat16"]) for name in names})
    given = {"target": str(folder / "target")}
    for vector in ("forget", "retain"):
        a, b = (random.normal(size=size).astype(np.float32) for size in ((rank, shape[1]), (shape[0], rank)))
        given[vector] = str(Adapter(dict.fromkeys(names, (a, b))).write(folder / vector))
    return given


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, dict[str, str]]]:
    """Inputs by their number of modules; the weights are removed at once for they are large."""
    folders = {count: tmp_path_factory.mktemp(f"modules-{count}") for count in MODULES}
    yield {count: write_inputs(folder, count, (WIDTH, WIDTH), RANK) for count, folder in folders.items()}
    for folder in folders.values():
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_inputs(tmp_path_factory.mktemp("small"), 3, (40, 24), 5)


def measure(given: dict[str, str], out: Path, **options: Any) -> dict[str, Any]:
    """Merge in a process of its own; its peak memory in bytes and the result."""
    options |= {"forget": given["forget"], "retain": given["retain"], "beta": 0.5}
    command = [sys.executable, "-c", MERGE, given["target"], str(out), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def command_of(given: dict[str, str], out: Path) -> list[str]:
    named = [text for name, value in given.items() for text in (f"--{name}", value)]
    return ["merge", *named, "--beta", "0.5", "--out", str(out), "--as", "adapter"]


@needs_proc
@pytest.mark.parametrize("max_rank", [None, 64])
def test_memory_does_not_grow_with_the_number_of_modules(
    models: dict[int, dict[str, str]], tmp_path: Path, max_rank: int | None
) -> None:
    peaks, sizes = [], []
    for count, given in models.items():
        out = tmp_path / str(count)
        made = measure(given, out, max_rank=max_rank, max_memory="200MB")
        assert (made["modules"], made["rank"]) == (count, max_rank or 2 * RANK)
        peaks.append(made["peak"])
        sizes.append((out / ADAPTER_FILE).stat().st_size)
        shutil.rmtree(out)
    assert sizes[1] > 3.9 * sizes[0] > 12 * MB
    assert max_rank or sizes[1] > 100 * MB  # more than there is room for
    assert max(peaks) < LIMIT, peaks
    assert peaks[1] < 1.1 * peaks[0], peaks


@needs_proc
@pytest.mark.parametrize(
    ("shape", "rank", "max_rank"),
    [((1024, 1024), 512, None), ((20_000, 256), 128, 16), ((256, 20_000), 128, 16)],
)
def test_a_bound_that_is_too_low_is_told_with_one_that_is_enough(
    tmp_path: Path, shape: tuple[int, int], rank: int, max_rank: int | None
) -> None:
    given = write_inputs(tmp_path, 2, shape, rank)
    vectors: dict[str, Any] = {"forget": given["forget"], "retain": given["retain"], "beta": 0.5, "max_rank": max_rank}
    with pytest.raises(UsageError, match=rf"108MB of memory .*{2 * rank} ranks of layers\.0\.proj") as caught:
        merge_adapters(given["target"], tmp_path / "out", **vectors, max_memory="108MB")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["forget", "retain", "target"]
    enough = int(re.findall(r"needs at least (\d+)MB", str(caught.value))[0])
    made = measure(given, tmp_path / "out", max_rank=max_rank, max_memory=f"{enough}MB")
    assert made["peak"] < enough * MB
    with pytest.raises(UsageError, match="is too little"):
        merge_adapters(given["target"], tmp_path / "less", **vectors, max_memory=(enough - 1) * MB)
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("max_rank", [7, 30])
def test_ranks_are_known_from_headers_where_the_matrix_has_less_than_its_factors(tmp_path: Path, max_rank: int) -> None:
    given = write_inputs(tmp_path, 1, (6, 9), 8)
    vectors: dict[str, Any] = {"forget": given["forget"], "retain": given["retain"], "beta": 0.5}
    made = merge_adapters(given["target"], tmp_path / "out", **vectors, max_rank=max_rank)
    assert made.rank == (16 if max_rank == 30 else 6)  # below 16 it is cut, and then to what the matrix can have
    assert made.truncation_loss < 1e-12
    a, b = (load_file(made.folder / ADAPTER_FILE)[f"base_model.model.layers.0.proj.lora_{h}.weight"] for h in "AB")
    whole = load_file(merge_adapters(given["target"], tmp_path / "whole", **vectors).folder / ADAPTER_FILE)
    wanted_a, wanted_b = (whole[f"base_model.model.layers.0.proj.lora_{half}.weight"] for half in "AB")
    assert np.allclose(b @ a, wanted_b @ wanted_a, atol=1e-4)


@pytest.mark.parametrize(("name", "code"), [("pwrite", errno.ENOSPC), ("pwrite", errno.EIO), ("fsync", errno.EDQUOT)])
def test_a_disk_that_fills_up_or_fails_leaves_nothing(
    small: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    def failing(*args: Any) -> Any:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, name, failing)
    with pytest.raises(StageError, match=rf"{os.strerror(code)} while it was written; its weights need 3840 bytes"):
        merge_adapters(small["target"], tmp_path / "out", forget=small["forget"])
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    assert merge_adapters(small["target"], tmp_path / "out", forget=small["forget"]).modules == 3


def test_factors_that_do_not_fit_fp32_are_named(small: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match=r"layers\.0\.proj: the merged factors do not fit fp32; try a smaller"):
        merge_adapters(small["target"], tmp_path / "out", forget=small["forget"], alpha=1e39)
    assert list(tmp_path.iterdir()) == []


def test_options_that_mean_nothing_to_an_adapter_are_refused_by_name(small: dict[str, str], tmp_path: Path) -> None:
    options = ["--rounding", "stochastic", "--max-memory", "1", "--dtype", "float32"]
    done = run_cli(*command_of(small, tmp_path / "out"), *options)
    assert done.returncode == 2
    assert "--dtype, --rounding: an adapter is always fp32; leave it out" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_dtype_of_a_mergekit_recipe_is_ignored_with_a_word(small: dict[str, str], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yml"
    command = ["mergekit", "--target", small["target"], "--forget", small["forget"], "--alpha", "0.5"]
    recipe.write_text(run_cli(*command).stdout)
    assert "out_dtype: bfloat16" in recipe.read_text()
    done = run_cli("merge", "--mergekit", str(recipe), "--as", "adapter", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "its dtype (bfloat16) is ignored" in done.stderr
    merge_adapters(small["target"], tmp_path / "same", forget=small["forget"], alpha=0.5)
    assert (tmp_path / "out" / ADAPTER_FILE).read_bytes() == (tmp_path / "same" / ADAPTER_FILE).read_bytes()
