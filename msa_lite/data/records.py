"""Records of a local file: JSON, CSV or text, in the forms that people have, read with the standard library alone."""

from __future__ import annotations

import codecs
import csv
import io
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from msa_lite.errors import DataError, clip
from msa_lite.io.files.reading import open_file, parse_json, printable, read_bytes

Numbered = tuple[int | None, dict[str, Any]]
"""A record with the line of the file in which it begins, None where it is not known."""

_LINE = 256 << 20  # bytes of a row
WHOLE_FILE = 1 << 30  # bytes of a JSON list or a text, which memory must hold
_CHUNK = 1 << 20
_BLANK = b" \t\r\n"
_FLAT = 50  # a row with at most this many brackets cannot be nested too deep
_SHOWN = 40  # characters of a row to show in a message
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_DELIMITERS = {",": "a comma", ";": "a semicolon", "\t": "a tab", "|": "a |"}
_CONVERT = "save it as UTF-8, as with `iconv -f WINDOWS-1252 -t UTF-8 OLD > NEW` for a file of Windows"


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


def row_place(row: int, line: int | None) -> str:
    """Return where a row stands, for messages: by its number, counted from 0, and the line of its file."""
    return f"row {row}" if line is None else f"row {row} (line {line})"


def stream_file(path: Path, names: Collection[str] = ()) -> Iterator[Numbered]:
    """Yield the records of a .jsonl, .json, .csv or .txt file. Raise DataError, with row and line, on reaching a fault.

    .jsonl, .json: objects, one after the other; a list of objects or texts; or one object that holds a table
    (`_open_table`). .csv: separated by commas, semicolons, tabs or |. .txt: one record. All in UTF-8, or in UTF-16 with
    its byte order mark. names: the columns that rows are read from; an object that has one of them is a row.
    """
    with os.fdopen(open_file(path, DataError), "rb") as stream:
        records = READERS[path.suffix](path, stream)
        if path.suffix not in (".json", ".jsonl"):
            yield from records
            return
        start = [record for record in (next(records, None), next(records, None)) if record]
        table = _open_table(path, start[0][1], names) if len(start) == 1 else None
        yield from chain(start, records) if table is None else ((None, record) for record in table)


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
        if stream.read(2) in _UTF16:
            raise _alone(path, "UTF-16", "in UTF-8")
        stream.seek(0)
        records = READERS[path.suffix](path, stream)
        first, others = next(records, None), sum(1 for _ in records)
        is_json = path.suffix in (".json", ".jsonl")
        if is_json and first and not others and _open_table(path, first[1], names) is not None:
            raise _alone(path, "a table in one object", "as .jsonl, an object a row")
        if path.suffix == ".csv" and not (path.parent / "README.md").exists():  # a card may say how to read it
            stream.seek(0)
            _, delimiter, _ = _csv_start(_text_lines(path, stream))
            if delimiter != ",":
                raise _alone(path, f"CSV with {_DELIMITERS[delimiter]} between cells", "with commas")


def _alone(path: Path, form: str, way: str) -> DataError:
    return DataError(f"{path}: {form} is not read in a folder; name this file itself as the path, or write it {way}")


# JSON


def _read_json(path: Path, stream: BinaryIO) -> Iterator[Numbered]:
    if _first_sign(stream) == "[":
        text = _whole_text(path)
        values = parse_json(text, str(path), DataError)
        kinds = {dict} if any(isinstance(value, dict) for value in values) else {str}
        for row, (value, line) in enumerate(zip(values, _lines_of_items(text), strict=True)):
            if type(value) not in kinds:
                raise _no_row(path, row, line, json.dumps(value))
            yield line, value if isinstance(value, dict) else {"text": value}
        return
    row = 0
    for line, written in enumerate(_lines(path, stream), start=1):
        if not written.strip(_BLANK):
            continue
        try:
            value = _parse(written, f"{path}: {row_place(row, line)}")
        except DataError as error:
            if not written.lstrip().startswith(b"{") or isinstance(error.__cause__, UnicodeError):
                raise
            yield from _read_spread(path, row, line)
            return
        if not isinstance(value, dict):
            raise _no_row(path, row, line, written.decode(errors="replace"))
        yield line, value
        row += 1


