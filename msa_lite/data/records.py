"""Records of a file: JSON, CSV, text or Parquet, read one after the other, so that no reader guesses their types."""

from __future__ import annotations

import codecs
import csv
import io
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from msa_lite.errors import DataError, MsaError, clip
from msa_lite.io.console.libraries import require
from msa_lite.io.files.reading import check_json, open_file, parse_json, printable

Numbered = tuple[int | None, dict[str, Any]]
"""A record with the line of the file in which it begins, None where it is not known."""
Lines = Iterator[tuple[int, bytes]]

READ_ALONE = "only .jsonl, .json, .csv and .txt files are read without `datasets`"

_LONGEST = 256 << 20  # bytes of a line
_WHOLE_FILE = 1 << 30  # bytes of a JSON list or a text, which memory must hold
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_BLANK = b" \t\r\n"
_FLAT = 50  # a row with at most this many brackets cannot be nested too deep
_SHOWN = 40  # characters of a row to show in a message
_DIGITS = 4000  # of a whole number; Python reads no more than 4300
_DELIMITERS = {",": "a comma", ";": "a semicolon", "\t": "a tab", "|": "a |"}
_PACKED = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
_CONVERT = "save it as UTF-8, as with `iconv -f {} -t UTF-8 OLD > NEW`"


class WrittenNumber(float):
    """A number of JSON, with the text by which it stands in its file."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> WrittenNumber:
        """Make a number of its text."""
        number = super().__new__(cls, text)
        number.text = text
        return number

    def __repr__(self) -> str:
        return self.text


def _whole_number(text: str) -> int | WrittenNumber:
    return WrittenNumber(text) if text == "-0" or len(text) > _DIGITS else int(text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice")
    return dict(pairs)


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=WrittenNumber, parse_int=_whole_number)


def ending_of(path: PurePosixPath | Path) -> str:
    """Return the ending by which a file's reader is chosen, without that of a compression."""
    return Path(path.stem).suffix if path.suffix in _PACKED else path.suffix


def row_place(row: int, line: int | None) -> str:
    """Return where a row stands, for messages: by its number, counted from 0, and the line of its file."""
    return f"row {row}" if line is None else f"row {row} (line {line})"


def stream_file(path: Path | str, names: Collection[str] = ()) -> Iterator[Numbered]:
    """Yield the records of a file of `READERS`. Raise DataError, with row and line, on reaching a fault.

    JSON: objects, one after the other; a list of objects or texts; or one object that holds a table (`_open_table`).
    CSV: separated by commas, semicolons, tabs or |; cells are text. Text: one record. All of them in UTF-8. Parquet:
    values as pyarrow gives them. `read_cell` says which values are text.

    path: a file of this machine, or the address of one that `fsspec` opens. names: the columns that rows are read from;
    an object that has one of them is a row.
    """
    try:
        with _opened(path) as stream:
            yield from READERS[ending_of(PurePosixPath(path))](printable(path), stream, names)
    except MsaError:
        raise
    except Exception as error:  # of decompression, of pyarrow, of the network
        raise DataError(f"{printable(path)}: cannot be read ({' '.join(str(error).split()) or error!r})") from error


@contextmanager
def _opened(path: Path | str) -> Iterator[BinaryIO]:
    packing = _PACKED.get(PurePosixPath(path).suffix)
    if isinstance(path, Path):
        raw = cast(BinaryIO, os.fdopen(open_file(path, DataError), "rb"))
    else:
        import fsspec

        raw = cast(BinaryIO, io.BufferedReader(fsspec.open(path, "rb").open()))  # its own cannot limit a line
    with raw:
        if packing is None:
            yield raw
            return
        from fsspec.compression import compr

        yield compr[packing](raw, mode="rb")


def _lines(path: str, stream: BinaryIO) -> Lines:
    """Yield the lines of a file with their numbers, without a byte order mark. Raise DataError for UTF-16."""
    for number, line in enumerate(iter(lambda: stream.readline(_LONGEST), b""), start=1):
        if number == 1 and line.startswith(_UTF16):
            raise DataError(f"{path}: is UTF-16, which is not read; {_CONVERT.format('UTF-16')}")
        if len(line) >= _LONGEST:
            raise DataError(f"{path}: line {number}: longer than {_LONGEST >> 20} MB; divide it into several rows")
        yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line


