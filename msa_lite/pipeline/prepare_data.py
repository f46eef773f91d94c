"""Load the data sets of a recipe, pinned to what they hold now."""

from __future__ import annotations

from msa_lite.data import DataSource, Row, load_rows, pin_source
from msa_lite.errors import Faults, UsageError
from msa_lite.pipeline.prepare_questions import SETS
from msa_lite.recipe import Columns, Data, Recipe

ALTERNATIVES = "baseline.alternatives"


def source_of(data: Data, columns: Columns) -> DataSource:
    """Return a data set of a recipe as stages take it. columns: the recipe's, for a data set that names none."""
    return DataSource(**data.flat(columns))


def load_set(data: Data, columns: Columns) -> tuple[DataSource, list[Row]]:
    """Return a data set of a recipe, pinned, and its rows."""
    source = pin_source(source_of(data, columns))
    return source, load_rows(source)


def load_data(recipe: Recipe, method: str = "msa") -> tuple[dict[str, DataSource], dict[str, list[Row]]]:
    """Return every data set of a run's recipe, pinned, and its rows, by its place in the recipe ("evaluate.holdout").

    Raise all faults of all data sets in one error.
    """
    sets: dict[str, Data | None] = {
        "forget": recipe.forget.data,
        "retain": recipe.retain.data if recipe.retain else None,
        "probe.against": recipe.probe.against,
    }
    if method == "dpo":
        sets[ALTERNATIVES] = recipe.baseline.alternatives
    if recipe.evaluate:
        sets |= {f"evaluate.{name}": getattr(recipe.evaluate, name) for name in SETS}
    faults, sources, rows = Faults(), {}, {}
    for name, data in sets.items():
        if data is None:
            continue
        with faults.gathered(f"{name if '.' in name else f'{name}.data'}: "):
            if name == ALTERNATIVES and data.format != "text":
                raise UsageError("format: must be 'text', with one answer a line")
            sources[name], rows[name] = load_set(data, recipe.columns)
    faults.check()
    return sources, rows
