"""Records of a local file: JSON, CSV or text, in the forms that people have, read with the standard library alone."""

from __future__ import annotations

import csv
import os
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from msa_lite.data.json_rows import json_records, json_values
from msa_lite.data.lines import LONGEST, UTF16, Numbered, row_place, text_lines, whole_text
from msa_lite.errors import DataError
from msa_lite.io.files.reading import open_file

_DELIMITERS = {",": "a comma", ";": "a semicolon", "\t": "a tab", "|": "a |"}


@dataclass(frozen=True)
class FileTable:
    """The records of a file, as a table of `datasets` gives them; a record may lack columns."""

    records: Sequence[dict[str, Any]]
    lines: Sequence[int | None]
    """The line of the file in which each record begins; None where it is not known."""

    @property
    def column_names(self) -> list[str]:
        """Return the columns that any record has, in the order of the file."""
        return list(dict.fromkeys(key for record in self.records for key in record))

    def select_columns(self, names: Collection[str]) -> FileTable:
        """Return the table with these columns alone."""
        return FileTable([{k: v for k, v in record.items() if k in names} for record in self.records], self.lines)

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.records)


def stream_file(path: Path, names: Collection[str] = ()) -> Iterator[Numbered]:
    """Yield the records of a file of `READERS`. Raise DataError, with row and line, on reaching a fault.

    JSON: objects, one after the other; a list of objects or texts; or one object that holds a table (`_open_table`).
    CSV: separated by commas, semicolons, tabs or |. Text: one record. All in UTF-8, or in UTF-16 with its byte order
    mark. names: the columns that rows are read from; an object that has one of them is a row.
    """
    with os.fdopen(open_file(path, DataError), "rb") as stream:
        yield from READERS[path.suffix](path, stream, names)


def load_file(path: Path, names: Collection[str] = ()) -> FileTable:
    """Read all records of a file. Raise as `stream_file`."""
    numbered = list(stream_file(path, names))
    return FileTable([record for _, record in numbered], [line for line, _ in numbered])


def check_file(path: Path, names: Collection[str] = ()) -> None:
    """Raise DataError for a file of a folder that `datasets` cannot read, or would not read as `stream_file` does.

    .parquet: it begins and ends as such. Files of other endings are only checked to be regular files.
    """
    with os.fdopen(open_file(path, DataError), "rb") as stream:
        if path.suffix == ".parquet":
            _check_parquet(path, stream)
        if path.suffix not in READERS:
            return
        if stream.read(2) in UTF16:
            raise _alone(path, "UTF-16", "in UTF-8")
        stream.seek(0)
        reader = READERS[path.suffix]
        count = sum(1 for _ in reader(path, stream, names))
        stream.seek(0)
        if reader is json_records and count != sum(1 for _ in json_values(path, stream)):
            raise _alone(path, "a table in one object", "as .jsonl, an object a row")
        if reader is _read_csv and not (path.parent / "README.md").exists():  # a card may say how to read it
            _, delimiter, _ = _csv_start(text_lines(path, stream), names)
            if delimiter != (usual := "\t" if path.suffix == ".tsv" else ","):
                raise _alone(path, f"CSV with {_DELIMITERS[delimiter]} between cells", f"with {_DELIMITERS[usual]}")


def _alone(path: Path, form: str, way: str) -> DataError:
    return DataError(f"{path}: {form} is not read in a folder; name this file itself as the path, or write it {way}")


def _read_csv(path: Path, stream: BinaryIO, names_of_rows: Collection[str]) -> Iterator[Numbered]:
    csv.field_size_limit(LONGEST)
    lines, delimiter, line = _csv_start(text_lines(path, stream), names_of_rows)
    # Strict: a quote that is never closed would swallow all rows behind it.
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    names: list[str] | None = None
    row, before = 0, line
    try:
        for cells in reader:
            start, line = line + 1, before + reader.line_num
            if not any(cell.strip() for cell in cells):
                continue
            if names is None:
                names = _check_names(path, cells)
                continue
            if len(cells) > len(names):
                raise DataError(
                    f"{path}: {row_place(row, start)}: {len(cells)} cells for {len(names)} columns; write texts that "
                    f"hold {_DELIMITERS[delimiter]} in double quotes"
                )
            yield start, dict(zip(names, cells, strict=False))
            row += 1
    except csv.Error as error:
        raise DataError(
            f"{path}: {row_place(row, line + 1)}: not CSV ({error}); a text that holds double quotes stands in double "
            "quotes, and its own are doubled"
        ) from error


def _check_names(path: Path, names: list[str]) -> list[str]:
    twice = [name for name in dict.fromkeys(names) if name.strip() and names.count(name) > 1]
    if twice:
        raise DataError(f"{path}: the column {', '.join(map(repr, twice))} stands twice; rename one")
    return names


def _csv_start(lines: Iterator[str], names: Collection[str]) -> tuple[Iterator[str], str, int]:
    """Return the lines of a CSV file, its delimiter, and how many lines of it were taken away.

    The delimiter is the one that Excel names in a line of its own (sep=;). Otherwise it is the one that cuts the first
    row into the most cells with these names, or else into the most cells.
    """
    start: list[str] = []
    for text in lines:
        if not start and (named := re.fullmatch(r'"?sep=([,;|\t])"?\s*', text)):
            return lines, named[1], 1
        start.append(text)
        if text.strip():
            break
    cells = {mark: next(csv.reader(start[-1:], delimiter=mark), []) for mark in _DELIMITERS}
    best = max(cells, key=lambda mark: (len(set(names) & set(cells[mark])), len(cells[mark])))
    return chain(start, lines), best, 0


def _read_text(path: Path, stream: BinaryIO, _: Collection[str]) -> Iterator[Numbered]:
    deque(text_lines(path, stream), maxlen=0)  # names the line of a fault
    yield None, {"text": re.sub(r"\r\n?", "\n", whole_text(path))}


def _check_parquet(path: Path, stream: BinaryIO) -> None:
    size, mark = os.fstat(stream.fileno()).st_size, b"PAR1"
    stream.seek(0)
    head = stream.read(4)
    stream.seek(max(0, size - 8))
    length, tail = int.from_bytes(stream.read(4), "little"), stream.read(4)
    if (head, tail) != (mark, mark) or length + 12 > size:
        raise DataError(f"{path}: not a parquet file, or cut off")


READERS: Mapping[str, Callable[[Path, BinaryIO, Collection[str]], Iterator[Numbered]]] = {
    ".jsonl": json_records,
    ".ndjson": json_records,
    ".json": json_records,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".txt": _read_text,
}
"""The reader of each kind of file, by its ending. It takes path, open file and the names of columns of rows."""
