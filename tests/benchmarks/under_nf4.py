"""What a choice of α and β costs that has to hold in 4 bits (`select.under: [nf4]`), beside the usual choice.

    python tests/benchmarks/under_nf4.py [--seeds 3] [--mode lora|full] [--work DIR] [KEY=VALUE ...]

For each seed: the history and the vectors of `msa-lite quickstart`, and two sweeps over the same points. Each chosen
model is merged and scored on the final rows, as it is and with its weights rounded to NF4. left: of the gap in
extraction strength between target and ideal; kept: the share of the retain set, both as the verdict has them, beside
the target in the same form and the ideal as it is. KEY=VALUE: further overrides of the recipe.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import msa_lite
from msa_lite.evals.benchmark import Benchmark, Record
from msa_lite.evals.models import Runner, load_model
from msa_lite.evals.records import run_items
from msa_lite.io.weights.blocks import rounded_model
from msa_lite.pipeline.prepare.run import msa_scope, prepare
from msa_lite.recipe import load_recipe

RECIPE = Path(__file__).parents[2] / "recipes/quickstart.yaml"
POINTS = ["forget.alpha=[0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 2.0]", "retain.beta=[0.0, 0.25]"]
COLUMNS = ("alpha", "beta", "left", "left, NF4", "kept", "kept, NF4")


def scores(folder: Path, benchmark: Benchmark) -> dict[str, dict[str, list[Record]]]:
    """Return the records of a model on the final rows, as it is ("") and rounded."""
    runner, records = Runner(load_model(folder)), {}
    for form in ("", "nf4"):
        with rounded_model(runner.model, form or None):
            records[form] = {name: run_items(runner, benchmark, name) for name in benchmark.sets}
    runner.close()
    return records


def choose(overrides: list[str]) -> dict[str, float]:
    """Make one sweep and return the figures of its choice."""
    result = msa_lite.sweep(RECIPE, overrides)
    assert result is not None, "one process"
    recipe = load_recipe(RECIPE, overrides)
    run = prepare(recipe, msa_scope(recipe))
    assert run.test is not None, "the recipe scores"
    places = (run.sources["target"].folder, result.merged.folder, run.sources["ideal"].folder)
    target, model, ideal = (scores(folder, run.test) for folder in places)
    figures = {"alpha": result.strengths.alpha, "beta": result.strengths.beta}
    for form, label in (("", ""), ("nf4", ", NF4")):
        weighed = run.test.weigh({"target": target[form], "unlearned": model[form], "ideal": ideal[""]})
        assert not isinstance(weighed, str), weighed
        forgotten, kept = weighed
        figures[f"left{label}"] = forgotten.left["extraction_strength"].value
        figures[f"kept{label}"] = kept.share.value if kept else 1.0
    return figures


def main() -> None:
    """Parse, make the sweeps of each seed, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--mode", default="lora")
    parser.add_argument("--work", type=Path, help="a folder to keep the runs in")
    parser.add_argument("override", nargs="*")
    options = parser.parse_intermixed_args()
    table, means = Table("seed", "select.under", *COLUMNS), dict[str, list[dict[str, Any]]]()
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(options.seeds):
            output = (options.work or Path(scratch)) / f"{options.mode}-{seed}"
            common = [f"seed={seed}", f"output={output}", f"vector.mode={options.mode}", *POINTS, *options.override]
            for under in ("[]", "[nf4]"):
                figures = choose([*common, f"select.under={under}"])
                means.setdefault(under, []).append(figures)
                table.add_row(str(seed), escape(under), *(f"{figures[name]:.3g}" for name in COLUMNS))
    for under, rows in means.items():
        table.add_row(
            "mean", escape(under), *(f"{statistics.fmean(row[name] for row in rows):.3g}" for name in COLUMNS)
        )
    Console(width=max(100, Console().width), highlight=False).print(table)


if __name__ == "__main__":
    main()
