"""Time each kind of evidence on a finished run, beside the scores of one of its models.

    python -m tests.benchmarks.bench_evidence RUN [--rounds 3]

Prints CPU and wall seconds, medians over rounds, and the ratio to scoring the unlearned model on the same rows. Nothing
in the run's folder changes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from msa_lite.cli.output import quieten_libraries
from msa_lite.evals.records import collect_records
from msa_lite.evidence.evidence import make_evidence
from msa_lite.evidence_names import EVIDENCE
from msa_lite.pipeline.prepare.run import msa_scope, prepare
from msa_lite.pipeline.run.evidence import make_scene
from msa_lite.recipe import load_recipe


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return the CPU and the wall seconds of some work."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    quieten_libraries(False)
    recipe = load_recipe(arguments.run / "recipe.yaml", ["demo=null"])
    scene = make_scene(prepare(recipe, msa_scope(recipe)))

    def score() -> None:
        with tempfile.TemporaryDirectory() as folder:
            collect_records(scene.sources["unlearned"], scene.benchmark, Path(folder))

    works: dict[str, Callable[[], object]] = {"scores of one model": score}
    for kind in EVIDENCE:
        evidence = make_evidence(kind)
        if reason := evidence.lacking(scene):
            print(f"{kind}: undecided: {reason}")
            continue
        works[kind] = lambda evidence=evidence: evidence.conclude(evidence.observe(scene), scene)  # type: ignore[misc]
    times = {name: [timed(work) for _ in range(arguments.rounds)] for name, work in works.items()}
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in times.items()}
    print(f"{'':24}{'CPU s':>8}{'wall s':>8}{'ratio':>8}")
    for name, (cpu, wall) in medians.items():
        print(f"{name:24}{cpu:8.2f}{wall:8.2f}{cpu / medians['scores of one model'][0]:8.2f}")


if __name__ == "__main__":
    main()