def _decoded(where: str, line: bytes) -> str:
    """Return a line as text. Raise DataError for what is not UTF-8, and for zero bytes."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        remedy = f"{_CONVERT.format('WINDOWS-1252')} for a file of Windows"
        raise DataError(
            f"{where}: not UTF-8 text (byte 0x{line[error.start]:02x}: {error.reason}); {remedy}"
        ) from error
    if "\0" in text:
        raise DataError(
            f"{where}: a zero byte, as in UTF-16 without its byte order mark; {_CONVERT.format('UTF-16LE')}"
        )
    return text


def _rest(path: str, lines: Lines) -> str:
    """Return all lines that are left as one text."""
    texts, size = [], 0
    for number, line in lines:
        texts.append(_decoded(f"{path}: line {number}", line))
        size += len(line)
        if size > _WHOLE_FILE:
            raise DataError(
                f"{path}: more than {_WHOLE_FILE >> 30} GB to read at once; write an object a line (.jsonl)"
            )
    return "".join(texts)


def _text_lines(path: str, stream: BinaryIO) -> Iterator[str]:
    """Yield the lines of a text, which end as they do in the file."""
    for number, line in _lines(path, stream):
        text = _decoded(f"{path}: line {number}", line)
        yield from re.split(r"(?<=\r)(?!\n|$)", text) if "\r" in text else [text]


def _read_text(path: str, stream: BinaryIO, _: Collection[str]) -> Iterator[Numbered]:
    if text := _rest(path, _lines(path, stream)):
        yield None, {"text": re.sub(r"\r\n?", "\n", text)}


def _read_parquet(path: str, stream: BinaryIO, _: Collection[str]) -> Iterator[Numbered]:
    require("train", f"{path}: {READ_ALONE}")
    import pyarrow.parquet

    file, row = pyarrow.parquet.ParquetFile(stream), 0
    names = file.schema_arrow.names
    _check_names(path, names)
    for batch in file.iter_batches():
        columns = [_parquet_cells(path, name, cells, row) for name, cells in zip(names, batch.columns, strict=True)]
        yield from ((None, dict(zip(names, cells, strict=True))) for cells in zip(*columns, strict=True))
        row += len(batch)


def _parquet_cells(path: str, name: str, column: Any, first: int) -> list[Any]:
    """Return the values of a column from row `first` on. Raise DataError for those that Python cannot hold."""
    values = []
    for row, cell in enumerate(column, first):
        try:
            values.append(cell.as_py())
        except Exception as error:  # dates beyond its years, text that is no UTF-8
            raise DataError(
                f"{path}: {row_place(row, None)}, column {name!r}: no value of {column.type} ({error}); write it as "
                "text, or take the column out"
            ) from error
    return values


def _check_names(path: str, names: Sequence[str]) -> None:
    if twice := [name for name in dict.fromkeys(names) if name.strip() and names.count(name) > 1]:
        raise DataError(f"{path}: the column {', '.join(map(repr, twice))} stands twice; rename one")


def _read_json(path: str, stream: BinaryIO, names: Collection[str]) -> Iterator[Numbered]:
    records = _json_values(path, _lines(path, stream))
    start = list(islice(records, 2))
    table = _open_table(path, start[0][1], names) if len(start) == 1 else None
    yield from chain(start, records) if table is None else ((None, record) for record in table)


def _json_values(path: str, lines: Lines) -> Iterator[Numbered]:
    row = 0
    for line, written in lines:
        if not written.strip(_BLANK):
            continue
        where = f"{path}: {row_place(row, line)}"
        text = _decoded(where, written)
        if row == 0 and text.lstrip().startswith("["):
            yield from _spread_values(path, text + _rest(path, lines), 0, line)
            return
        try:
            value = _DECODER.decode(text)
        except (ValueError, RecursionError):
            if not text.lstrip().startswith("{"):
                parse_json(text, where, DataError)
                raise
            yield from _spread_values(path, text + _rest(path, lines), row, line)
            return
        yield line, _row_of(path, row, line, value, text)
        row += 1


def _row_of(path: str, row: int, line: int, value: Any, text: str, may_be_text: bool = False) -> dict[str, Any]:
    """Return a value of JSON as a record. Raise DataError for what is no row, nested too deep, or no Unicode."""
    where = f"{path}: {row_place(row, line)}"
    if "\\u" in text or text.count("[") + text.count("{") > _FLAT:
        check_json(value, text, where, DataError)
    if may_be_text and isinstance(value, str):
        return {"text": value}
    if not isinstance(value, dict):
        start = clip(text.strip(), _SHOWN)
        raise DataError(f'{where}: {start} is no row; a row is an object, as in {{"question": …, "answer": …}}')
    return value


def _spread_values(path: str, text: str, row: int, line: int) -> Iterator[Numbered]:
    """Yield the values of a list, or objects that go over several lines or share one, from this row and line on."""
    place = _skip_blanks(text, 0)
    is_list, are_texts = text.startswith("[", place), False
    first, first_line = text[place:].partition("\n")[0], line + text.count("\n", 0, place)
    line, place = _after(text, place, place + is_list, line + text.count("\n", 0, place))
    is_open = is_list and not text.startswith("]", place)
    while is_open or (not is_list and place < len(text)):
        value, end = _value_at(path, text, place, row, line)
        are_texts = are_texts or (is_list and row == 0 and isinstance(value, str))
        yield line, _row_of(path, row, line, value, text[place:end], are_texts)
        row += 1
        line, place = _after(text, place, end, line)
        if is_list:
            is_open = text.startswith(",", place)
            if not is_open and not text.startswith("]", place):
                raise DataError(f"{path}: {row_place(row - 1, line)}: not JSON (expected , or ] in line {line})")
            line, place = _after(text, place, place + is_open, line)
    if is_list and text[place + 1 :].strip():
        _row_of(path, 0, first_line, [], first)  # a list in each line


def _value_at(path: str, text: str, place: int, row: int, line: int) -> tuple[Any, int]:
    """Return the JSON value at a place of a text, and where it ends."""
    where = f"{path}: {row_place(row, line)}"
    try:
        return _DECODER.raw_decode(text, place)
    except json.JSONDecodeError as error:
        fault = line + text.count("\n", place, error.pos)
        raise DataError(f"{where}: not JSON ({error.msg}, in line {fault})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error})") from error


def _after(text: str, start: int, end: int, line: int) -> tuple[int, int]:
    """Return (line, place) of what follows on the blanks behind `end`. line: that of `start`."""
    place = _skip_blanks(text, end)
    return line + text.count("\n", start, place), place


def _skip_blanks(text: str, place: int) -> int:
    while place < len(text) and text[place].isspace():
        place += 1
    return place


def _open_table(path: str, value: Mapping[str, Any], names: Collection[str]) -> list[dict[str, Any]] | None:
    """Return the records of a table that one object holds; None where the object is a row itself.

    Tables are a list of objects beside other things ({"data": [{…}, …]}), columns of lists ({"question": […], …}), and
    what pandas writes: columns or rows by index, and columns, index and data apart. Raise DataError for several lists
    of objects, and for columns of different lengths.
    """
    values = list(value.values())
    if value and all(isinstance(item, dict) and item for item in values):
        if all(key.isdecimal() for key in value):
            return values
        indices = dict.fromkeys(chain.from_iterable(values))
        return _turn(path, {key: [item.get(index) for index in indices] for key, item in value.items()})
    columns, cells = value.get("columns"), value.get("data")
    if isinstance(columns, list) and isinstance(cells, list) and all(isinstance(row, list) for row in cells):
        if wrong := next((row for row in cells if len(row) != len(columns)), None):
            raise DataError(f"{path}: {len(wrong)} cells for {len(columns)} columns in a row of 'data'")
        return [dict(zip(map(str, columns), row, strict=True)) for row in cells]
    lists = {key: item for key, item in value.items() if isinstance(item, list) and item and not _is_talk(item)}
    of_rows = {key: item for key, item in lists.items() if all(isinstance(row, dict) for row in item)}
    if value and not any(name in value for name in names):
        if len(of_rows) > 1:
            raise DataError(
                f"{path}: several lists of rows ({', '.join(of_rows)}); save the one to use as a file of its own"
            )
        if of_rows or all(item == [] for item in values):
            return next(iter(of_rows.values()), [])
    return _turn(path, lists) if len(lists) == len(value) > 0 else None


def _is_talk(items: Sequence[Any]) -> bool:
    """Check whether a list holds the messages of one conversation, and not rows or cells."""
    return any(isinstance(item, dict) and ("role" in item or "from" in item) for item in items)


def _turn(path: str, columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return rows for columns."""
    lengths = {key: len(cells) for key, cells in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(
            f"{path}: columns of different lengths ({', '.join(f'{k}: {n}' for k, n in lengths.items())}); "
            "rows cannot be told from each other"
        )
    return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]


def _read_csv(path: str, stream: BinaryIO, names_of_rows: Collection[str]) -> Iterator[Numbered]:
    csv.field_size_limit(_LONGEST)
    lines, delimiter, line = _csv_start(_text_lines(path, stream), names_of_rows)
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
                names = cells
                _check_names(path, names)
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


READERS: Mapping[str, Callable[[str, BinaryIO, Collection[str]], Iterator[Numbered]]] = {
    ".jsonl": _read_json,
    ".ndjson": _read_json,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".txt": _read_text,
    ".parquet": _read_parquet,
}
"""The reader of each kind of file, by its ending. It takes path, open file and the names of columns of rows."""
