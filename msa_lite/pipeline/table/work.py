"""Make a table: every row that is missing, by this process or beside others; then the comparison in five files."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

from msa_lite.comparison.compare import FORMATS, Comparison, compare
from msa_lite.errors import BusyError, MsaError, StageError, UsageError
from msa_lite.io.console.libraries import require
from msa_lite.io.console.progress import Progress, notices, silent
from msa_lite.io.files.writing import write_json, write_text
from msa_lite.io.finished.seal import locked
from msa_lite.io.launch.crew import Ranks
from msa_lite.pipeline.table.rows import TABLE_FILE, TABLE_HEADER, RunRow, check_table, choose_rows, table_rows
from msa_lite.pipeline.table.small import SMALL_NOTE, Small, shrink
from msa_lite.recipe import TableRecipe, TableSource, dump_recipe, load_table_recipe

logger = logging.getLogger(__name__)

Size = Literal["own", "small"]
_POLL = 5.0  # seconds between two looks at what others make


@dataclass(frozen=True)
class RowEnd:
    """The state of a row once the work has ended."""

    json_keys: ClassVar = {
        "row": "label",
        "state": "state",
        "folder": "folder",
        "seconds": "seconds",
        "error?": "error",
    }

    label: str
    state: Literal["done", "failed", "busy", "left"]
    """busy: another process makes it. left: it was not asked for, or waits for what another process makes."""
    folder: Path
    seconds: float | None = None
    """Of the last run of it, where one has ended."""
    error: str | None = None
    """Why it failed."""


@dataclass(frozen=True)
class TableResult:
    """A table, and how each of its rows stands."""

    json_keys: ClassVar = {"output": "folder", "complete": "is_complete", "rows": "rows", "table": "comparison"}

    folder: Path
    """The folder of the table."""
    rows: Sequence[RowEnd]
    """The trainings, then the rows."""
    comparison: Comparison | None = None
    """The rows that are done side by side; None where other processes are at work, or none is done."""

    @property
    def is_complete(self) -> bool:
        """Check whether every row is done."""
        return not self.of("failed", "busy", "left")

    def of(self, *states: str) -> list[RowEnd]:
        """Return the rows in these states."""
        return [row for row in self.rows if row.state in states]


def open_table(
    source: TableSource, overrides: Iterable[str] = (), size: Size = "own"
) -> tuple[TableRecipe, list[RunRow], Small | None]:
    """Return a table with its rows; for size small, the rows of data to write first, too. Nothing is written."""
    if size == "own":
        table = load_table_recipe(source, overrides)
        return table, table_rows(table), None
    output = load_table_recipe(source).output.rstrip("/")
    small = shrink(load_table_recipe(source, [f"output={json.dumps(f'{output}-small')}", *overrides]))
    return small.table, table_rows(small.table), small


def table(
    source: TableSource,
    overrides: Iterable[str] = (),
    progress: Progress = silent,
    *,
    size: Size = "own",
    only: Sequence[str] = (),
    force: bool = False,
) -> TableResult:
    """Make a table: train its models, run MSA's rows and the baselines, and write the comparison in five formats.

    source: the name of a shipped table, a file, or a mapping. size: "small" makes the same rows with tiny Llamas that
    are trained on the benchmark's own rows. only: labels of rows to make. force: as of `run`.

    Finished rows are kept, and stopped rows are resumed. A row that fails does not stop the others. Several processes
    may make one table: each takes rows that no other process works on. Raise before any work for faults of the table,
    or of its rows' models and data.
    """
    require("train")
    if Ranks.current().count > 1:
        raise UsageError("table: start processes without a launcher, one for each GPU; they divide the rows")
    loaded, rows, small = open_table(source, overrides, size)
    wanted = choose_rows(rows, only)
    if small:
        small.check()
    check_table(loaded, wanted, small.data if small else None)
    loaded.folder.mkdir(parents=True, exist_ok=True)
    with _writing(loaded.folder):
        write_text(loaded.folder / TABLE_FILE, f"{TABLE_HEADER}: as resolved.\n{dump_recipe(loaded)}")
        if small:
            small.write()
    work = _Work(wanted, progress, force)
    work.run()
    ends = [work.end(row) for row in rows]
    result = TableResult(loaded.folder, ends)
    done = [end for row, end in zip(rows, ends, strict=True) if row.kind != "train" and end.state == "done"]
    if result.of("busy") or not done:
        return result
    try:
        comparison = compare([f"{end.label}={end.folder}" for end in done], loaded.published)
    except MsaError as error:
        raise StageError(f"{loaded.folder}: its rows are done, but {error}") from error
    if small:
        comparison = replace(comparison, notes=(SMALL_NOTE, *comparison.notes))
    result = TableResult(loaded.folder, ends, comparison)
    with _writing(loaded.folder):
        for name, form in FORMATS.items():
            write_text(loaded.folder / f"table.{name}", form(comparison))
        write_json(loaded.folder / "table.json", result)
    return result


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Take turns with other processes that write files of the table."""
    from filelock import FileLock

    with FileLock(folder / ".table.lock"):
        yield


