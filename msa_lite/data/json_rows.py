"""Records of a JSON file, by line or as one value, and the tables that one object may hold."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from msa_lite.data.lines import ZERO_BYTE, Numbered, byte_lines, first_sign, not_utf8, row_place, whole_text
from msa_lite.errors import DataError, clip
from msa_lite.io.files.reading import parse_json

_BLANK = b" \t\r\n"
_FLAT = 50  # a row with at most this many brackets cannot be nested too deep
_SHOWN = 40  # characters of a row to show in a message


def json_records(path: Path, stream: BinaryIO, names: Collection[str]) -> Iterator[Numbered]:
    records = json_values(path, stream)
    start = [record for record in (next(records, None), next(records, None)) if record]
    table = _open_table(path, start[0][1], names) if len(start) == 1 else None
    yield from chain(start, records) if table is None else ((None, record) for record in table)


def json_values(path: Path, stream: BinaryIO) -> Iterator[Numbered]:
    if first_sign(stream) == "[":
        yield from _list_items(path)
        return
    row = 0
    for line, written in enumerate(byte_lines(path, stream), start=1):
        if not written.strip(_BLANK):
            continue
        where = f"{path}: {row_place(row, line)}"
        try:
            value = _parse(written, where)
        except DataError as error:
            if isinstance(error.__cause__, UnicodeDecodeError):
                raise DataError(f"{where}: {not_utf8(error.__cause__)}") from error
            if b"\0" in written:
                raise DataError(f"{where}: {ZERO_BYTE}") from error
            if not written.lstrip().startswith(b"{") or isinstance(error.__cause__, UnicodeError):
                raise
            yield from _read_spread(path, row, line)
            return
        if not isinstance(value, dict):
            raise _no_row(path, row, line, written.decode(errors="replace"))
        yield line, value
        row += 1


def _list_items(path: Path) -> Iterator[Numbered]:
    text = whole_text(path)
    try:
        values = parse_json(text, str(path), DataError)
    except DataError as error:
        if "\0" in text:
            raise DataError(f"{path}: {ZERO_BYTE}") from error
        first = text.lstrip().partition("\n")[0]
        with suppress(ValueError, RecursionError):
            json.loads(first)  # a list in each line
            raise _no_row(path, 0, text[: text.index(first)].count("\n") + 1, first) from error
        raise
    kinds = {dict} if any(isinstance(value, dict) for value in values) else {str}
    for row, (value, line) in enumerate(zip(values, _lines_of_items(text), strict=True)):
        if type(value) not in kinds:
            raise _no_row(path, row, line, json.dumps(value))
        yield line, value if isinstance(value, dict) else {"text": value}


def _lines_of_items(text: str) -> Iterator[int]:
    """Yield the line in which each item of a JSON list begins. The text is known to be JSON."""
    scan = json.JSONDecoder().raw_decode
    place, line = 0, 1
    while True:
        start, place = place, _skip_blanks(text, place)
        place = _skip_blanks(text, place + 1)  # behind the bracket, or a comma
        line += text.count("\n", start, place)
        if text[place] == "]":
            return
        yield line
        start, place = place, scan(text, place)[1]
        line += text.count("\n", start, place)
        if text[_skip_blanks(text, place)] == "]":
            return


def _parse(text: bytes, where: str) -> Any:
    """Parse a row as `parse_json` does, several times faster when it has neither escapes nor deep nesting."""
    if text.startswith(b"{") and b"\\u" not in text and text.count(b"[") + text.count(b"{") <= _FLAT:
        with suppress(ValueError):
            return json.loads(text.decode())
    return parse_json(text, where, DataError)


def _read_spread(path: Path, row: int, line: int) -> Iterator[Numbered]:
    """Yield the objects of a file from this row and line on, where they go over several lines, or share one."""
    text = whole_text(path).split("\n", line - 1)[-1]
    decoder, place = json.JSONDecoder(), _skip_blanks(text, 0)
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
        place = _skip_blanks(text, end)
        line += text.count("\n", start, place)


def _skip_blanks(text: str, place: int) -> int:
    while place < len(text) and text[place].isspace():
        place += 1
    return place


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
    if value and not any(name in value for name in names) and all(item == [] for item in values):
        return []
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
