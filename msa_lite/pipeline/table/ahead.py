"""Tell what a table would do: the state of each row. Nothing is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from msa_lite.errors import MsaError
from msa_lite.pipeline.stages.stage import State
from msa_lite.pipeline.table.rows import RunRow, check_table, choose_rows
from msa_lite.pipeline.table.work import Size, open_table
from msa_lite.recipe import TableSource
from msa_lite.report.formats import Cell, Section, TextTable


@dataclass(frozen=True)
class RowAhead:
    """The work that a table would do for a row."""

    json_keys: ClassVar = {"row": "label", "state": "state", "folder": "folder"}

    label: str
    state: State
    folder: Path


@dataclass(frozen=True)
class TableAhead:
    """The work that a table would do."""

    json_keys: ClassVar = {"output": "folder", "rows": "rows", "notes": "notes"}

    folder: Path
    rows: Sequence[RowAhead]
    notes: Sequence[str] = ()


def look_at_table(
    source: TableSource, overrides: Iterable[str] = (), *, size: Size = "own", only: Sequence[str] = ()
) -> TableAhead:
    """Return what `table` would do. Nothing is downloaded.

    Raise as `table` where the table is at fault; models and data that are not here are notes.
    """
    loaded, rows, small = open_table(source, overrides, size)
    wanted, notes = choose_rows(rows, only), []
    try:
        check_table(loaded, wanted, small.data if small else None)
    except MsaError as error:
        notes.append(f"the table would be refused now: {error}")
    return TableAhead(loaded.folder, [RowAhead(row.label, _state(row), row.folder) for row in wanted], notes)


def _state(row: RunRow) -> State:
    if row.is_done:
        return "done"
    return "anew" if row.state.get("inputs") not in (None, row.inputs) else "to do"


def ahead_table(ahead: TableAhead) -> TextTable:
    """Return the rows with their states, as a table."""
    rows = [[Cell(row.label), Cell(row.state), Cell(str(row.folder))] for row in ahead.rows]
    return TextTable(
        ["row", "state", "folder"], [Section(rows)], f"what would be done in {ahead.folder}", ahead.notes, left=3
    )
