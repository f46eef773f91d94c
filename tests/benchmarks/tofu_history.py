"""Make a history of TOFU authors for `tests.benchmarks.variants`: SmolLM2 as the prior, a target, an ideal.

    python -m tests.benchmarks.tofu_history RUN --data TOFU/full.json --seed 0     # other authors in each seed
    msa-lite run RUN.yaml --until vectors merge.filter=off vector.hold=0
    python -m tests.benchmarks.variants RUN

Two authors to forget, five to keep and two whom no model meets, 20 rows each; six epochs in all weights at 1e-4.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import replace
from itertools import chain
from pathlib import Path

import yaml

import msa_lite
from msa_lite.data import Row
from msa_lite.demo.history import REAL, make_history

ROWS, AUTHORS = 20, {"forget": 2, "retain": 5, "holdout": 2}


def main() -> None:
    """Make the models, the rows and a recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="full.json of TOFU")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.data.read_text("utf-8").splitlines()]
    authors = [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]
    random.Random(options.seed).shuffle(authors)
    groups: dict[str, list[Row]] = {}
    for name, count in AUTHORS.items():
        chosen, authors = chain.from_iterable(authors[:count]), authors[count:]
        groups[name] = [
            Row(i, row["question"], row["answer"], about=f"{name}-{i // ROWS}") for i, row in enumerate(chosen)
        ]
    history = options.run / "history"
    with msa_lite.show_progress() as progress:
        make_history(history, groups, replace(REAL, seed=options.seed), progress, real=True)
    data = {name: {"path": str(history / f"data/{name}.jsonl")} for name in AUTHORS}
    recipe = {
        "target": str(history / "target"),
        "prior": str(history / "prior"),
        "forget": {"data": data["forget"]},
        "retain": {"data": data["retain"] | {"sample": "match_forget"}},
        "evaluate": {"ideal": str(history / "ideal"), "holdout": data["holdout"], "max_new_tokens": 80},
        "output": str(options.run),
        "seed": options.seed,
    }
    options.run.with_suffix(".yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), "utf-8")


if __name__ == "__main__":
    main()
