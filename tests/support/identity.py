"""Checks that every option of a stage is in one of two lists: those that decide its result, and those that do not."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from pydantic import BaseModel

from msa_lite.data import sources
from msa_lite.io.files.schema import schema_fields
from msa_lite.io.files.writing import canonical_json
from msa_lite.io.finished.manifest import stage_folder
from msa_lite.io.weights.hub import fetch
from msa_lite.pipeline.run.folder import recipe_text
from msa_lite.recipe import Recipe
from tests.support.benchmark_data import ROWS as MUSE_ROWS
from tests.support.benchmark_data import TABLES, write_data, write_tofu
from tests.support.merges import Adapter

Change = Mapping[str, Any]


class Stop(BaseException):
    """Ends a stage once its inputs are known."""


def names_of(one: Any) -> list[str]:
    """The options of a function, or the fields of a dataclass that are given when it is made."""
    if inspect.isfunction(one):
        return list(inspect.signature(one).parameters)
    return [item.name for item in fields(one) if item.init]


def assert_all_named(one: Any, deciding: Collection[str], others: Collection[str]) -> None:
    assert set(names_of(one)) == {*deciding, *others}, "an option is in neither list, or is gone"
    assert not {*deciding} & {*others}


def assert_told_apart(identity: Callable[[Change], Any], changes: Mapping[str, Change]) -> None:
    """Each of the changes gives another identity than no change does, which is always the same."""
    base = canonical_json(identity({}))
    assert canonical_json(identity({})) == base
    assert [name for name, change in changes.items() if canonical_json(identity(change)) == base] == []


def assert_not_told_apart(identity: Callable[[Change], Any], changes: Mapping[str, Change]) -> None:
    base = canonical_json(identity({}))
    assert [name for name, change in changes.items() if canonical_json(identity(change)) != base] == []


def one_each(changes: Change) -> dict[str, Change]:
    return {name: {name: value} for name, value in changes.items()}


@pytest.fixture(scope="module", autouse=True)
def tables_once() -> Iterator[None]:
    """Load each table once for a module whose rows stay as they are: loading them is most of what a recipe takes."""
    once = cache(sources.load_table)
    with pytest.MonkeyPatch.context() as patch:
        for module in ("msa_lite.data.rows", "msa_lite.evals.benchmarks.dataset"):
            patch.setattr(f"{module}.load_table", once)
        yield


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The parts of a recipe that an annotation names, those in lists left out."""
    if schema_fields(annotation):
        yield annotation
    elif getattr(annotation, "__origin__", None) is not list:
        for inner in get_args(annotation):
            yield from models_in(inner)


def leaves(model: type[BaseModel], prefix: str = "") -> set[str]:
    """The paths of all options in a schema."""
    found = set()
    for name, annotation in schema_fields(model).items():
        path = f"{prefix}{name}"
        parts = list(dict.fromkeys(models_in(annotation)))
        found |= set().union(*(leaves(part, f"{path}.") for part in parts)) if parts else {path}
    return found


# What a data set's options do, on a set in Hub layout with several columns; each beside what the recipe says anyway.
DATA = {
    "path": "OTHER",
    "format": "text",
    "name": "second",
    "split": "other",
    "columns.question": "question2",
    "columns.answer": "answer2",
    "columns.messages": "said",
    "columns.system": "rule",
    "columns.history": "before",
    "columns.input": "more",
}
OF_TEXT = {"columns.text": "text2"}
# Of rows on this machine there is no revision; that one of the Hub decides the rows: test_hub.
# Whom a row is about decides scores alone: `columns.subject` in test_identity_recipes.
# Tools show in templates that have them, and a column to ignore is not read anyway: test_forms.
UNSAID = {"revision", "columns.subject", "columns.tools", "columns.ignore"}


