"""Wall time and peak memory of the quickstart: from nothing, with the history cached, and with everything cached.

    python -m tests.benchmarks.bench_quickstart [SEED ...]

Prints a line a run, and for each seed the three conditions that the quickstart promises.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def run(output: Path, seed: str) -> tuple[float, float, dict]:
    """(wall seconds, peak RSS of all children so far in MB, the JSON that the command prints)."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "msa_lite", "run", "quickstart", f"output={output}", f"seed={seed}", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return time.perf_counter() - start, peak, json.loads(done.stdout)


def main() -> None:
    """Time the three kinds of run for every seed given."""
    for seed in sys.argv[1:] or ["0"]:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "run"
            wall, peak, result = run(output, seed)
            print(f"seed {seed}: from nothing {wall:.0f} s, peak {peak:.0f} MB")
            for stage in ("vectors", "sweep", "model", "evaluation"):
                shutil.rmtree(output / stage)
            print(f"seed {seed}: history cached {run(output, seed)[0]:.0f} s")
            print(f"seed {seed}: all cached {run(output, seed)[0]:.0f} s")
            scores = result["metrics"]
            target, ideal, unlearned = (scores[name] for name in ("target", "ideal", "unlearned"))
            print(
                f"seed {seed}: α {result['alpha']:g} β {result['beta']:g}; "
                f"forget accuracy target {target['accuracy_f']:.3f}, "
                f"ideal {ideal['accuracy_f']:.3f}, unlearned {unlearned['accuracy_f']:.3f}; retain accuracy target "
                f"{target['accuracy_r']:.3f}, unlearned {unlearned['accuracy_r']:.3f}"
            )


if __name__ == "__main__":
    main()
