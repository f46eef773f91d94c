"""Checks of the user's data files before a library reads them: some libraries crash or hang on malformed rows.

Files are read line by line, so that large ones take no memory.
"""

from __future__ import annotations

import codecs
import csv
import functools
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from msa_lite.errors import DataError, clip
from msa_lite.io.reading import open_file, parse_json, read_bytes, read_text

_LINE = 256 << 20  # bytes of a row
_WHOLE = 1 << 30  # bytes of a JSON list, which memory must hold
_CHUNK = 1 << 20
_BLANK = b" \t\r\n"
_FLAT = 50  # a row with at most this many brackets cannot be nested too deep
_SHOWN = 40  # characters of a row to show in a message
_PARQUET = b"PAR1"


def check_file(path: Path) -> None:
    """Raise DataError, with the row's number, for a file whose content does not match its ending.

    .jsonl, .json: objects, one after the other, or a list of objects or texts. .csv, .txt: UTF-8 text without zero
    bytes. .parquet: it begins and ends as such. Others are only checked to be regular files.
    """
    kind = path.suffix
    with os.fdopen(open_file(path, DataError), "rb") as stream:
        if kind in (".json", ".jsonl"):
            _check_json(path, stream)
        elif kind in (".csv", ".txt"):
            _check_text(path, stream)
        elif kind == ".parquet":
            _check_parquet(path, stream)


def csv_columns(path: Path) -> list[str]:
    """Return the names in the first row of a CSV file.

    Raise DataError where the row after it has more cells, as with a comma in a text without quotes: pandas would take
    the first cell for a row number and shift the others by a column.
    """
    csv.field_size_limit(_LINE)
    with open(path, encoding="utf-8-sig", newline="") as stream:
        try:
            rows = (row for row in csv.reader(stream) if any(cell.strip() for cell in row))
            names, first = next(rows, []), next(rows, [])
        except csv.Error as error:
            raise DataError(f"{path}: not CSV ({error})") from error
    if len(first) > len(names):
        raise DataError(
            f"{path}: row 0: {len(first)} cells for {len(names)} columns; write texts that hold commas in double quotes"
        )
    return names


def check_folder(folder: Path) -> None:
    """Check the data files below a folder, as `check_file` does, and that its README.md has no YAML aliases."""
    for path in sorted(folder.rglob("*")):
        if not path.is_dir() and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            state = path.stat() if path.exists() else None
            _check_once(path, (state.st_size, state.st_mtime_ns) if state else None)
    if (folder / "README.md").exists():
        _check_card(folder / "README.md")


@functools.lru_cache(maxsize=1024)  # a benchmark loads one folder many times
def _check_once(path: Path, state: tuple[int, int] | None) -> None:
    check_file(path)


def _check_json(path: Path, stream: BinaryIO) -> None:
    start = _first(stream)
    if start == b"[":
        rows = parse_json(read_bytes(path, _WHOLE, DataError), str(path), DataError)
        kinds = {dict} if any(isinstance(row, dict) for row in rows) else {str}
        for row, value in enumerate(rows):
            if type(value) not in kinds:
                raise _no_row(path, row, json.dumps(value))
        return
    row = 0
    for line in _lines(path, stream):
        if line.strip(_BLANK):
            try:
                value = _parse(line, path, row)
            except DataError as error:
                if not line.lstrip().startswith(b"{") or isinstance(error.__cause__, UnicodeError):
                    raise
                _check_spread(path)
                return
            if not isinstance(value, dict):
                raise _no_row(path, row, line.decode(errors="replace"))
            row += 1


def _parse(line: bytes, path: Path, row: int) -> Any:
    """Parse a row as `parse_json` does, several times faster when it has neither escapes nor deep nesting."""
    if line.startswith(b"{") and b"\\u" not in line and line.count(b"[") + line.count(b"{") <= _FLAT:
        with suppress(ValueError):
            return json.loads(line.decode())
    return parse_json(line, f"{path}: row {row}", DataError)


def _check_spread(path: Path) -> None:
    """Check a file of objects that go over several lines."""
    for row, (value, text) in enumerate(_values(path, read_text(path, _WHOLE, DataError))):
        parse_json(text, f"{path}: row {row}", DataError)
        if not isinstance(value, dict):
            raise _no_row(path, row, text)


def _values(path: Path, text: str) -> Iterator[tuple[Any, str]]:
    """Yield the JSON values that stand one after the other in a text, each with its part of the text."""
    decoder, place, row = json.JSONDecoder(), 0, 0
    while place < len(text):
        try:
            value, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: row {row}: not JSON ({error})") from error
        yield value, text[place:end]
        place, row = end, row + 1
        while place < len(text) and text[place].isspace():
            place += 1


def read_raw_rows(path: Path) -> list[dict[str, Any]] | None:
    """Read the objects of a checked JSON file; return None for a file above a gigabyte."""
    if path.stat().st_size > _WHOLE:
        return None
    text = read_text(path, _WHOLE, DataError).strip()
    return list(json.loads(text)) if text.startswith("[") else [value for value, _ in _values(path, text)]


def _no_row(path: Path, row: int, text: str) -> DataError:
    start = clip(text.strip(), _SHOWN)
    return DataError(f'{path}: row {row}: {start} is no row; a row is an object, as in {{"question": …, "answer": …}}')


def _first(stream: BinaryIO) -> bytes:
    """Return the first character of a file after any byte order mark, and go back to the beginning."""
    head = stream.read(_CHUNK).removeprefix(codecs.BOM_UTF8).lstrip(_BLANK)[:1]
    stream.seek(0)
    return head


def _lines(path: Path, stream: BinaryIO) -> Iterator[bytes]:
    number = 0
    while line := stream.readline(_LINE):
        if len(line) == _LINE:
            raise DataError(f"{path}: row {number}: longer than {_LINE >> 20} MB; divide it into several rows")
        yield line
        number += 1


def _check_text(path: Path, stream: BinaryIO) -> None:
    decoder, line = codecs.getincrementaldecoder("utf-8")(), 1
    while True:
        chunk = stream.read(_CHUNK)
        if b"\0" in chunk:
            line += chunk[: chunk.index(b"\0")].count(b"\n")
            raise DataError(f"{path}: line {line}: a zero byte, which no text has")
        try:
            decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            line += chunk[: error.start].count(b"\n")
            raise DataError(f"{path}: line {line}: not UTF-8 text ({error.reason})") from error
        if not chunk:
            return
        line += chunk.count(b"\n")


def _check_parquet(path: Path, stream: BinaryIO) -> None:
    size = os.fstat(stream.fileno()).st_size
    head = stream.read(4)
    stream.seek(max(0, size - 8))
    length, tail = int.from_bytes(stream.read(4), "little"), stream.read(4)
    if (head, tail) != (_PARQUET, _PARQUET) or length + 12 > size:
        raise DataError(f"{path}: not a parquet file, or cut off")


def _check_card(path: Path) -> None:
    """Raise DataError for a data card with YAML aliases: a few lines of them may expand to gigabytes."""
    import yaml

    text = read_bytes(path, kind=DataError).decode("utf-8", errors="replace")
    block = text.removeprefix("---\n").partition("\n---")[0] if text.startswith("---\n") else ""
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(block, yaml.SafeLoader)):
            raise DataError(f"{path}: YAML aliases in its head; write the values out")
    except (yaml.YAMLError, RecursionError) as error:
        raise DataError(f"{path}: its head is no YAML ({' '.join(str(error).split())})") from error
