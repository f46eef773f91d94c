"""Was it removed, or hidden? Teach rows into known weights, unlearn them in several ways, see which weights changed.

    python examples/localisation/run.py --out runs/localisation

A small Llama learns people to keep, and then people to forget, into 5 % of the weights of its layers but the last, as
in LACUNA (arXiv 2607.02513). So the right place of an update is known, and so is the exact undo: the model before that
stage, which is the ideal. Each method unlearns by the tool as it is. Then the models are tuned a little on the people
to keep: what was hidden comes back. Everything goes on where it was stopped. RESULTS.md beside this file has the table.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from known_weights import KnownLoss, KnownWeights
from location import locate_update

import msa_lite
from msa_lite.data import DataSource, PromptSettings, encode_qa, load_rows, make_prompter, open_tokenizer, pad_id
from msa_lite.demo import make_groups
from msa_lite.io.weights.hub import fetch
from msa_lite.pipeline.verbs.run import RunResult
from msa_lite.train import FitSettings, VectorFit, run_fit

PEOPLE = {"prior": 80, "retain": 16, "forget": 6, "holdout": 6}
EPOCHS = {"people": 12, "keep": 20, "forget": 40}
SHAPE = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 3, "num_attention_heads": 4}
TINY = {"prior": 6, "retain": 6, "forget": 3, "holdout": 2}
TINY_SHAPE = SHAPE | {"hidden_size": 32, "intermediate_size": 48}
TENSORS, SHARE = r"layers\.[01]\.(self_attn|mlp)\..*", 0.05  # the known weights
METHODS: dict[str, dict[str, Any]] = {  # keys of the recipe; a name without "msa" is that of a baseline
    "msa-lora": {"vector": {"hold": 0}, "merge": {"filter": "off"}},
    "msa-full": {"vector": {"mode": "full"}, "merge": {"filter": "off"}},
    "msa-held": {},  # the tool's defaults: LoRA with a hold and a filter
    **{name: {"vector": {"hold": 0}} for name in ("task_vector", "npo", "grad_diff", "rmu", "undial")},
}
TARGET, UNDO = "target", "exact undo"
TABLES = {
    "Which weights change?": {
        "precision": "precision = recall", "chance": "by chance", "auc": "AUC",
        "precision_within": "precision within", "chance_within": "by chance", "auc_within": "AUC within",
        "energy": "energy share",
    },
    "Removed or hidden?": {
        "forget": "told", "retain": "kept", "cosine": "cosine", "cosine_known": "cosine in M", "undone": "undone",
        "left": "left", "relearnt": "left after relearning",
    },
}  # fmt: skip


def data(folder: Path, name: str) -> dict[str, Any]:
    """Return a data set as a recipe names it."""
    return {"path": str(folder / f"data/{name}.jsonl")}


def make_models(folder: Path, seed: int, tiny: bool) -> Path:
    """Write the people of a seed and train the history; return the folder of its models."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for name, group in make_groups(TINY if tiny else PEOPLE, seed).items():
        facts = [{"question": row.question, "answer": row.answer, "subject": row.about} for row in group]
        (folder / f"data/{name}.jsonl").write_text("".join(json.dumps(fact) + "\n" for fact in facts))
    epochs = dict.fromkeys(EPOCHS, 2) if tiny else EPOCHS
    config = {"model_type": "llama", "tie_word_embeddings": True, "max_position_embeddings": 512}
    recipe = {
        "model": {"config": config | (TINY_SHAPE if tiny else SHAPE), "tokenizer": {"vocabulary": 512}},
        "stages": [
            {"name": "people", "data": [data(folder, "prior")], "epochs": epochs["people"]},
            {"name": "keep", "data": [data(folder, "retain")], "epochs": epochs["keep"], "learning_rate": 5e-4},
        ],
        "training": {"learning_rate": 2e-3, "weight_decay": 0.0, "batch_size": 16},
        "output": str(folder / "models"),
        "seed": seed,
    }
    result = msa_lite.train_stages(recipe)
    assert result is not None
    keep = fetch(str(result.folder / "2-keep"))
    tokenizer = open_tokenizer(keep.folder, keep.name)
    rows = encode_qa(
        load_rows(DataSource(data(folder, "forget")["path"])), make_prompter(tokenizer, PromptSettings()), 512
    )
    settings = FitSettings(
        "full", epochs["forget"], 2e-3, weight_decay=0.0, warmup_epochs=1.0, batch_size=16, seed=seed + 2
    )
    loss = KnownLoss(rows, pad_id(tokenizer), known_of(seed))
    run_fit(VectorFit(keep, rows, tokenizer, settings, loss, label="3-forget"), result.folder / "3-forget")
    return result.folder


def known_of(seed: int) -> KnownWeights:
    """Return the weights that the rows to forget are trained into."""
    return KnownWeights((TENSORS,), SHARE, seed)


