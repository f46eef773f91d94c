"""Tell what a table would do: the state of each row, its time, disk and price. Nothing is written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from msa_lite.budget.speed import this_device
from msa_lite.errors import MsaError
from msa_lite.io.console.progress import readable, time_span
from msa_lite.io.files.reading import local_path
from msa_lite.pipeline.prepare.run import Context
from msa_lite.pipeline.staged.plan import find_training_facts, training_stages
from msa_lite.pipeline.stages.facts import ABSENT, find_facts
from msa_lite.pipeline.stages.forecast import forecast
from msa_lite.pipeline.stages.machine import Machine
from msa_lite.pipeline.stages.stage import State
from msa_lite.pipeline.table.rows import RunRow, check_table, choose_rows
from msa_lite.pipeline.table.work import Size, open_table
from msa_lite.pipeline.verbs.lists import find_verb
from msa_lite.pipeline.verbs.plan import device_of
from msa_lite.recipe import Recipe, TableSource, TrainingRecipe
from msa_lite.report.formats import Cell, Section, TextTable

UNKNOWN = "not known"
UNTRAINED = "if the table trains a row's models first, the row's time and disk are not known yet"


Span = tuple[float, float]
"""The lowest and the highest estimate."""


def _sum(spans: Iterable[Span | None]) -> Span | None:
    """Return the sum of the spans that are known; None where none is."""
    known = [span for span in spans if span]
    return (math.fsum(low for low, _ in known), math.fsum(high for _, high in known)) if known else None


@dataclass(frozen=True)
class RowAhead:
    """The work that a table would do for a row."""

    json_keys: ClassVar = {
        "row": "label", "state": "state", "folder": "folder", "seconds": "seconds", "unknown?": "unknown",
        "disk": "disk", "notes": "notes",
    }  # fmt: skip

    label: str
    state: State
    folder: Path
    seconds: Span | None = None
    """The time of the stages whose time is known; None where none is."""
    unknown: int = 0
    """The number of stages whose time is not known."""
    kept: int | None = None
    """Bytes that it leaves on disk; None where they are not known."""
    running: int = 0
    """Bytes that it writes beside these, and removes again."""
    notes: Sequence[str] = ()
    """Remarks, one line each."""

    @property
    def disk(self) -> int | None:
        """Return the most bytes that it takes at a time; None where they are not known."""
        return None if self.kept is None else self.kept + self.running


@dataclass(frozen=True)
class TableAhead:
    """The work that a table would do."""

    json_keys: ClassVar = {
        "output": "folder", "rows": "rows", "seconds": "seconds", "disk": "disk", "price": "price", "notes": "notes",
    }  # fmt: skip

    folder: Path
    rows: Sequence[RowAhead]
    price_per_hour: float | None = None
    notes: Sequence[str] = ()

    @property
    def left(self) -> list[RowAhead]:
        """Return the rows that are not done."""
        return [row for row in self.rows if row.state != "done"]

    @property
    def seconds(self) -> Span | None:
        """Return the time of what is left, as far as it is known; None where none is."""
        return _sum(row.seconds for row in self.left)

    @property
    def disk(self) -> int:
        """Return the most bytes that what is left takes, one row after the other, as far as they are known."""
        return sum(row.kept or 0 for row in self.left) + max((row.running for row in self.left), default=0)

    @property
    def price(self) -> Span | None:
        """Return the price of the known time; None without the price of an hour."""
        if self.price_per_hour is None or self.seconds is None:
            return None
        return self.seconds[0] / 3600 * self.price_per_hour, self.seconds[1] / 3600 * self.price_per_hour


def look_at_table(
    source: TableSource,
    overrides: Iterable[str] = (),
    *,
    size: Size = "own",
    only: Sequence[str] = (),
    gpu: str | int | None = None,
    price_per_hour: float | None = None,
) -> TableAhead:
    """Return what `table` would do. Models are read by their headers; no weights are downloaded.

    gpu: the memory of a GPU, such as "80GB", in the place of this machine's device. price_per_hour: of that device.

    Raise as `table` where the table is at fault; models and data that are not here are notes.
    """
    loaded, rows, small = open_table(source, overrides, size)
    wanted = choose_rows(rows, only)
    notes = []
    try:
        check_table(loaded, wanted, small.data if small else None)
    except MsaError as error:
        notes.append(f"the table would be refused now: {error}")
    starts = {row.folder.resolve(): row.recipe.model for row in wanted if isinstance(row.recipe, TrainingRecipe)}
    machine = Machine(this_device() if gpu is None else device_of(gpu))
    ahead = [_look(row, starts, machine) for row in wanted]
    notes += _gathered(note for row in ahead for note in row.notes)
    return TableAhead(loaded.folder, ahead, price_per_hour, notes)


def _gathered(notes: Iterable[str]) -> list[str]:
    """Return each note once; rows that name other models with the same sizes have one note for all of them."""
    gathered: dict[str, dict[str, None]] = {}
    for note in notes:
        models, sign, lender = note.partition(ABSENT)
        names = [model.partition(" ")[2] for model in models.split(", ")]  # without their roles
        gathered.setdefault(sign + lender, {}).update(dict.fromkeys(names if sign else [note]))
    own = gathered.pop("", {})
    return [f"{', '.join(models)}{rest}" for rest, models in gathered.items()] + [*own]


def _look(row: RunRow, starts: Mapping[Path, Any], machine: Machine) -> RowAhead:
    """Return what the table would do with a row. starts: the models that trainings go on from, by their folders."""
    if row.is_done:
        return RowAhead(row.label, "done", row.folder, (0.0, 0.0), kept=0)
    state: State = "anew" if row.state.get("inputs") not in (None, row.inputs) else "to do"
    recipe = row.recipe
    try:
        if isinstance(recipe, TrainingRecipe):
            stages, facts = training_stages(recipe), find_training_facts(recipe)
        else:
            verb = find_verb("run", recipe) if row.kind == "msa" else find_verb("baseline", recipe, row.kind)
            stages, facts = verb.stages(Context(recipe, verb.scope)), find_facts(_with_starts(recipe, starts))
    except MsaError as error:
        note = UNTRAINED if row.needs else str(error).splitlines()[0].rstrip(":")
        return RowAhead(row.label, state, row.folder, unknown=1, notes=[note])
    plan = forecast(stages, facts, machine, row.folder)
    costs = [cost for stage in stages for cost in stage.cost(facts, machine)]
    unknown = sum(not cost.seconds for cost in costs)
    kept = sum(size for cost in costs for size in cost.disk.values()) + facts.written_out
    running = max((sum(cost.while_running.values()) for cost in costs), default=0)
    seconds = _sum(cost.seconds for cost in costs)
    return RowAhead(row.label, state, row.folder, seconds, unknown, kept, running, plan.notes)


def _with_starts(recipe: Recipe, starts: Mapping[Path, Any]) -> Recipe:
    """Return a recipe with models that are as large in the place of those that are not trained yet."""

    def start(name: str | None) -> str | None:
        place = local_path(name) if name else None
        model = None if place is None or place.exists() else starts.get(place.parent.resolve())
        return model if isinstance(model, str) else name

    evaluate = recipe.evaluate and recipe.evaluate.model_copy(update={"ideal": start(recipe.evaluate.ideal)})
    changes = {"target": start(recipe.target), "prior": start(recipe.prior), "evaluate": evaluate}
    return recipe.model_copy(update=changes)


def ahead_table(ahead: TableAhead) -> TextTable:
    """Return the rows with their states, as a table."""
    rows = [[Cell(text) for text in _cells(row)] for row in ahead.rows]
    title = f"what would be done in {ahead.folder}"
    return TextTable(["row", "state", "time", "disk"], [Section(rows)], title, ahead.notes, left=2)


def _cells(row: RowAhead) -> list[str]:
    if row.state == "done":
        return [row.label, row.state, "–", "–"]
    time = UNKNOWN if row.seconds is None else time_span(row.seconds) + f" + {UNKNOWN}" * (row.unknown > 0)
    return [row.label, row.state, time, UNKNOWN if row.disk is None else readable(row.disk)]


def ahead_lines(ahead: TableAhead) -> Iterator[str]:
    """Yield the lines below the table: all that is left, its time, disk and price."""
    unknown = sum(row.unknown > 0 for row in ahead.left)
    more = f"; in {unknown} rows the time of some stages is {UNKNOWN}" if unknown else ""
    yield f"left:    {len(ahead.left)} of {len(ahead.rows)} rows and trainings"
    yield f"time:    {UNKNOWN if ahead.seconds is None else time_span(ahead.seconds)}{more}"
    yield f"disk:    {readable(ahead.disk)}, and what is downloaded"
    if ahead.price_per_hour is not None:
        price = "{:.2f} to {:.2f}".format(*ahead.price) if ahead.price else UNKNOWN
        yield f"price:   {price}{', without these stages' if ahead.price and unknown else ''}"
