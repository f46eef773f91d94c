"""The memory bound: a merge stays below what it is allowed, does not grow with the model, and loads no torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from msa_lite.errors import UsageError
from msa_lite.io.weights.checkpoint import MAX_HEADER, MAX_TENSORS
from msa_lite.merger import merge
from tests.support.merges import Adapter, make_adapter, write_checkpoint

MB = 1_000_000
LIMIT = 200 * MB  # bytes; the whole process with Python, numpy and the BLAS library
SIZES = (100 * MB, 400 * MB)
# Of a tensor the factors are held whole, which for an embedding grow with its tokens: at this rank by little.
WIDTH, RANK = 1024, 4
LAYERS = 4

# VmHWM is this program's own peak; ru_maxrss would count that of the process that started it. With "hard", the kernel
# refuses to give out more than what the limit leaves after the imports.
MERGE = """
import json, resource, sys
import filelock, msa_lite.merger.mergekit.recipes, yaml  # what a merge loads on its way
from msa_lite.merger import merge

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key + ":"))

target, out, options, hard = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4]
if hard:
    room = int(hard) - status("VmRSS") + status("VmData")
    resource.setrlimit(resource.RLIMIT_DATA, (room, room))
changed = merge(target, out, **options).weights_changed
modules = sorted({name.split(".")[0] for name in sys.modules})
print(json.dumps({"peak": status("VmHWM"), "changed": changed, "modules": modules}))
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc"),
]


