"""Make a table: every row that is missing, one after the other; then the comparison in five files."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from msa_lite.comparison.compare import FORMATS, Comparison, compare
from msa_lite.errors import MsaError, StageError, UsageError
from msa_lite.io.console.libraries import require
from msa_lite.io.console.progress import Progress, notices, silent
from msa_lite.io.files.writing import write_json, write_text
from msa_lite.io.launch.crew import Ranks
from msa_lite.pipeline.prepare.run import Context, msa_scope
from msa_lite.pipeline.prepare.sending import going_out
from msa_lite.pipeline.table.rows import TABLE_FILE, TABLE_HEADER, RunRow, check_table, choose_rows, table_rows
from msa_lite.recipe import Recipe, TableSource, dump_recipe, load_table_recipe

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowState:
    """The state of a row: in a dry run what would be done, else how it ended."""

    json_keys: ClassVar = {
        "row": "label", "state": "state", "folder": "folder", "seconds": "seconds", "error?": "error",
    }  # fmt: skip

    label: str
    state: Literal["done", "to do", "anew", "failed", "left"]
    """anew: it was made of another recipe. left: it was not asked for, or is another job's."""
    folder: Path
    seconds: float | None = None
    """Of the last run of it, where one has ended."""
    error: str | None = None
    """Why it failed."""


@dataclass(frozen=True)
class TableResult:
    """A table, and how each of its rows stands."""

    json_keys: ClassVar = {
        "output": "folder", "complete": "is_complete", "rows": "rows", "tables": "comparisons",
        "notes": "notes",
    }  # fmt: skip

    folder: Path
    """The folder of the table."""
    rows: Sequence[RowState]
    """The trainings, then the rows."""
    comparisons: Mapping[str, Comparison] = field(default_factory=dict)
    """The rows that are done side by side, by the name of their files: table; with seeds a table each, since every seed
    leaves other rows to score."""
    notes: Sequence[str] = ()
    """What a dry run has found that a table would be refused for."""

    @property
    def is_complete(self) -> bool:
        """Check whether every row is done."""
        return all(row.state == "done" for row in self.rows)

    def of(self, state: str) -> list[RowState]:
        """Return the rows in a state."""
        return [row for row in self.rows if row.state == state]


def look_at_table(source: TableSource, overrides: Iterable[str] = (), *, only: Sequence[str] = ()) -> TableResult:
    """Return what `table` would do. Nothing is written; models and data that are not here are notes."""
    loaded = load_table_recipe(source, overrides)
    wanted = choose_rows(table_rows(loaded), only)
    notes: list[str] = []
    try:
        notes += _going_out(wanted)
        check_table(loaded, wanted)
    except MsaError as error:
        notes.append(f"the table would be refused now: {error}")
    return TableResult(loaded.folder, [_state(row) for row in wanted], notes=notes)


def _going_out(rows: Sequence[RunRow]) -> list[str]:
    """Return what the rows send to other machines, each sentence once."""
    recipes = [row.recipe for row in rows if isinstance(row.recipe, Recipe)]
    told = [line for recipe in recipes for line in going_out(Context(recipe, msa_scope(recipe)), scores=True)]
    return list(dict.fromkeys(told))


def _state(row: RunRow) -> RowState:
    """Return what is to be done for a row."""
    known = row.state
    state: Literal["done", "to do", "anew"] = "to do" if known.get("inputs") in (None, row.inputs) else "anew"
    return RowState(row.label, "done" if row.is_done else state, row.folder, known.get("seconds"))


def table(
    source: TableSource,
    overrides: Iterable[str] = (),
    progress: Progress = silent,
    *,
    only: Sequence[str] = (),
    force: bool = False,
) -> TableResult:
    """Make a table: train its models, run MSA's rows and the baselines, and write the comparison in five formats.

    source: the name of a shipped table, a file, or a mapping. only: labels of rows to make. force: as of `run`.

    Finished rows are kept, and stopped rows are resumed. A row that fails does not stop the others. A job of a Slurm
    array makes every n-th row, with the trainings that it needs. Raise before any work for faults of the table, or of
    its rows' models and data.
    """
    from filelock import FileLock

    require("train")
    if Ranks.current().count > 1:
        raise UsageError("table: start it without a launcher; the jobs of a Slurm array divide its rows")
    loaded = load_table_recipe(source, overrides)
    rows = table_rows(loaded)
    wanted = choose_rows(rows, only)
    check_table(loaded, wanted)
    for line in _going_out(wanted):
        notices.info("%s", line)
    loaded.folder.mkdir(parents=True, exist_ok=True)
    turn = FileLock(loaded.folder / ".table.lock")  # of the jobs that write files of the table
    with turn:
        write_text(loaded.folder / TABLE_FILE, f"{TABLE_HEADER}: as resolved.\n{dump_recipe(loaded)}")
    failed = _make_rows(_share(wanted), progress, force)
    ends = [_end(row, failed.get(row.label)) for row in rows]
    done: dict[str, list[str]] = {}
    for row, end in zip(rows, ends, strict=True):
        if isinstance(row.recipe, Recipe) and end.state == "done":
            name = f"table-seed-{row.recipe.seed}" if len(loaded.seeds) > 1 else "table"
            done.setdefault(name, []).append(f"{end.label}={end.folder}")
    try:
        comparisons = {name: compare(paths, loaded.published) for name, paths in done.items()}
    except MsaError as error:
        raise StageError(f"{loaded.folder}: its rows are done, but {error}") from error
    result = TableResult(loaded.folder, ends, comparisons)
    with turn:
        for name, comparison in comparisons.items():
            for ending, form in FORMATS.items():
                write_text(loaded.folder / f"{name}.{ending}", form(comparison))
        write_json(loaded.folder / "table.json", result)
    return result


def _share(rows: Sequence[RunRow]) -> list[RunRow]:
    """Return the rows of this job of a Slurm array; all without one."""
    first, step, count = (int(os.environ.get(f"SLURM_ARRAY_TASK_{name}", 1)) for name in ("MIN", "STEP", "COUNT"))
    number = (int(os.environ.get("SLURM_ARRAY_TASK_ID", first)) - first) // step
    mine = [row for row in rows if row.kind != "train"][number::count]
    if count > 1:
        notices.info("job %d of %d makes %s", number + 1, count, ", ".join(row.label for row in mine) or "no row")
    return choose_rows(rows, [row.label for row in mine]) if mine else []


def _make_rows(rows: Sequence[RunRow], progress: Progress, force: bool) -> dict[str, str]:
    """Make every row that is not done; return those that failed, with reasons."""
    from filelock import FileLock

    failed: dict[str, str] = {}
    for row in rows:
        if lost := [label for label in row.needs if label in failed]:
            failed[row.label] = f"{lost[0]} failed"
            continue
        row.place.mkdir(parents=True, exist_ok=True)
        with FileLock(row.place / ".lock"):  # a training may be what two jobs need
            if row.is_done:
                continue
            notices.info("row: %s (%s)", row.label, row.folder)
            start = time.monotonic()
            try:
                row.make(progress, force)
            except Exception as error:  # whatever it is, it is no reason to leave the other rows
                logger.debug("%s failed", row.label, exc_info=True)
                logger.warning("%s failed: %s", row.label, error)
                failed[row.label] = str(error) or type(error).__name__
            row.leave(time.monotonic() - start, failed.get(row.label))
    return failed


def _end(row: RunRow, error: str | None) -> RowState:
    """Return how a row stands."""
    state: Literal["done", "failed", "left"] = "failed" if error else "done" if row.is_done else "left"
    return RowState(row.label, state, row.folder, row.state.get("seconds"), error)
