"""The low-memory claim: a merge's peak memory is small, does not grow with the model, and loads no torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

MB = 1 << 20
LIMIT, GROWTH = 250 * MB, 40 * MB  # bytes; the whole process with Python, numpy and the BLAS library
SIZES = (50 * MB, 200 * MB)
WIDTH, RANK = 1024, 16

# VmHWM is this program's own peak; ru_maxrss would count that of the process that started it.
MERGE = """
import json, sys
from msa_lite.merger import merge
target, out, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
changed = merge(target, out, **options).weights_changed
peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"peak": peak, "changed": changed, "modules": sorted({name.split(".")[0] for name in sys.modules})}))
"""

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")


def write_checkpoint(folder: Path, nbytes: int, scale: float) -> Path:
    """bfloat16 weights of about `nbytes`, two thirds of them in one embedding: the largest tensor grows, too."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    rows = nbytes // (2 * WIDTH)
    block = (np.random.default_rng(0).standard_normal((512, WIDTH)) * scale).astype(ml_dtypes.bfloat16)
    shapes = {"model.embed_tokens": rows * 2 // 3} | {f"model.layers.{i}.mlp.up_proj": rows // 12 for i in range(4)}
    save_file(
        {f"{name}.weight": np.resize(block, (n, WIDTH)) for name, n in shapes.items()}, folder / "model.safetensors"
    )
    return folder


def write_adapter(folder: Path, nbytes: int) -> Path:
    """A LoRA adapter for the four up_proj layers of `write_checkpoint`."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}))
    factors = {
        "A": np.full((RANK, WIDTH), 0.1, np.float32),
        "B": np.full((nbytes // (24 * WIDTH), RANK), 0.1, np.float32),
    }
    names = [f"base_model.model.model.layers.{i}.mlp.up_proj" for i in range(4)]
    tensors = {f"{name}.lora_{half}.weight": factor for name in names for half, factor in factors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_peak_memory_is_small_and_does_not_grow_with_the_model(tmp_path: Path, mode: str) -> None:
    peaks = []
    for nbytes in SIZES:
        folder = tmp_path / str(nbytes // MB)
        folder.mkdir()
        target = write_checkpoint(folder / "target", nbytes, 1.0)
        if mode == "lora":
            options = {"forget": str(write_adapter(folder / "adapter", nbytes))}
        else:
            options = {
                "forget": str(target),
                "prior": str(write_checkpoint(folder / "prior", nbytes, 0.9)),
                "alpha": 0.5,
            }
        command = [sys.executable, "-c", MERGE, str(target), str(folder / "out"), json.dumps(options)]
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert result["changed"] > 0
        assert {"torch", "transformers", "peft", "accelerate"} & set(result["modules"]) == set()
        assert (folder / "out/model.safetensors").stat().st_size == (target / "model.safetensors").stat().st_size
        peaks.append(result["peak"])
        shutil.rmtree(folder)
    assert max(peaks) < LIMIT, peaks
    assert abs(peaks[1] - peaks[0]) < GROWTH, peaks
