"""Load the tables of a benchmark's data set, and name everything that it lacks in one error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msa_lite.data import DataSource, load_table, pin_source, sample_rows
from msa_lite.data.forms import cell_text
from msa_lite.data.messages import Unreadable
from msa_lite.data.sources import RecordTable, configurations
from msa_lite.errors import DataError, MsaError, join_faults
from msa_lite.evals.benchmarks.benchmark import BenchmarkSettings
from msa_lite.io.files.addresses import read_address
from msa_lite.io.files.reading import local_path

Table = list[dict[str, Any]]
"""Rows with texts in the columns that their part names, "" for null, and lists of texts in its `lists`."""


@dataclass(frozen=True)
class Part:
    """One table of a data set."""

    configuration: str
    """The configuration of the data set."""
    columns: tuple[str, ...]
    """The columns that are needed."""
    split: str | None = None
    """The split; None where there is one."""
    optional: bool = False
    """True where the table may be absent."""
    lists: tuple[str, ...] = ()
    """The columns, of those that are needed, that hold lists of texts."""
    extra: tuple[str, ...] = ()
    """Columns that may be absent; then each row has "" there."""


def load_parts(data: str, parts: Mapping[str, Part]) -> dict[str, Table]:
    """Return the rows of each part by name, without the optional parts that are absent.

    data: a folder in Hub layout, or Hub id[@revision]. Raise DataError that names everything that is missing, and every
    cell that is no text; UsageError when there is no such data set.
    """
    path, revision = split_revision(data)
    source = pin_source(DataSource(path, revision=revision))
    there = configurations(source)
    tables, faults = {}, []
    for name, part in parts.items():
        label = f"configuration '{part.configuration}'"
        if there and part.configuration not in there:
            if not part.optional:
                faults.append(f"no {label}")
            continue
        try:
            table = load_table(DataSource(path, name=part.configuration, split=part.split, revision=source.revision))
        except MsaError as error:
            if not there:
                if part.optional:
                    continue
                raise
            faults.append(f"{label}: {str(error).removeprefix(f'{path}: ')}")
            continue
        lacking = [column for column in part.columns if column not in table.column_names]
        if lacking:
            faults.append(f"{label}: no column {', '.join(map(repr, lacking))}")
        elif not len(table):
            faults.append(f"{label}: no rows")
        else:
            tables[name], unreadable = _read_texts(table, part)
            faults += [f"{label}: {fault}" for fault in unreadable]
    if faults:
        names = f"; there are {', '.join(there)}" if there else ""
        raise DataError(join_faults(f"{path}: not the data set that is needed{names}", dict.fromkeys(faults), limit=20))
    return tables


def _read_texts(table: RecordTable, part: Part) -> tuple[Table, list[str]]:
    """Return the rows of a part, and the places of cells that are no text."""
    rows, faults = [], []
    for row, (record, place) in enumerate(zip(table.records, table.places, strict=True)):
        try:
            rows.append(record | {column: _read_cell(record, column, part) for column in (*part.columns, *part.extra)})
        except Unreadable as error:
            faults.append(f"{place.of_row(row)}, {error}")
    return rows, faults


def _read_cell(record: Mapping[str, Any], column: str, part: Part) -> str | list[str]:
    cell, where = record.get(column), f"column '{column}'"
    if column not in part.lists:
        return cell_text(cell, where, may_be_empty=True)
    if not isinstance(cell, list | None):
        raise Unreadable(f"{where}: {cell!r} is no list of texts")
    return [cell_text(item, f"{where}, item {i}", may_be_empty=True) for i, item in enumerate(cell or [])]


def split_revision(data: str) -> tuple[str, str | None]:
    """Return (path, revision) of a folder or Hub id[@revision]."""
    if local_path(data).exists():
        return data, None
    if address := read_address(data, "dataset"):
        return address.repo, address.revision
    path, _, revision = data.partition("@")
    return path, revision or None


def pinned_data(data: str) -> str:
    """Return a folder as it is, or a Hub id with the commit that `pin_source` finds."""
    path, revision = split_revision(data)
    pinned = pin_source(DataSource(path, revision=revision)).revision
    return f"{path}@{pinned}" if pinned else data


def sampled(table: Table, settings: BenchmarkSettings) -> list[tuple[int, dict[str, Any]]]:
    """Return (row number, row) of all rows, or of a seeded sample of `limit`, in the table's order."""
    return sample_rows([*enumerate(table)], settings.limit or len(table), settings.seed)