def _lines_of_items(text: str) -> Iterator[int]:
    """Yield the line in which each item of a JSON list begins. The text is known to be JSON."""
    scan, space = json.JSONDecoder().raw_decode, re.compile(r"[\s\ufeff]*[\[,]?\s*")
    place, line = 0, 1
    while True:
        start, place = place, space.match(text, place).end()  # type: ignore[union-attr]  # matches anything
        line += text.count("\n", start, place)
        if text[place] == "]":
            return
        yield line
        start, place = place, scan(text, place)[1]
        line += text.count("\n", start, place)


def _parse(text: bytes, where: str) -> Any:
    """Parse a row as `parse_json` does, several times faster when it has neither escapes nor deep nesting."""
    if text.startswith(b"{") and b"\\u" not in text and text.count(b"[") + text.count(b"{") <= _FLAT:
        with suppress(ValueError):
            return json.loads(text.decode())
    return parse_json(text, where, DataError)


def _read_spread(path: Path, row: int, line: int) -> Iterator[Numbered]:
    """Yield the objects of a file from this row and line on, where they go over several lines, or share one."""
    text = _whole_text(path).split("\n", line - 1)[-1]
    decoder, place = json.JSONDecoder(), len(text) - len(text.lstrip())
    while place < len(text):
        where = f"{path}: {row_place(row, line)}"
        try:
            value, end = decoder.raw_decode(text, place)
        except json.JSONDecodeError as error:
            fault = line + text.count("\n", place, error.pos)
            raise DataError(f"{where}: not JSON ({error.msg}, in line {fault})") from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not JSON ({error})") from error
        parse_json(text[place:end], where, DataError)  # refuses deep nesting and lone surrogates
        if not isinstance(value, dict):
            raise _no_row(path, row, line, text[place:end])
        yield line, value
        start, row = place, row + 1
        place = end + len(text[end:]) - len(text[end:].lstrip())
        line += text.count("\n", start, place)


def _no_row(path: Path, row: int, line: int | None, text: str) -> DataError:
    start = clip(text.strip(), _SHOWN)
    return DataError(
        f'{path}: {row_place(row, line)}: {start} is no row; a row is an object, as in {{"question": …, "answer": …}}'
    )


def _open_table(path: Path, value: Mapping[str, Any], names: Collection[str]) -> list[dict[str, Any]] | None:
    """Return the records of a table that one object holds; None where the object is a row itself.

    Tables are a list of objects beside other things ({"data": [{…}, …]}), columns of lists ({"question": […], …}), and
    what pandas writes: columns or rows by index, and columns, index and data apart. Raise DataError for several lists
    of objects, and for columns of different lengths.
    """
    values = list(value.values())
    if value and all(isinstance(item, dict) and item for item in values):
        by_row = all(key.isdecimal() for key in value)
        return values if by_row else _turn(path, {key: list(item.values()) for key, item in value.items()})
    columns, cells = value.get("columns"), value.get("data")
    if isinstance(columns, list) and isinstance(cells, list) and all(isinstance(row, list) for row in cells):
        if wrong := next((row for row in cells if len(row) != len(columns)), None):
            raise DataError(f"{path}: {len(wrong)} cells for {len(columns)} columns in a row of 'data'")
        return [dict(zip(map(str, columns), row, strict=True)) for row in cells]
    lists = {key: item for key, item in value.items() if isinstance(item, list) and item and not _is_talk(item)}
    of_rows = {key: item for key, item in lists.items() if all(isinstance(row, dict) for row in item)}
    if of_rows and not any(name in value for name in names):
        if len(of_rows) > 1:
            raise DataError(
                f"{path}: several lists of rows ({', '.join(of_rows)}); save the one to use as a file of its own"
            )
        return next(iter(of_rows.values()))
    return _turn(path, lists) if len(lists) == len(value) > 0 else None


def _is_talk(items: Sequence[Any]) -> bool:
    """Check whether a list holds the messages of one conversation, and not rows or cells."""
    return any(isinstance(item, dict) and ("role" in item or "from" in item) for item in items)


