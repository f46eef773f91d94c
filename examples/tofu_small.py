"""A small history on real TOFU rows, then the whole job on it: `python examples/tofu_small.py --data TOFU_FOLDER`.

Trains a prior on some retain authors, a target on others plus the forget set, and an ideal without the forget set, all
small Llamas made here; writes a recipe beside them and runs it. Takes some minutes on a CPU. `--data locuslab/TOFU`
takes the rows from the Hub.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import yaml

import msa_lite
from msa_lite.cli.output import print_reports, progress_bars, quieten_libraries
from msa_lite.data import DataSource, Row, load_rows
from msa_lite.demo import HistorySettings, make_history

ROWS_PER_AUTHOR = 20
MLP = ["gate_proj", "up_proj", "down_proj"]  # facts sit there; the retain authors suffer less
AUTHORS = {"retain": 10, "prior": 40, "holdout": 3}


def make_groups(data: str, forget: str, limit: int | None) -> dict[str, list[Row]]:
    """Rows by group: the forget set, and retain authors of their own for target, prior and holdout."""
    retain = load_rows(DataSource(data, name="retain90"))
    groups = {"forget": load_rows(DataSource(data, name=forget))}
    first = 0
    for name, authors in AUTHORS.items():
        last = first + authors * ROWS_PER_AUTHOR
        groups[name] = retain[first:last]
        first = last
    return {name: rows[:limit] for name, rows in groups.items()}


def make_recipe(out: Path, seed: int, epochs: int) -> dict[str, object]:
    """The recipe of the unlearning run over the history in `out`/history."""
    history = out / "history"
    return {
        "target": str(history / "target"),
        "prior": str(history / "prior"),
        "forget": {"data": {"path": str(history / "data/forget.jsonl")}, "alpha": [0.3, 0.4, 0.5, 0.6, 0.8]},
        "retain": {"data": {"path": str(history / "data/retain.jsonl"), "sample": "match_forget"}, "beta": [0.0, 0.25]},
        "vector": {"lora": {"rank": 16, "alpha": 32, "targets": MLP}, "epochs": epochs, "learning_rate": 2e-3},
        "evaluate": {
            "ideal": str(history / "ideal"),
            "holdout": {"path": str(history / "data/holdout.jsonl")},
            "max_new_tokens": 80,
        },
        "select": {"keep": 0.9},
        "output": str(out / "run"),
        "seed": seed,
    }


def main() -> None:
    """Parse the arguments, make the history, run the recipe, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", default="locuslab/TOFU", help="TOFU as a folder in Hub layout, or its Hub id")
    parser.add_argument("--forget", default="forget05", choices=["forget01", "forget05", "forget10"])
    parser.add_argument("--out", type=Path, default=Path("runs/tofu-small"))
    parser.add_argument("--limit", type=int, help="at most so many rows a group, for a quick look")
    parser.add_argument(
        "--epochs", type=int, default=20, help="epochs of target and vectors; the prior has half of them"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # else threads that wait hold up those that work
    quieten_libraries(verbose=False)
    groups = make_groups(arguments.data, arguments.forget, arguments.limit)
    settings = HistorySettings(
        hidden_size=192,
        vocabulary=2048,
        prior_epochs=max(1, arguments.epochs // 2),
        tuning_epochs=arguments.epochs,
        tuning_learning_rate=1e-3,
        batch_size=16,
        seed=arguments.seed,
    )
    recipe = make_recipe(arguments.out, arguments.seed, arguments.epochs)
    with progress_bars() as progress:
        make_history(arguments.out / "history", groups, settings, progress)
        (arguments.out / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
        result = msa_lite.run(recipe, progress=progress)
    print_reports(result.reports, f"{arguments.forget}: α = {result.alpha:g}, β = {result.beta:g}, test rows")
    print(f"report: {result.folder / 'report.md'}")


if __name__ == "__main__":
    main()
