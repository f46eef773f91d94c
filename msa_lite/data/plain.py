"""Read rows of files with the standard library alone: a plain installation has no `datasets`."""

from __future__ import annotations

import csv
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from msa_lite.data.rows import Row, find_form, load_rows, parse_rows
from msa_lite.data.sources import DataSource, check_file, csv_columns, read_raw_rows
from msa_lite.errors import DataError, UsageError
from msa_lite.io.console.libraries import require
from msa_lite.io.files.reading import local_path, read_text

_WHOLE = 1 << 30  # bytes, which memory must hold


def read_any_rows(name: str, source: DataSource) -> list[Row]:
    """Read the rows of a file by the columns of a source, or by the usual ones; a column of questions alone will do.

    name: a .jsonl, .json, .csv or .txt file; with the extra `train` also a folder or .parquet file. Raise UsageError or
    DataError as `load_rows`.
    """
    source = replace(source, path=name, name=None, split=None, revision=None)
    path = local_path(name)
    if not path.exists():
        raise UsageError(f"{path}: no such file")
    reader = _READERS.get(path.suffix)
    if reader is None or path.is_dir():
        require("train", f"{path}: only .jsonl, .json, .csv and .txt files are read without `datasets`")
        return load_rows(source)
    check_file(path)
    records = reader(path)
    if not records:
        raise DataError(f"{path}: the data set is empty")
    columns = list(dict.fromkeys(key for record in records for key in record))
    records = [dict.fromkeys(columns) | record for record in records]
    forms = [source, DataSource(name), DataSource(name, "text")]
    form = next((form for form in forms if _fits(form, columns)), None)
    if form is None and (column := next((form.question for form in forms if form.question in columns), None)):
        return [Row(i, question=str(record[column] or "")) for i, record in enumerate(records)]
    if form is None:
        known = f"{source.question} and {source.answer}" if source.format == "qa" else source.text
        raise DataError(f"{path}: has the columns {', '.join(columns)}; call those with the rows {known}")
    return parse_rows(form, columns, records)


def _fits(source: DataSource, columns: Collection[str]) -> bool:
    return find_form(source, columns) is not None if source.format == "qa" else source.text in columns


def _read_json(path: Path) -> list[dict[str, Any]]:
    rows = read_raw_rows(path)
    if rows is None:
        raise DataError(f"{path}: above a gigabyte; divide it into several files")
    return [row if isinstance(row, dict) else {"text": row} for row in rows]


def _read_csv(path: Path) -> list[dict[str, Any]]:
    names = csv_columns(path)
    with open(path, encoding="utf-8-sig", newline="") as stream:
        rows = [row for row in csv.reader(stream) if any(cell.strip() for cell in row)]
    return [dict(zip(names, row, strict=False)) for row in rows[1:]]


_READERS: Mapping[str, Callable[[Path], list[dict[str, Any]]]] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": _read_csv,
    ".txt": lambda path: [{"text": read_text(path, _WHOLE, DataError)}],
}