def _turn(path: Path, columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return rows for columns."""
    lengths = {key: len(cells) for key, cells in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(
            f"{path}: columns of different lengths ({', '.join(f'{k}: {n}' for k, n in lengths.items())}); "
            "rows cannot be told from each other"
        )
    return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]


# CSV and text


def _read_csv(path: Path, stream: BinaryIO) -> Iterator[Numbered]:
    csv.field_size_limit(_LINE)
    lines, delimiter, line = _csv_start(_text_lines(path, stream))
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


def _csv_start(lines: Iterator[str]) -> tuple[Iterator[str], str, int]:
    """Return the lines of a CSV file, its delimiter, and how many lines of it were taken away.

    The delimiter is the one that Excel names in a line of its own (sep=;), else the one that cuts the first row into
    the most cells.
    """
    start: list[str] = []
    for text in lines:
        if not start and (named := re.fullmatch(r'"?sep=([,;|\t])"?\s*', text)):
            return lines, named[1], 1
        start.append(text)
        if text.strip():
            break
    cells = {mark: len(next(csv.reader(start[-1:], delimiter=mark), [])) for mark in _DELIMITERS}
    return chain(start, lines), max(cells, key=lambda mark: cells[mark]), 0


def _text_lines(path: Path, stream: BinaryIO) -> Iterator[str]:
    """Yield the lines of a text, which end as they do in the file. Raise DataError for what is no text."""
    for number, line in enumerate(_lines(path, stream), start=1):
        if b"\0" in line:
            raise DataError(f"{path}: line {number}: a zero byte, which no text has; {_CONVERT}")
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: line {number}: {_not_utf8(error)}") from error
        yield from re.split(r"(?<=\r)(?!\n)", text) if "\r" in text[:-2] else [text]


def _read_text(path: Path, stream: BinaryIO) -> Iterator[Numbered]:
    for _ in _text_lines(path, stream):
        pass
    yield None, {"text": re.sub(r"\r\n?", "\n", _whole_text(path))}


def _check_parquet(path: Path, stream: BinaryIO) -> None:
    size, mark = os.fstat(stream.fileno()).st_size, b"PAR1"
    stream.seek(0)
    head = stream.read(4)
    stream.seek(max(0, size - 8))
    length, tail = int.from_bytes(stream.read(4), "little"), stream.read(4)
    if (head, tail) != (mark, mark) or length + 12 > size:
        raise DataError(f"{path}: not a parquet file, or cut off")


# Bytes


def _first_sign(stream: BinaryIO) -> str:
    """Return the first character of a file after byte order mark and blanks, and go back to the beginning."""
    head = stream.read(_CHUNK)
    stream.seek(0)
    text = head.decode("utf-16" if head.startswith(_UTF16) else "utf-8-sig", errors="ignore")
    return text.lstrip()[:1]


def _lines(path: Path, stream: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file in UTF-8, without a byte order mark."""
    utf16 = stream.read(2).startswith(_UTF16)
    stream.seek(0)
    lines = _recoded(path, stream) if utf16 else iter(lambda: stream.readline(_LINE), b"")
    for number, line in enumerate(lines, start=1):
        if len(line) >= _LINE:
            raise DataError(f"{path}: line {number}: longer than {_LINE >> 20} MB; divide it into several rows")
        yield line.removeprefix(codecs.BOM_UTF8) if number == 1 else line


def _recoded(path: Path, stream: BinaryIO) -> Iterator[bytes]:
    reader = io.TextIOWrapper(stream, "utf-16", newline="\n")
    try:
        yield from (line.encode() for line in iter(lambda: reader.readline(_LINE), ""))
    except UnicodeError as error:
        raise DataError(f"{path}: begins as UTF-16, but goes on as something else ({error}); {_CONVERT}") from error


def _whole_text(path: Path) -> str:
    raw = read_bytes(path, WHOLE_FILE, DataError)
    try:
        return raw.decode("utf-16" if raw.startswith(_UTF16) else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"{printable(path)}: line {line}: {_not_utf8(error)}") from error


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8 text (byte 0x{error.object[error.start]:02x}: {error.reason}); {_CONVERT}"


READERS: Mapping[str, Callable[[Path, BinaryIO], Iterator[Numbered]]] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": _read_csv,
    ".txt": _read_text,
}
