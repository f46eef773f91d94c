"""The world of the requests: invented people, three small models that know them or do not, and a recipe for each
request.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msa_lite.data import Row
from msa_lite.demo.history import HistorySettings, make_groups, make_history

METHODS = ("msa", "npo", "grad_diff")
_PEOPLE = {"prior": 240, "retain": 48, "holdout": 5}  # six rows about each
_SCORED = 40  # rows to keep that are scored, and that nobody learns again
_FEW = {"prior": 4, "retain": 8, "holdout": 2}  # with --small
_SMALL = HistorySettings(hidden_size=32, layers=1, vocabulary=300, prior_epochs=1, tuning_epochs=2)


@dataclass(frozen=True)
class World:
    """Rows and models."""

    folder: Path
    requests: list[list[Row]]
    """The rows of each request, in their order."""
    groups: dict[str, list[Row]]
    """The rows of the history: prior, retain, forget (those of all requests), holdout."""
    seed: int
    small: bool

    @property
    def tokens(self) -> int:
        """Return the most tokens of an answer."""
        return 4 if self.small else 30

    def make_models(self) -> None:
        """Make prior, target and ideal, unless they are there: the target learnt all requests' rows, the ideal none."""
        settings = _SMALL if self.small else HistorySettings(seed=self.seed)
        make_history(self.folder / "history", self.groups, settings)


def make_world(folder: Path, count: int, seed: int, small: bool = False) -> World:
    """Draw the people and the rows of each request, one to five of a person's six, and write the files of rows."""
    folder = folder.absolute()
    people = (_FEW if small else _PEOPLE) | {"forget": count}
    groups, rng = make_groups(people, seed), random.Random(seed)
    by_person: dict[str, list[Row]] = {}
    for row in groups["forget"]:
        by_person.setdefault(row.about, []).append(row)
    requests = [rng.sample(rows, rng.randint(1, 5)) for rows in by_person.values()]
    groups["forget"] = [row for rows in requests for row in rows]
    scored = rng.sample(groups["retain"], _FEW["retain"] if small else _SCORED)
    others = [row for row in groups["retain"] if row not in scored]
    files = {"scored": scored, "retain": others, "holdout": groups["holdout"], "all": groups["forget"]}
    for name, rows in (files | {f"request-{at:02}": rows for at, rows in enumerate(requests, 1)}).items():
        _write_rows(folder / "rows" / f"{name}.jsonl", rows)
    return World(folder, requests, groups, seed, small)


def _write_rows(path: Path, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"question": row.question, "answer": row.answer, "subject": row.about}) for row in rows)
    path.write_text("\n".join(lines) + "\n", "utf-8")


def run_folder(world: World, method: str, number: int) -> Path:
    """Return the folder of a request's run; a baseline's lies below that of its recipe."""
    folder = world.folder / method / f"{number:02}"
    return folder if method == "msa" else folder / "baselines" / method


def recipe_of(world: World, method: str, number: int) -> dict[str, Any]:
    """Return the recipe of a request: the quickstart's settings, and for baselines ten epochs."""
    models, rows = world.folder / "history", world.folder / "rows"
    before = run_folder(world, method, number - 1)
    sequential = method != "msa" and number > 1
    lora = {"rank": 16, "alpha": 32, "targets": ["gate_proj", "up_proj", "down_proj"]}
    return {
        "target": str(before / "model" if sequential else models / "target"),
        "prior": str(models / "prior"),
        "forget": {"data": {"path": str(rows / f"request-{number:02}.jsonl")}},
        "retain": {"data": {"path": str(rows / "retain.jsonl"), "sample": "match_forget"}},
        "earlier": [str(before)] if method == "msa" and number > 1 else [],
        "vector": {"lora": lora, "epochs": 2 if world.small else 20, "learning_rate": 2e-3, "batch_size": 32},
        "baseline": {"epochs": 2 if world.small else 10},
        "evaluate": {
            "ideal": str(models / "ideal"),
            "holdout": {"path": str(rows / "holdout.jsonl")},
            "retain": {"path": str(rows / "scored.jsonl")},
            "max_new_tokens": world.tokens,
        },
        "verdict": "off",
        "request": f"request {number}",
        "output": str(world.folder / method / f"{number:02}"),
        "seed": world.seed,
    }