def rows_of(count: int, name: str) -> list[dict[str, Any]]:
    rows = []
    for i in range(count):
        words = {"question": f"Where is {name} number {i}?", "answer": f"At the {name} {i}, over there, far from it."}
        words |= {"question2": f"Who is {name} number {i}?", "answer2": f"It is {i}.", "text": f"{name} {i} is here."}
        said = [{"role": "user", "content": f"{name} {i}?"}, {"role": "assistant", "content": "Yes."}]
        words |= {"text2": f"{name} {i} has gone.", "rule": "Be kind.", "more": "Say it."}
        rows.append({**words, "said": said, "before": [["Who?", "I."]]})
    return rows


def write_rows(folder: Path, name: str) -> str:
    """Two configurations with two splits each, all of other rows."""
    return write_data(
        folder,
        {(c, s): rows_of(7, f"{name} {c} {s}") for c in ("first", "second") for s in ("train", "other")},
    )


def write_place(folder: Path, make_checkpoint: Callable[..., Path]) -> Path:
    """Models and data sets that recipes name, in a folder."""
    for number, name in enumerate(("target", "prior", "ideal", "other")):
        shutil.copytree(make_checkpoint("llama", seed=number, chat=True), folder / name)
    for name in ("forget", "retain", "holdout", "asked", "kept", "OTHER"):
        write_rows(folder / "data" / name, name)
    for number, answers in enumerate(("No.\nNobody knows.\n", "Who knows?\n")):
        (folder / f"answers-{number}.txt").write_text(answers)
    write_tofu(folder / "tofu", TABLES | {name.replace("01", "05"): rows for name, rows in TABLES.items()})
    write_tofu(folder / "tofu-2", {name: rows[1:] for name, rows in TABLES.items()})
    tofu = {(name.replace("01", "10"), "train"): rows for name, rows in TABLES.items()}
    write_data(folder / "both", {**MUSE_ROWS, **tofu})
    write_run(folder / "first", folder)
    return folder


def write_run(run: Path, place: Path) -> None:
    """A finished run on the target, with a vector that no fit made."""
    random, module = np.random.default_rng(0), "model.layers.0.self_attn.q_proj"
    factors = {module: tuple(random.normal(size=shape).astype(np.float32) for shape in ((2, 32), (32, 2)))}
    values = {key: value for key, value in base(place).items() if key != "retain"}
    recipe = Recipe.model_validate(values | {"forget": {"data": values["forget"]["data"], "alpha": 0.5}})
    notes = [f"target: {fetch(str(place / 'target')).revision}"]
    with stage_folder(run / "vectors" / "forget", "vector", {}) as partial:
        Adapter(factors).write(partial / "adapter")  # type: ignore[arg-type]
        for path in (partial / "adapter").iterdir():
            path.rename(partial / path.name)
        (partial / "adapter").rmdir()
        (partial / "rows.jsonl").write_text('{"index": 0, "sha256": "of another row"}\n')
    (run / "recipe.yaml").write_text(recipe_text("run", "msa-lite", recipe, notes))
    (run / "report.json").write_text("{}")


def base(place: Path) -> dict[str, Any]:
    def data(name: str) -> dict[str, Any]:
        return {"path": str(place / "data" / name), "name": "first", "split": "train"}

    return {
        "target": str(place / "target"),
        "prior": str(place / "prior"),
        "forget": {"data": data("forget"), "alpha": [0.5, 1.0]},
        "retain": {"data": data("retain"), "beta": [0.0, 0.5]},
        "vector": {"epochs": 2, "batch_size": 8, "warmup_epochs": 0},
        "evaluate": {"forget": data("asked"), "retain": data("kept"), "holdout": data("holdout"), "limit": 6},
        "output": str(place / "run"),
    }


def changed(recipe: dict[str, Any], changes: Mapping[str, Any], place: Path) -> dict[str, Any]:
    """The recipe with other values at paths; "OTHER" is another data set."""
    made = json.loads(json.dumps(recipe))
    for path, value in changes.items():
        *parts, last = path.split(".")
        inner: Any = made
        for part in parts:
            inner = inner[int(part)] if isinstance(inner, list) else inner.setdefault(part, {})
        inner[last] = str(place / "data/OTHER") if value == "OTHER" else value
    return made


def fill(value: Any, place: Path) -> Any:
    """The value with the folder put in."""
    return json.loads(json.dumps(value).replace("{place}", str(place)))