def shapes(nbytes: int) -> dict[str, tuple[int, int]]:
    """bfloat16 weights of about `nbytes`, two thirds of them in one embedding: the largest tensor grows, too."""
    rows = nbytes // (2 * WIDTH)
    layers = {f"model.layers.{i}.mlp.up_proj": (rows // (3 * LAYERS), WIDTH) for i in range(LAYERS)}
    return {"model.embed_tokens": (rows * 2 // 3, WIDTH), **layers}


def write_model(folder: Path, nbytes: int, scale: float) -> Path:
    block = (np.random.default_rng(0).standard_normal((512, WIDTH)) * scale).astype(ml_dtypes.bfloat16)
    return write_checkpoint(folder, {f"{name}.weight": np.resize(block, size) for name, size in shapes(nbytes).items()})


def write_adapter(folder: Path, nbytes: int) -> Path:
    """A LoRA adapter on every matrix, the embedding included."""
    tensors = {}
    for name, (rows, columns) in shapes(nbytes).items():
        a, b = np.full((RANK, columns), 0.1, np.float32), np.full((rows, RANK), 0.1, np.float32)
        keys = ("lora_A.weight", "lora_B.weight")
        if "embed" in name:  # kept the other way round
            a, b, keys = np.ascontiguousarray(b.T), np.ascontiguousarray(a.T), ("lora_embedding_A", "lora_embedding_B")
        tensors |= {f"{name}.{key}": factor for key, factor in zip(keys, (a, b), strict=True)}
    return make_adapter(folder, tensors, r=RANK, lora_alpha=RANK)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Path]]:
    """For each size a folder with target, prior and adapter, which are removed at once for they are large."""
    folders: dict[int, Path] = {}
    for nbytes in SIZES:
        folders[nbytes] = folder = tmp_path_factory.mktemp(f"model-{nbytes // MB}")
        write_model(folder / "target", nbytes, 1.0)
        write_model(folder / "prior", nbytes, 0.9)
        write_adapter(folder / "adapter", nbytes)
    yield folders
    for path in (path for folder in folders.values() for path in folder.rglob("*.safetensors")):
        path.unlink()


def run_merge(
    folder: Path, name: str, options: dict[str, Any], hard: int | None = None, seconds: float | None = None
) -> dict[str, Any]:
    """Merge in a process of its own; its peak memory in bytes, weights changed and modules loaded.

    seconds: after which the process is killed.
    """
    call = [str(folder / "target"), str(folder / name), json.dumps(options), str(hard or "")]
    command = [sys.executable, "-c", MERGE, *call]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    assert done.returncode == 0, done.stderr
    written = folder / name / "model.safetensors"
    assert written.stat().st_size == (folder / "target" / "model.safetensors").stat().st_size
    written.unlink()
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("mode", "exact"), [("lora", False), ("lora", True), ("full", False), ("full", True), ("both", False)]
)
def test_memory_stays_below_its_bound_whatever_the_models_size(models: dict[int, Path], mode: str, exact: bool) -> None:
    peaks = []
    for nbytes, folder in models.items():
        options: dict[str, Any] = {"alpha": 0.5, "max_memory": "200MB", "threads": 2, "exact": exact}
        options["forget"] = str(folder / "adapter" if mode == "lora" else folder / "target")
        if mode != "lora":
            options["prior"] = str(folder / "prior")
        if mode == "both":
            options |= {"retain": str(folder / "adapter"), "beta": 1.0, "dtype": "bfloat16", "rounding": "stochastic"}
        result = run_merge(folder, f"{mode}-{exact}", options)
        assert result["changed"] > nbytes // 20
        assert {"torch", "transformers", "peft", "accelerate"} & set(result["modules"]) == set()
        peaks.append(result["peak"])
    assert max(peaks) < LIMIT, peaks
    assert peaks[1] < 1.1 * peaks[0], peaks


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_a_merge_gets_by_with_no_more_than_it_was_allowed(models: dict[int, Path], mode: str) -> None:
    folder = models[SIZES[1]]
    options = {"alpha": 0.5, "max_memory": "200MB", "threads": 2, "forget": str(folder / "adapter")}
    if mode == "full":
        options |= {"forget": str(folder / "target"), "prior": str(folder / "prior")}
    assert run_merge(folder, f"{mode}-hard", options, LIMIT)["changed"] > 0
    # The limit is one: a merge that is allowed more than the system gives breaks, if need be within BLAS (-11).
    # Python waits for ever for a thread that finds no memory for its first step.
    said = r"MemoryError|Cannot allocate|Memory allocation|can.t start new thread|assert -11 == 0|timed out"
    greedy = options | {"max_memory": "4GB", "threads": 16, "exact": True}
    with pytest.raises((AssertionError, subprocess.TimeoutExpired), match=said):
        run_merge(folder, f"{mode}-greedy", greedy, LIMIT, seconds=120)


def test_many_threads_keep_to_the_bound_in_the_form_that_needs_most(models: dict[int, Path]) -> None:
    folder = models[SIZES[0]]
    options = {"forget": str(folder / "adapter"), "exact": True, "dtype": "float32", "rounding": "stochastic"}
    options |= {"max_memory": "330MB", "threads": 8}
    command = [str(folder / "target"), str(folder / "many"), json.dumps(options), ""]
    done = subprocess.run([sys.executable, "-c", MERGE, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (folder / "many" / "model.safetensors").unlink()
    assert json.loads(done.stdout)["peak"] < 330 * MB


@pytest.mark.parametrize("exact", [False, True])
def test_a_bound_that_is_too_low_is_told_with_one_that_is_enough(
    models: dict[int, Path], tmp_path: Path, exact: bool
) -> None:
    folder = models[SIZES[0]]
    options = {"target": str(folder / "target"), "forget": str(folder / "adapter"), "exact": exact, "threads": 8}
    with pytest.raises(UsageError, match=r"105MB of memory is too little") as caught:
        merge(**options, out=tmp_path / "out", max_memory="105MB")
    assert list(tmp_path.iterdir()) == []
    enough = re.findall(r"needs at least (\d+MB)", str(caught.value))
    assert merge(**options, out=tmp_path / "out", max_memory=enough[0]).weights_changed > 0
    (tmp_path / "out" / "model.safetensors").unlink()


@pytest.mark.parametrize("exact", [False, True])
def test_large_factors_of_dora_are_counted(tmp_path: Path, exact: bool) -> None:
    rows, columns, rank = 1024, 14336, 128
    name, random = "model.layers.0.mlp.down_proj", np.random.default_rng(0)
    weight = np.resize(random.standard_normal((64, columns)).astype(ml_dtypes.bfloat16), (rows, columns))
    for folder in ("target", "prior"):
        write_checkpoint(tmp_path / folder, {f"{name}.weight": weight})
    tensors = {
        f"{name}.lora_A.weight": random.standard_normal((rank, columns)).astype(np.float32) * 0.01,
        f"{name}.lora_B.weight": random.standard_normal((rows, rank)).astype(np.float32) * 0.01,
        f"{name}.lora_magnitude_vector": np.full(rows, 100, np.float32),
    }
    make_adapter(tmp_path / "adapter", tensors, r=rank, lora_alpha=rank, use_dora=True)
    options = {"forget": str(tmp_path / "adapter"), "prior": str(tmp_path / "prior"), "threads": 2, "exact": exact}
    result = run_merge(tmp_path, "out", options | {"max_memory": "240MB"})
    assert result["changed"] > 0
    assert result["peak"] < 240 * MB


def test_high_ranks_take_no_memory_of_ranks_by_ranks(tmp_path: Path) -> None:
    rank, size, random = 6000, 64, np.random.default_rng(0)
    name = "model.layers.0.mlp.down_proj"
    write_checkpoint(tmp_path / "target", {f"{name}.weight": random.standard_normal((size, size))})
    for folder in ("forget", "retain"):
        factors = random.standard_normal((rank, size)), random.standard_normal((size, rank))
        Adapter({name: factors}, lora_alpha=rank).write(tmp_path / folder)
    options = {name: str(tmp_path / name) for name in ("forget", "retain")}
    result = run_merge(tmp_path, "out", options | {"beta": 1.0, "max_memory": "200MB"})
    assert result["changed"] == size * size
    assert result["peak"] < 200 * MB


READ = """
import sys
from pathlib import Path
from msa_lite.errors import FormatError
from msa_lite.io.weights.checkpoint import load_checkpoint, read_shard

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key + ":"))

checkpoints = [load_checkpoint(Path(sys.argv[1])) for _ in range(4)]
for name in sys.argv[2:]:
    try:
        sys.exit(f"{name} was read: {read_shard(Path(name)).metadata}")
    except FormatError as error:
        print(error, file=sys.stderr)
print(status("VmHWM"))
"""


def test_four_of_the_largest_headers_take_less_than_600_mb(tmp_path: Path) -> None:
    """Checkpoints at the limits of what is read, kept while headers beyond them are refused."""
    entry = '"dtype":"F32","shape":[0,1,1],"data_offsets":[0,0]'
    start = "model.language_model.layers.10.mlp.experts"
    valid = ",".join(f'"{start}.{n}.down_proj.weight_scale_inv":{{{entry}}}' for n in range(MAX_TENSORS))
    values = 10 * MAX_TENSORS
    headers = {
        "model": f"{{{valid}}}{' ' * (MAX_HEADER - len(valid) - 2)}",
        "numbers": "{" + ",".join(f'"{n}":0' for n in range(values - 2)) + "}",
        "lists": '{"a":[' + "[]," * (values // 2 - 4) + "[]]}",
        "wide": '{"a😀":"' + "x" * (MAX_HEADER - 100) + '"}',
    }
    for name, header in headers.items():
        raw = header.encode()
        (tmp_path / f"{name}.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw)
    (tmp_path / "config.json").write_text("{}")
    names = [str(tmp_path), *(str(tmp_path / f"{name}.safetensors") for name in headers if name != "model")]
    done = subprocess.run([sys.executable, "-c", READ, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 600 * MB, done.stdout