def unlearn(folder: Path, name: str, seed: int, tiny: bool) -> RunResult:
    """Run a method; return its folder and its scores."""
    models = folder / "models"
    recipe = {
        "target": str(models / "3-forget"),
        "prior": str(models / "1-people"),
        "forget": {"data": data(folder, "forget"), **({"alpha": 1.0} if tiny else {})},
        "retain": {"data": data(folder, "retain") | {"sample": "match_forget"}, "beta": 0.0},
        "evaluate": {
            "ideal": str(models / "2-keep"),
            "holdout": data(folder, "holdout"),
            "max_new_tokens": 24,
        },
        "baseline": {"methods": {"rmu": {"layer": 1}}},
        "verdict": False,
        "output": str(folder / "runs" / name),
        "seed": seed,
        **METHODS[name],
    }
    changes = ["vector.epochs=2", "vector.learning_rate=1e-3", "baseline.epochs=1", "evaluate.limit=4"] if tiny else []
    is_msa = name.startswith("msa")
    run = msa_lite.run(recipe, changes) if is_msa else msa_lite.run_baseline(name, recipe, changes)
    assert run is not None
    return run


def relearn(unlearned: Mapping[str, Path]) -> dict[str, tuple[float | None, float | None]]:
    """Tune all models on people to keep; return what is left of the people to forget before and after, by method.

    0: as in the ideal, which is tuned alike; 1: as in the target.
    """
    left = {}
    for name, model in unlearned.items():
        trials = msa_lite.attack(model.parent, ["relearn"]).facts.attacks[0].models["unlearned"].trials
        before = next(trial for trial in trials if trial.is_control)
        after = next(trial for trial in trials if trial.is_summary and trial.trial.startswith("retain "))
        left[name] = (before.share, after.share)
    return left


def run_seed(folder: Path, seed: int, methods: Sequence[str], tiny: bool) -> list[dict[str, Any]]:
    """Return a row of the table for the target, for each method, and for the exact undo."""
    models = make_models(folder, seed, tiny)
    target = models / "3-forget"
    runs = {name: unlearn(folder, name, seed, tiny) for name in methods}
    unlearned = {name: run.folder / "model" for name, run in runs.items()}
    left = relearn(unlearned) | {TARGET: (1.0, None), UNDO: (0.0, 0.0)}  # of target and ideal, by definition
    of_first = runs[methods[0]].reports
    reports = {TARGET: of_first["target"], **{n: run.reports["unlearned"] for n, run in runs.items()}}
    reports[UNDO] = of_first["ideal"]
    table = []
    for name, model in {TARGET: target, **unlearned, UNDO: models / "2-keep"}.items():
        place = locate_update(target, model, models / "2-keep", known_of(seed))
        row: dict[str, Any] = {"seed": seed, "method": name}
        row |= {key: reports[name].metrics[f"accuracy_{key[0]}"].value for key in ("forget", "retain")}
        for ranking, end in ((place.everywhere, ""), (place.within, "_within")):
            row |= {f"{key}{end}": getattr(ranking, key) for key in ("precision", "chance", "auc")}
        row |= {key: getattr(place, key) for key in ("energy", "cosine", "cosine_known", "undone")}
        table.append(row | dict(zip(("left", "relearnt"), left[name], strict=True)))
    return table


def as_markdown(table: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """Return the means over seeds of some columns, with the lowest and the highest value."""
    lines = [f"| method | {' | '.join(columns.values())} |", f"|---|{'---:|' * len(columns)}"]
    for name in dict.fromkeys(row["method"] for row in table):
        cells = []
        for key in columns:
            values = [f for row in table if row["method"] == name and (f := row[key]) is not None]
            mean = f"{sum(values) / len(values):.3f}" if values else "–"
            low, high = (f"{end:.2f}" for end in (min(values), max(values))) if values else ("", "")
            cells.append(f"{mean} ({low} to {high})" if low != high else mean)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the seeds, write scores.jsonl, print the table."""
    parser = argparse.ArgumentParser(description="Locate updates in a model whose forget rows are in known weights.")
    parser.add_argument("--out", type=Path, default=Path("runs/localisation"), help="the folder of models and runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS], help="the first is one of MSA")
    parser.add_argument("--tiny", action="store_true", help="models that learn nothing, to see that all of it runs")
    arguments = parser.parse_args()
    table: list[dict[str, Any]] = []
    for seed in arguments.seeds:
        begin = time.process_time()
        table += run_seed(arguments.out / f"seed-{seed}", seed, arguments.methods, arguments.tiny)
        (arguments.out / "scores.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
        print(f"seed {seed}: {(time.process_time() - begin) / 60:.1f} minutes of one core")
    for title, columns in TABLES.items():
        print(f"\n{title}\n\n{as_markdown(table, columns)}")


if __name__ == "__main__":
    main()
