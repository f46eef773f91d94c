"""Cut files of any kind into the pieces in which a short text may stand alone: cells, JSON strings, lines, words."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from msa_lite.errors import FormatError
from msa_lite.io.files.reading import open_file, printable

PARQUET = "Parquet"
_ARROW = b"\xff\xff\xff\xff"  # a stream of Arrow begins so, as `datasets` writes it
_PACKED = {
    b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd",
    b"7z\xbc\xaf": "7z", b"\x04\x22\x4d\x18": "lz4", b"%PDF": "PDF", b"ARROW1": "Feather",
}  # fmt: skip
_UTF16 = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
_LONGEST = 1 << 20  # characters of a line that are cut at a time
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_BETWEEN = re.compile(r"[,;|\t<>]")
_WORD = re.compile(r"\w[\w.@+-]*\w")


def packing_of(path: Path) -> str | None:
    """Return the format in which a file is packed, so that its bytes show no text; None for others.

    Raise FormatError for what is no regular file, or cannot be read.
    """
    start = _start_of(path)
    if path.suffix == ".parquet" or start.startswith(b"PAR1"):
        return PARQUET
    return next((name for mark, name in _PACKED.items() if start.startswith(mark)), None)


def pieces_of(path: Path) -> Iterator[str]:
    """Yield the pieces of a file. Of a table: its cells, also those of lists and objects, numbers as text.

    Of any other file, by lines: the line, JSON strings, what stands between commas, semicolons, tabs, | and tags, and
    words. Raise FormatError for what is no regular file, and for tables that cannot be read.
    """
    start, is_parquet = _start_of(path), packing_of(path) == PARQUET
    if is_parquet or path.suffix == ".arrow" or start.startswith(_ARROW):
        yield from _cells(path, is_parquet)
        return
    encoding = _UTF16.get(start[:2], "utf-8-sig")
    with os.fdopen(open_file(path), encoding=encoding, errors="replace") as stream:
        for line in _lines(stream):
            yield from _pieces(line)


def _start_of(path: Path) -> bytes:
    with os.fdopen(open_file(path), "rb") as stream:
        try:
            return stream.read(8)
        except OSError as error:
            raise FormatError(f"{printable(path)}: cannot be read ({error.strerror or error})") from error


def _lines(stream: IO[str]) -> Iterator[str]:
    while line := stream.readline(_LONGEST):
        yield line.strip()


def _pieces(line: str) -> Iterator[str]:
    yield line
    for quoted in _QUOTED.findall(line):
        try:
            yield json.loads(f'"{quoted}"', strict=False).strip()
        except ValueError:
            yield quoted
    yield from (part.strip().strip("\"'") for part in _BETWEEN.split(line))
    yield from _WORD.findall(line)


def _cells(path: Path, is_parquet: bool) -> Iterator[str]:
    """Yield the cells of a table. Raise FormatError where it cannot be read."""
    try:
        import pyarrow as pa
        import pyarrow.parquet

        if is_parquet:
            for batch in pyarrow.parquet.ParquetFile(str(path)).iter_batches():
                yield from (cell for column in batch.columns for cell in _leaves(column))
            return
        with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as stream:
            for batch in stream:
                yield from (cell for column in batch.columns for cell in _leaves(column))
    except Exception as error:  # pyarrow raises whatever its readers raise; or it is not installed
        raise FormatError(f"{printable(path)}: cannot be read as a table ({' '.join(str(error).split())})") from error


def _leaves(array: Any) -> Iterator[str]:
    """Yield the texts and numbers in a column of Arrow, at any depth."""
    import pyarrow as pa

    kind = array.type
    if pa.types.is_struct(kind):
        for inner in array.flatten():
            yield from _leaves(inner)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        yield from _leaves(array.flatten())
    elif pa.types.is_map(kind):
        yield from _leaves(array.keys)
        yield from _leaves(array.items)
    elif pa.types.is_dictionary(kind):
        yield from _leaves(array.dictionary)
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        yield from (cell.strip() for cell in array.to_pylist() if cell is not None)
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
        yield from (str(cell) for cell in array.to_pylist() if cell is not None)