@dataclass
class _Work:
    """The rows that this process makes, one after the other."""

    rows: Sequence[RunRow]
    progress: Progress
    force: bool
    failed: dict[str, str] = field(default_factory=dict)
    started: float = field(default_factory=time.time)
    busy: set[str] = field(default_factory=set)

    def run(self) -> None:
        """Make every row that is left and that no other process works at; wait only for what a row is made of."""
        told = False
        while left := [row for row in self.rows if row.label not in self.failed and not row.is_done]:
            made = [row for row in left if self._can_start(row) and self._take(row)]
            blocked = [row for row in left if not self._can_start(row) and row.label not in self.failed]
            if made:
                continue
            if not blocked or not self.busy:
                return
            if not told:
                notices.info("waiting for %s, which other processes make", ", ".join(sorted(self.busy)))
                told = True
            time.sleep(_POLL)

    def _can_start(self, row: RunRow) -> bool:
        """Check whether the models of a row are made. A row whose training failed fails, too."""
        state = row.state
        if state.get("error") and state.get("ended", 0.0) > self.started and state.get("inputs") == row.inputs:
            self.failed.setdefault(row.label, str(state["error"]))  # in another process, meanwhile
        if lost := [label for label in row.needs if label in self.failed]:
            self.failed[row.label] = f"{lost[0]} failed"
            return False
        made = {other.label for other in self.rows if other.is_done}
        return row.label not in self.failed and made.issuperset(row.needs)

    def _take(self, row: RunRow) -> bool:
        """Make a row, unless another process does. Return True where it ended here."""
        self.busy.discard(row.label)
        try:
            with locked(row.place):
                if not row.is_done:
                    self._make(row)
        except BusyError:
            self.busy.add(row.label)
            return False
        return True

    def _make(self, row: RunRow) -> None:
        """Make a row, and write down how it ended. Raise BusyError where another process works in its folder."""
        notices.info("row: %s (%s)", row.label, row.folder)
        start = time.monotonic()
        try:
            row.make(self.progress, self.force)
        except BusyError:
            raise
        except Exception as error:  # whatever it is, it is no reason to leave the other rows
            logger.debug("%s failed", row.label, exc_info=True)
            logger.warning("%s failed: %s", row.label, error)
            self.failed[row.label] = str(error) or type(error).__name__
        row.leave(time.monotonic() - start, self.failed.get(row.label))

    def end(self, row: RunRow) -> RowEnd:
        """Return how a row stands."""
        error, seconds = self.failed.get(row.label), row.state.get("seconds")
        if error is not None:
            return RowEnd(row.label, "failed", row.folder, seconds, error)
        if row.is_done:
            return RowEnd(row.label, "done", row.folder, seconds)
        return RowEnd(row.label, "busy" if row.label in self.busy else "left", row.folder)
