"""Time of a merge with and without a forecast, in pairs, on a checkpoint made on the spot.

    python tests/benchmarks/bench_forecast.py [--shape 1b|3b|8b] [--layers 4] [--forms nf4] [--pairs 7] [--folder DIR]

The checkpoint has Llama's shapes of the named size with a few layers, bf16, and two rank-16 adapters
(`bench_merge.py`). A pair is one merge without a forecast and one with it, in turns of who is first. Seconds are of
the wall clock and of the CPU; the medians are over pairs, of the ratio within each pair. In a VM, memory is slow at
first use, so one merge before is not counted.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import bench_merge
import ml_dtypes
import numpy as np

from msa_lite.merger import merge


def run_merge(work: Path, forms: list[str]) -> tuple[float, float]:
    """Merge; return the seconds of the wall clock and of the CPU."""
    shutil.rmtree(work / "out", ignore_errors=True)
    wall, cpu = time.perf_counter(), time.process_time()
    target, forget, retain = (str(work / name) for name in ("target", "forget", "retain"))
    merge(target, work / "out", forget=forget, retain=retain, beta=0.5, forecast=forms)
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    """Parse, make the inputs, time the pairs, print, clean up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=bench_merge.SHAPES, default="1b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--forms", type=lambda text: text.split(","), default=["nf4"])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where to put some GB")
    options = parser.parse_args()
    hidden, inner, _, heads, kv_heads, _ = bench_merge.SHAPES[options.shape]
    bench_merge.SHAPES[options.shape] = (hidden, inner, options.layers, heads, kv_heads, 320)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        work = Path(folder)
        pool = np.random.default_rng(0).normal(0, 0.02, bench_merge.BLOCK).astype(ml_dtypes.bfloat16)
        bench_merge.write_checkpoint(work / "target", options.shape, pool)
        for seed, name in enumerate(("forget", "retain"), 1):
            bench_merge.write_adapter(work / name, options.shape, seed)
        run_merge(work, [])
        pairs = []
        for number in range(options.pairs):
            order = [[], options.forms] if number % 2 else [options.forms, []]
            runs = {bool(forms): run_merge(work, forms) for forms in order}
            pairs.append((runs[False], runs[True]))
            print(f"pair {number}: without {runs[False][0]:.2f} s, with {runs[True][0]:.2f} s", flush=True)
    for column, what in enumerate(("wall", "CPU")):
        ratios = [after[column] / before[column] for before, after in pairs]
        plain = np.median([before[column] for before, _ in pairs])
        print(f"{what}: {plain:.2f} s without; with {','.join(options.forms)} × {np.median(ratios):.3f} "
              f"({min(ratios):.3f} … {max(ratios):.3f}, {len(pairs)} pairs)")  # fmt: skip


if __name__ == "__main__":
    main()
