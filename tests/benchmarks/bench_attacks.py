"""Attack MSA and the baselines on the quickstart's history: what does each give back, over several seeds?

    python -m tests.benchmarks.bench_attacks OUT [--seeds 0 1 2] [--methods npo ...] [--attacks quantise ...]
    python -m tests.benchmarks.bench_attacks OUT --run RUN [RUN ...]      # only gather finished runs, attacked already

Prints two tables in percent, with means over seeds and 95 % intervals of a t distribution: what the strongest trial of
each attack brings back beyond the ideal, as a share of what the target shows, beside what is left and kept before any
attack; and scores under attack, beside those of target and ideal. A rerun goes on where it was.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from scipy import stats

import msa_lite
from msa_lite.catalogue import ATTACKS
from msa_lite.recipe.files import find_recipe

METHODS = ("task_vector", "npo", "grad_diff", "rmu", "undial", "simnpo")
Row = dict[str, float | None]
SCORES = {
    "extraction": ("quantise", "plain.extraction_strength"),
    "… in NF4": ("quantise", "nf4.extraction_strength"),
    "… after 12 steps on retain rows": ("relearn", "retain step 12.extraction_strength"),
    "… on the other half": ("relearn", "part step 12.extraction_strength"),
    "… on the rows": ("relearn", "forget step 12.extraction_strength"),
    "ROUGE-L, best of all prompts": ("prompt", "any.rouge_l"),
    "… of 16 answers": ("sample", "drawn.leak_rouge_16"),
    "AUC, Min-K%++": ("membership", "scores.min_k_pp"),
}
"""Columns of the table of scores, each with its attack and metric."""


def recipe_of(seed: int, out: Path, full: bool) -> dict[str, Any]:
    """Return the quickstart's recipe for a seed; with `full`, on the history of the first run, by all weights."""
    text = Path(find_recipe("quickstart")).read_text("utf-8")
    first = out / f"seed-{seed}" / "lora"
    values: dict[str, Any] = yaml.safe_load(text.replace("$output", str(first)))
    values |= {"output": str(first), "seed": seed, "verdict": False}
    # One layer of two is edited: that of a model so small has no third.
    values["baseline"] = {"methods": {"rmu": {"layer": 1}}}
    if full:
        values["demo"] = None
        values["vector"] = {"mode": "full", "learning_rate": 5e-4, "epochs": 20, "batch_size": 32}
        values["output"] = str(out / f"seed-{seed}" / "full")
    return values


def make_runs(out: Path, seed: int, methods: Sequence[str], progress: Any) -> dict[str, Path]:
    """Run MSA and the baselines on one history. Return the folders of their runs by name."""
    runs = {}
    for name, full in (("MSA LoRA", False), ("MSA full", True)):
        result = msa_lite.run(recipe_of(seed, out, full), progress=progress)
        assert result is not None
        runs[name] = result.folder
    for method in methods:
        result = msa_lite.run_baseline(method, recipe_of(seed, out, False), progress=progress)
        assert result is not None
        runs[method] = result.folder
    return runs


def row_of(run: Path) -> Row:
    """Return what attacks brought back from a run's model, and what was left and kept before."""
    whole = json.loads((run / "attacks/report.json").read_text("utf-8"))
    verdict = json.loads((run / "verdict.json").read_text("utf-8"))
    row: Row = {name: whole["metrics"].get(f"{name}.unlearned", {"value": None})["value"] for name in ATTACKS}
    kept = verdict.get("kept")
    return {"left": verdict["forgotten"]["left"], "kept": kept["share"] if kept else None, **row}


def scores_of(run: Path, model: str) -> Row:
    """Return the scores of a run's model under attack; None where the attack was not made."""
    row: Row = {}
    for column, (attack, metric) in SCORES.items():
        file = run / f"attacks/{attack}/report.json"
        metrics = json.loads(file.read_text("utf-8"))["metrics"] if file.exists() else {}
        row[column] = metrics.get(f"{metric}.{model}", {"value": None})["value"]
    return row


def print_table(rows: Mapping[str, Sequence[Row]]) -> None:
    """Print a table with a line for each name, over its seeds."""
    columns = list(next(iter(rows.values()))[0])
    print(f"| | seeds | {' | '.join(columns)} |")
    print(f"|---|---:|{'---:|' * len(columns)}")
    for name, several in rows.items():
        cells = [mean_with_interval(row[column] for row in several) for column in columns]
        print(f"| {name} | {len(several)} | {' | '.join(cells)} |")


def mean_with_interval(values: Iterable[float | None]) -> str:
    """Return a mean over seeds in percent, with the half width of its 95 % interval."""
    known = np.array([value for value in values if value is not None]) * 100
    if not len(known):
        return "–"
    if len(known) == 1:
        return f"{known[0]:.0f}"
    half = stats.t.ppf(0.975, len(known) - 1) * known.std(ddof=1) / np.sqrt(len(known))
    return f"{known.mean():.0f} ± {half:.0f}"


def main() -> None:
    """Make, attack and compare the runs."""
    parser = argparse.ArgumentParser(description="Attack MSA and the baselines on the quickstart's history.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--attacks", nargs="*", default=list(ATTACKS))
    parser.add_argument("--run", type=Path, nargs="*", help="finished runs to gather, by the names of folders")
    arguments = parser.parse_args()
    runs = [{run.name: run} for run in arguments.run or ()]
    with msa_lite.show_progress() as progress:
        for seed in [] if arguments.run else arguments.seeds:
            runs.append(make_runs(arguments.out, seed, arguments.methods, progress))
            for run in runs[-1].values():
                msa_lite.attack(run, arguments.attacks, progress=progress)
    shares: dict[str, list[Row]] = {}
    scores: dict[str, list[Row]] = {"target": [], "ideal": []}
    for several in runs:
        for model in ("target", "ideal"):
            scores[model].append(scores_of(next(iter(several.values())), model))
        for name, run in several.items():
            shares.setdefault(name, []).append(row_of(run))
            scores.setdefault(name, []).append(scores_of(run, "unlearned"))
    print_table(shares)
    print()
    print_table(scores)


if __name__ == "__main__":
    main()
