"""A small history on real TOFU rows, then the whole job on it: `python examples/tofu_small.py --data TOFU_FOLDER`.

Trains a prior on some retain authors, a target on others plus the forget set, and an ideal without the forget set, all
small Llamas made here; writes a recipe beside them and runs it. Takes some minutes on a CPU. `--data locuslab/TOFU`
takes the rows from the Hub.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import yaml

import msa_lite
from msa_lite.cli.output import print_reports, progress_bars, quieten_libraries
from msa_lite.data import DataSource, Row, load_rows
from msa_lite.demo import HistorySettings, make_history

ROWS_PER_AUTHOR = 20


def make_groups(data: str, forget: str, authors: int, limit: int | None) -> dict[str, list[Row]]:
    """Rows by group: the forget set, `authors` retain authors for the target, the others for prior and holdout."""
    retain = load_rows(DataSource(data, name="retain90"))
    kept = authors * ROWS_PER_AUTHOR
    groups = {
        "prior": retain[kept : -5 * ROWS_PER_AUTHOR],
        "retain": retain[:kept],
        "forget": load_rows(DataSource(data, name=forget)),
        "holdout": retain[-5 * ROWS_PER_AUTHOR :],
    }
    return {name: rows[:limit] for name, rows in groups.items()}


def make_recipe(out: Path, seed: int, epochs: int) -> dict[str, object]:
    """The recipe of the unlearning run over the history in `out`/history."""
    history = out / "history"
    return {
        "target": str(history / "target"),
        "prior": str(history / "prior"),
        "forget": {"data": {"path": str(history / "data/forget.jsonl")}, "alpha": [0.5, 0.75, 1.0, 1.25]},
        "retain": {"data": {"path": str(history / "data/retain.jsonl"), "sample": "match_forget"}, "beta": [0.0, 0.5]},
        "vector": {"lora": {"rank": 16, "alpha": 32}, "epochs": epochs, "learning_rate": 2e-3},
        "evaluate": {
            "ideal": str(history / "ideal"),
            "holdout": {"path": str(history / "data/holdout.jsonl")},
            "max_new_tokens": 80,
        },
        "output": str(out / "run"),
        "seed": seed,
    }


def main() -> None:
    """Parse the arguments, make the history, run the recipe, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", default="locuslab/TOFU", help="TOFU as a folder in Hub layout, or its Hub id")
    parser.add_argument("--forget", default="forget05", choices=["forget01", "forget05", "forget10"])
    parser.add_argument("--authors", type=int, default=20, help="retain authors that the target learns")
    parser.add_argument("--out", type=Path, default=Path("runs/tofu-small"))
    parser.add_argument("--limit", type=int, help="at most so many rows a group, for a quick look")
    parser.add_argument("--epochs", type=int, default=15, help="epochs of every training run")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    quieten_libraries(verbose=False)
    groups = make_groups(arguments.data, arguments.forget, arguments.authors, arguments.limit)
    settings = HistorySettings(hidden_size=256, layers=3, vocabulary=4096, batch_size=16, seed=arguments.seed)
    settings = replace(settings, prior_epochs=max(1, arguments.epochs // 3), tuning_epochs=arguments.epochs)
    settings = replace(settings, tuning_learning_rate=1e-3)
    recipe = make_recipe(arguments.out, arguments.seed, arguments.epochs)
    with progress_bars() as progress:
        make_history(arguments.out / "history", groups, settings, progress)
        (arguments.out / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
        result = msa_lite.run(recipe, progress=progress)
    print_reports(result.reports, f"{arguments.forget}: α = {result.alpha:g}, β = {result.beta:g}, test rows")
    print(f"report: {result.folder / 'report.md'}")


if __name__ == "__main__":
    main()
