"""How well a merge's forecast predicts what quantisation brings back, over strengths, ranks and layers.

    python tests/benchmarks/forecast_recovery.py [--run RUN ...] [--alphas 0.4,0.8,1.2,1.6,2.4] [--ranks 2,8,32]
        [--forms nf4,int4] [--rows 48] [--seed 0] [--work DIR]

Without --run, the history of `msa-lite quickstart` is made (a Llama of 2 layers, width 256), and a forget vector
fitted at each rank. A point is one strength of one vector, of both layers or of one, on one of two targets: the
history's, and the same one rounded to NF4, as it is after `dequantize()`. With --run, the points are the strengths
times the vectors of finished runs, in the ratio of their own α and β; nothing is written into a run. Forget rows are
scored teacher-forced: extraction strength and probability.

unchanged, gone: by the forecast, the share of weights whose code is the target's, and 1 − the part of the update that
is left. back: (q − u) / (t − u), u the unlearned model's score, q that with rounded weights, t that of the target
with rounded weights; a point counts where t − u is at least 0.05. ρ is Spearman's rank correlation with back over all
points that count.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file, save_file
from scipy.stats import spearmanr

import msa_lite
from msa_lite.data import DataSource, Prompter, Template, encode_qa, load_rows, open_tokenizer
from msa_lite.demo import HistorySettings, make_groups, make_history
from msa_lite.evals.forward import score_bundles
from msa_lite.evals.models import Runner, load_model
from msa_lite.evals.records import token_record
from msa_lite.io.weights.blocks import rounded_model
from msa_lite.merger import merge
from msa_lite.report.update import place_of

SCORES = ("extraction_strength", "probability")
PREDICTORS = ("unchanged", "gone")
LEAST = 0.05  # of a score, that the update took away


@dataclass(frozen=True)
class Case:
    """A target, its rows and one vector or two."""

    name: str
    target: Path
    rows: Path
    vectors: dict[str, Path]
    ratio: float = 0.0
    """β / α."""
    prior: Path | None = None


def small_cases(work: Path, ranks: Sequence[int], seed: int) -> Iterator[Case]:
    """Make a history and yield the vectors of each rank, whole and by layers."""
    people = {"prior": 240, "retain": 48, "forget": 8, "holdout": 8}
    history = work / "history"
    make_history(history, make_groups(people, seed=seed), HistorySettings(seed=seed))
    rows = history / "data/forget.jsonl"
    for rank in ranks:
        vector = {"lora": {"rank": rank, "alpha": 2 * rank}, "epochs": 20, "learning_rate": 2e-3, "batch_size": 32}
        recipe = {
            "target": str(history / "target"),
            "prior": str(history / "prior"),
            "forget": {"data": {"path": str(rows)}},
            "vector": vector,
            "output": str(work / f"rank-{rank}"),
            "seed": seed,
        }
        (folder,) = msa_lite.run_vectors(recipe)
        parts = {f"layer {layer}": part_of(folder, work / f"rank-{rank}-layer-{layer}", layer) for layer in (0, 1)}
        for target in (history / "target", on_grid(history / "target", work / "target-nf4")):
            for name, vector in {"all": folder, **parts}.items():
                yield Case(f"{target.name}, rank {rank}, {name}", target, rows, {"forget": vector})


def on_grid(target: Path, out: Path) -> Path:
    """Write a model with its weights rounded to NF4."""
    if not out.exists():
        shutil.copytree(target, out, ignore=shutil.ignore_patterns("*.safetensors", "manifest.json"))
        model = load_model(target)
        with rounded_model(model, "nf4"):
            model.save_pretrained(out)
    return out


def part_of(vector: Path, out: Path, layer: int) -> Path:
    """Write an adapter with one layer of another one."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(vector, out, ignore=shutil.ignore_patterns("*.safetensors", "manifest.json"))
    tensors = load_file(vector / "adapter_model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if place_of(name)[0] == layer}
    save_file(kept, out / "adapter_model.safetensors")
    return out


def run_case(folder: Path) -> Case:
    """Return the vectors of a finished run."""
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    inputs = json.loads((folder / "model/manifest.json").read_text())["inputs"]
    vectors = {name: folder / "vectors" / name for name in ("forget", "retain") if inputs.get(name)}
    target, prior = Path(recipe["target"]), Path(recipe["prior"])
    ratio = inputs.get("beta", 0.0) / inputs["alpha"]
    return Case(folder.name, target, Path(recipe["forget"]["data"]["path"]), vectors, ratio, prior)


class Scorer:
    """Scores models on the forget rows of a case, as they are and rounded."""

    def __init__(self, case: Case, limit: int, forms: Sequence[str]) -> None:
        tokenizer = open_tokenizer(case.target, str(case.target))
        rows = load_rows(DataSource(str(case.rows)))[:limit]
        self._examples = encode_qa(rows, Prompter.build(tokenizer, "default", Template()))
        self._forms = forms
        self.target = self.score(case.target)

    def score(self, folder: Path) -> dict[str, dict[str, float]]:
        """Return the scores of a model by form; "" is the model as it is."""
        runner, scores = Runner(load_model(folder)), {}
        for form in ("", *self._forms):
            with rounded_model(runner.model, form or None):
                batches = score_bundles(runner, [[example] for example in self._examples], with_z=False, hidden=None)
                records = [token_record(one, True, False) for batch in batches for _, (one,) in batch]
            scores[form] = {name: float(np.mean([record[name] for record in records])) for name in SCORES}
        runner.close()
        return scores


def measure(case: Case, alpha: float, scorer: Scorer, forms: Sequence[str], work: Path) -> Iterator[dict[str, Any]]:
    """Merge a case at a strength and yield its figures by form and score."""
    strengths = {"alpha": alpha, "prior": str(case.prior) if case.prior else None}
    if "retain" in case.vectors:
        strengths |= {"retain": str(case.vectors["retain"]), "beta": alpha * case.ratio}
    forget = str(case.vectors["forget"])
    merged = merge(str(case.target), work / "merged", forget=forget, forecast=forms, replace=True, **strengths)  # type: ignore[arg-type]
    scores = scorer.score(merged.folder)
    for form in forms:
        for name in SCORES:
            target, plain, after = scorer.target[form][name], scores[""][name], scores[form][name]
            back = (after - plain) / (target - plain) if target - plain >= LEAST else None
            figures = merged.forecast[form]
            facts = {"case": case.name, "alpha": alpha, "form": form, "score": name}
            facts |= {"unchanged": 1 - figures["share"], "gone": 1 - figures["kept"]}
            yield facts | {"target": target, "plain": plain, "rounded": after, "back": back}


def described(point: dict[str, Any]) -> str:
    """Return a point in a line, for those who wait."""
    back = "–" if point["back"] is None else f"{point['back']:.2f}"
    return (
        f"{point['case']}, α {point['alpha']:g}, {point['form']}: {point['unchanged']:.1%} unchanged, "
        f"{point['gone']:.1%} gone, {point['score']} "
        f"{point['plain']:.3f} → {point['rounded']:.3f} (target {point['target']:.3f}), back {back}"
    )


def print_results(console: Console, points: Sequence[dict[str, Any]]) -> None:
    """Print one row a point and form, then the correlations."""
    columns = ("case", "alpha", "form", "score", *PREDICTORS, "target", "plain", "rounded", "back")
    table = Table(*columns)
    for point in points:
        cells = (point[column] for column in columns)
        table.add_row(*("–" if cell is None else f"{cell:.3g}" if isinstance(cell, float) else cell for cell in cells))
    console.print(table)
    for form in dict.fromkeys(point["form"] for point in points):
        for name in SCORES:
            counted = [p for p in points if (p["form"], p["score"]) == (form, name) and p["back"] is not None]
            if len(counted) > 2:
                back = [point["back"] for point in counted]
                rho = {one: spearmanr([point[one] for point in counted], back).statistic for one in PREDICTORS}
                line = ", ".join(f"ρ of {one} = {value:.2f}" for one, value in rho.items())
                console.print(f"{form}, {name}: {line}; {len(counted)} points; back {min(back):.2f} … {max(back):.2f}")


def main() -> None:
    """Parse, make or find the cases, measure all points, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda kind: lambda text: [kind(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--run", type=Path, action="append", default=[], help="a finished run of MSA")
    parser.add_argument("--alphas", type=numbers(float), default=[0.4, 0.8, 1.2, 1.6, 2.4])
    parser.add_argument("--ranks", type=numbers(int), default=[2, 8, 32])
    parser.add_argument("--forms", type=numbers(str), default=["nf4", "int4"])
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="a folder to keep the history and its vectors in")
    options = parser.parse_args()
    console, points = Console(width=max(150, Console().width), highlight=False), []
    with tempfile.TemporaryDirectory() as scratch:
        work = options.work or Path(scratch)
        cases = map(run_case, options.run) if options.run else small_cases(work, options.ranks, options.seed)
        scorers: dict[Path, Scorer] = {}
        for case in cases:
            if case.target not in scorers:
                scorers[case.target] = Scorer(case, options.rows, options.forms)
            for alpha in options.alphas:
                new = [*measure(case, alpha, scorers[case.target], options.forms, Path(scratch))]
                points += new
                console.print("; ".join(described(point) for point in new))
    print_results(console, points)


if __name__ == "__main__":
    main()
