"""Files that are there whole or not at all, and their hashes."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from msa_lite.io.reading import open_file, printable

_CHUNK = 1 << 20  # bytes read at a time
_SURROGATES = re.compile("[\ud800-\udfff]+")


def canonical_json(value: Any) -> str:
    """Write a value as JSON with sorted keys and no blanks: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def indented_json(value: Any) -> str:
    """Write a value as JSON for people. Bytes of a name that are no UTF-8 become text, as in `printable`."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    return _SURROGATES.sub(lambda match: printable(match[0]).replace("\\", "\\\\"), text)


def digest(value: Any) -> str:
    """Return the SHA-256 (hex) of a JSON-able value."""
    return hashlib.sha256(canonical_json(value).encode("utf-8", "surrogatepass")).hexdigest()


def hash_file(path: Path) -> str:
    """Return the SHA-256 (hex) of a file's content. Raise FormatError for what cannot be opened or is no file."""
    state = hashlib.sha256()
    with open(open_file(path), "rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK):
            state.update(chunk)
    return state.hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON, whole or not at all."""
    write_text(path, indented_json(value))


def write_text(path: Path, text: str) -> None:
    """Write a text file by way of a temporary one, so that it is there whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(printable(text), encoding="utf-8")
    os.replace(temporary, path)


def sync(path: Path) -> None:
    """Write a file, or a folder's list of names, through to the disk, as far as the system can."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe would wait for a writer
    except OSError:  # Windows opens no folders
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def umask() -> int:
    """Return the process's umask, without changing it where /proc tells it. `os.umask` changes it for all threads."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("Umask:")), 8)
    except (OSError, StopIteration, ValueError):
        mask = os.umask(0)
        os.umask(mask)
        return mask
