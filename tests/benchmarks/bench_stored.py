"""Wall time and memory of a merge into a model stored as codes, beside `cp -r` of it and the merge of plain bf16.

    python -m tests.benchmarks.bench_stored --shape tiny|1b|3b|8b [--repeats 3] [--folder DIR]

Linux only. The checkpoint is that of bench_merge.py, its layers' matrices stored in each form in turn; the vectors are
two rank-16 adapters on all of them. fp8 and 4-bit floats are merged in their stored form, NF4 of bitsandbytes is read
by dequantising and written as bf16. Every run has `--max-memory 200MB`. Tools take turns, the inputs in the page cache
and the last output deleted; "÷ cp" is the median over repeats of the ratio within one repeat. Peaks are of the RSS.
"kept" is the share of the update, along its own direction, that is left after storing; "cut" the length of what was
lost over the update's.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.torch import save_file

from msa_lite.io.weights.checkpoint import TensorEntry
from msa_lite.io.weights.quantised_forms import Scaled
from tests.benchmarks.bench_merge import (
    BLOCK,
    Tool,
    model_bytes,
    settle,
    time_tool,
    write_adapter,
    write_checkpoint,
)
from tests.benchmarks.paired import machine, print_table

FORMS = ("bf16", "fp8 blocks", "fp8 rows", "nvfp4", "mxfp4", "nf4")
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def stored(form: str, name: str, rows: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors of a weight in a form of scaled floats."""
    high, wide = rows.shape
    height, width, scale = {"fp8 blocks": (128, 128, "F32"), "fp8 rows": (1, wide, "F32"), "nvfp4": (1, 16, "F8_E4M3"),
                            "mxfp4": (1, 32, "U8")}[form]  # fmt: skip
    outer = float(np.abs(rows).max() / (6 * 448)) if form == "nvfp4" else 1.0
    kind, packed = ("F8_E4M3", name) if "fp8" in form else ("U8", name + "_packed" * (form == "mxfp4"))
    code, scales = (TensorEntry(name, Path(), dtype, (high, wide), 0, 0) for dtype in (kind, scale))
    layout = Scaled(code, scales, (high, wide), height, width, scale == "U8", outer)
    factors = layout.new_scales(layout.peaks(rows, 0))
    codes = layout.encode(rows, factors, 0)
    suffix = "_scale_inv" if form == "fp8 blocks" else "_scale"
    tensors = {packed: codes.view(ml_dtypes.float8_e4m3fn) if "fp8" in form else codes, name + suffix: factors}
    return tensors | ({name + "_scale_2": np.array(outer, np.float32)} if form == "nvfp4" else {})


def as_torch(array: np.ndarray) -> object:
    import torch

    kinds = {"float8_e4m3fn": torch.float8_e4m3fn, "bfloat16": torch.bfloat16}
    if array.dtype.name in kinds:
        return torch.from_numpy(array.view(f"u{array.itemsize}")).view(kinds[array.dtype.name])
    return torch.from_numpy(array)


def write_form(plain: Path, folder: Path, form: str) -> None:
    """The checkpoint with the matrices of its layers in a form."""

    folder.mkdir()
    config = json.loads((plain / "config.json").read_text())
    config |= {"quantization_config": BLOCKS} if form == "fp8 blocks" else {}
    (folder / "config.json").write_text(json.dumps(config))
    index = json.loads((plain / "model.safetensors.index.json").read_text())
    places: dict[str, str] = {}
    for file in sorted(set(index["weight_map"].values())):
        tensors: dict[str, object] = {}
        with safe_open(plain / file, "pt") as reader:
            for name in reader.keys():  # noqa: SIM118, the reader is no mapping
                weight = reader.get_tensor(name)
                if "proj" not in name:
                    tensors[name] = weight
                elif form == "nf4":
                    from bitsandbytes.functional import quantize_4bit

                    codes, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
                    tensors[name] = codes
                    tensors |= {f"{name}.{part}": value for part, value in state.as_dict(packed=True).items()}
                else:
                    tensors |= {n: as_torch(a) for n, a in stored(form, name, weight.float().numpy()).items()}
        save_file(tensors, folder / file, {"format": "pt"})
        places |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index | {"weight_map": places}))


def measure(form: str, work: Path, shape: str, repeats: int) -> None:
    """Print the table of a form, and how much of the update is left."""
    target, out, size = work / form, work / "out", model_bytes(shape)
    if form != "bf16":
        write_form(work / "bf16", target, form)
    options = ["--forget", work / "forget", "--retain", work / "retain", "--beta", 0.5, "--max-memory", "200MB"]
    options += ["--dtype", "bfloat16"] if form == "nf4" else []
    merging = [sys.executable, "-m", "msa_lite", "merge", "--target", target, *options, "--out", out]
    copying = ["sh", "-c", '"$@" && sync "$0"/*', out, "cp", "-r", target, out]
    tools = {name: Tool(name, [*map(str, line)], 1e9, size) for name, line in (("cp", copying), ("merge", merging))}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in tools}
    for _ in range(repeats):
        for name, tool in tools.items():
            settle(work)
            runs[name].append(time_tool(tool, work))
    total = json.loads((out / "manifest.json").read_text())["fidelity"]["total"]
    gigabytes = sum(path.stat().st_size for path in target.glob("*.safetensors")) / 1e9
    if form != "bf16":
        shutil.rmtree(target)
    print(f"\n{form}, {gigabytes:.2f} GB: {total['kept']:.1%} kept, {total['rounding_loss']:.1%} cut")
    print_table(runs, "cp", "wall", ("wall", "cpu", "peak"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("tiny", "1b", "3b", "8b"), default="1b")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the models are made (default: a temporary folder)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        work = Path(name)
        pool = np.random.default_rng(0).normal(0, 0.02, BLOCK).astype(ml_dtypes.bfloat16)
        write_checkpoint(work / "bf16", arguments.shape, pool)
        for seed, vector in enumerate(("forget", "retain"), 1):
            write_adapter(work / vector, arguments.shape, seed)
        print(machine())
        for form in FORMS:
            measure(form, work, arguments.shape, arguments.repeats)


if __name__ == "__main__":
    main()
