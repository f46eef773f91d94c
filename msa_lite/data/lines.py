"""Lines and texts of a local file, in UTF-8 or UTF-16, and what to say of one that is neither."""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from msa_lite.errors import DataError
from msa_lite.io.files.reading import printable, read_bytes

Numbered = tuple[int | None, dict[str, Any]]
"""A record with the line of the file in which it begins, None where it is not known."""

LONGEST = 256 << 20  # bytes of a line
WHOLE_FILE = 1 << 30  # bytes of a JSON list or a text, which memory must hold
_CHUNK = 1 << 20
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_CONVERT = "save it as UTF-8, as with `iconv -f WINDOWS-1252 -t UTF-8 OLD > NEW` for a file of Windows"
ZERO_BYTE = (
    "a zero byte, as in UTF-16 without its byte order mark; save it as UTF-8, as with "
    "`iconv -f UTF-16LE -t UTF-8 OLD > NEW`"
)


def row_place(row: int, line: int | None) -> str:
    """Return where a row stands, for messages: by its number, counted from 0, and the line of its file."""
    return f"row {row}" if line is None else f"row {row} (line {line})"


def first_sign(stream: BinaryIO) -> str:
    """Return the first character of a file after byte order mark and blanks, and go back to the beginning."""
    head = stream.read(_CHUNK)
    stream.seek(0)
    text = head.decode("utf-16" if head.startswith(UTF16) else "utf-8-sig", errors="ignore")
    return text.lstrip()[:1]


def byte_lines(path: Path, stream: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file in UTF-8, without a byte order mark."""
    utf16 = stream.read(2).startswith(UTF16)
    stream.seek(0)
    lines = _recoded(path, stream) if utf16 else iter(lambda: stream.readline(LONGEST), b"")
    for number, line in enumerate(lines, start=1):
        if len(line) >= LONGEST:
            raise DataError(f"{path}: line {number}: longer than {LONGEST >> 20} MB; divide it into several rows")
        yield line.removeprefix(codecs.BOM_UTF8) if number == 1 else line


def _recoded(path: Path, stream: BinaryIO) -> Iterator[bytes]:
    reader = io.TextIOWrapper(stream, "utf-16", newline="\n")
    try:
        yield from (line.encode() for line in iter(lambda: reader.readline(LONGEST), ""))
    except UnicodeError as error:
        raise DataError(f"{path}: begins as UTF-16, but goes on as something else, or is cut off ({error})") from error
    finally:
        with suppress(ValueError):  # whoever opened the file has closed it already
            reader.detach()


def whole_text(path: Path) -> str:
    raw = read_bytes(path, WHOLE_FILE, DataError)
    try:
        return raw.decode("utf-16" if raw.startswith(UTF16) else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"{printable(path)}: line {line}: {not_utf8(error)}") from error


def not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8 text (byte 0x{error.object[error.start]:02x}: {error.reason}); {_CONVERT}"


def text_lines(path: Path, stream: BinaryIO) -> Iterator[str]:
    """Yield the lines of a text, which end as they do in the file. Raise DataError for what is no text."""
    for number, line in enumerate(byte_lines(path, stream), start=1):
        if b"\0" in line:
            raise DataError(f"{path}: line {number}: {ZERO_BYTE}")
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: line {number}: {not_utf8(error)}") from error
        yield from re.split(r"(?<=\r)(?!\n)", text) if "\r" in text[:-2] else [text]
