"""Write files whole or not at all, hash them, and check that the disk has room."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from msa_lite.errors import OutputError, StageError, causes
from msa_lite.io.console.progress import readable
from msa_lite.io.files.reading import local_path, open_file, printable

_CHUNK = 1 << 20  # bytes read at a time
_SETTLED = 2 * 10**9  # nanoseconds; file systems tell times apart that lie further from each other
_SURROGATES = re.compile("[\ud800-\udfff]+")


def canonical_json(value: Any) -> str:
    """Write a value as JSON with sorted keys and no blanks: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def json_form(value: Any) -> Any:
    """Return the JSON form of a value: objects for dataclasses and mappings, lists for tuples, text for paths.

    The keys of a dataclass are the names of its fields. Where they are to be others, its class variable `json_keys`
    lists them: the names of attributes, or a mapping from each key to the attribute that it shows:

        json_keys: ClassVar = ("folder", "size")
        json_keys: ClassVar = {"out": "folder", "loss": "fit.loss", "**": "figures", "notes?": "notes"}

    Dots lead into attributes; None on the way gives None. "**" stands for all entries of a mapping. A key that ends in
    "?" is left out where its value is empty.
    """
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [json_form(item) for item in value]
    if isinstance(value, Mapping):
        return {key: json_form(item) for key, item in value.items()}
    if not is_dataclass(value) or isinstance(value, type):
        return value
    keys = getattr(value, "json_keys", None) or [field.name for field in fields(value)]
    entries: dict[str, Any] = {}
    for key, path in keys.items() if isinstance(keys, Mapping) else zip(keys, keys, strict=True):
        item = reduce(lambda holder, name: None if holder is None else getattr(holder, name), path.split("."), value)
        if key == "**":
            entries |= json_form(item)
        elif item or not key.endswith("?"):
            entries[key.removesuffix("?")] = json_form(item)
    return entries


def indented_json(value: Any) -> str:
    """Write a value's `json_form` for people. Bytes of a name that are no UTF-8 become text, as in `printable`."""
    text = json.dumps(json_form(value), indent=2, ensure_ascii=False) + "\n"
    return _SURROGATES.sub(lambda match: printable(match[0]).replace("\\", "\\\\"), text)


def digest(value: Any) -> str:
    """Return the SHA-256 (hex) of a JSON-able value."""
    return hashlib.sha256(canonical_json(value).encode("utf-8", "surrogatepass")).hexdigest()


def hash_file(path: Path) -> str:
    """Return the SHA-256 (hex) of a file's content. Raise FormatError for what cannot be opened or is no file.

    Raise OSError with the path when the disk fails. A process reads a file once, as long as nobody writes to it: its
    time of change tells, which nobody can set. What somebody writes through a memory map shows late.
    """
    with open(open_file(path), "rb", buffering=0) as stream:
        status = os.fstat(stream.fileno())
        mark = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if mark in _hashes:
            return _hashes[mark]
        is_settled = time.time_ns() - max(mark[3:]) > _SETTLED  # before it is read: a write meanwhile has another time
        state = hashlib.sha256()
        try:
            while chunk := stream.read(_CHUNK):
                state.update(chunk)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
    if is_settled:
        _hashes[mark] = state.hexdigest()
    return state.hexdigest()


_hashes: dict[tuple[int, ...], str] = {}  # by device, inode, size and times of a file


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON, whole or not at all."""
    write_text(path, indented_json(value))


def write_text(path: Path, text: str) -> None:
    """Write a text file by way of a temporary one, so that it is there whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(printable(text), encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary file that takes the place of another once it is written; an error leaves nothing of it."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except Exception:  # a full disk
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


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


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Errors of the system where no folder can be made, whatever the room.
_UNREACHABLE = (
    errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EROFS,
    errno.EINVAL, errno.ENOENT,  # the last: in a working folder that is gone, or where the system keeps no files
)  # fmt: skip
# The system's words for a full disk, as safetensors (an error of Rust), pyarrow and others repeat them; and those of
# torch's zip writer, which drops the system's reason.
_FULL_WORDS = re.compile(
    r"no space left on device|disk quota exceeded|file too large|(os error|errno) (28|122|27)\b"
    r"|PytorchStreamWriter failed writing|inline_container\.cc.*(unexpected pos|write failed)",
    re.IGNORECASE,
)


def disk_fault(error: BaseException) -> str | None:
    """Return the words of an error, or of one that it was raised from, that means a full disk or quota; else None."""
    for cause in causes(error, by_chance=True):
        if (isinstance(cause, OSError) and cause.errno in _FULL) or _FULL_WORDS.search(str(cause)):
            return " ".join(str(cause).split())
    return None


@contextmanager
def reachable(folder: Path) -> Iterator[None]:
    """Turn an error of the system about a place where no folder can be made into an OutputError."""
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno not in _UNREACHABLE:
            raise
        raise _unwritable(folder, str(getattr(error, "strerror", None) or error)) from error


def _unwritable(folder: Path, reason: str) -> OutputError:
    return OutputError(f"{printable(folder)}: cannot be written ({reason}); choose another place")


def output_path(name: str | Path) -> Path:
    """Return the folder that a user names for an output, with ~/ written out, as shells leave it in `--out=~/x`.

    Raise OutputError for ~ and a name: that is somebody else's home.
    """
    start = str(name).partition("/")[0]
    if start.startswith("~") and start != "~":
        raise OutputError(
            f"{printable(name)[:80]}: is the home of somebody else; write the path out, or ./~… for a folder"
        )
    return local_path(name, OutputError) if start == "~" else Path(name)


def check_writable(path: Path) -> Path:
    """Return the nearest folder above a path. Raise OutputError where nothing can be made in it, with the reason.

    Nothing is written. Some faults show only as somebody writes.
    """
    with reachable(path):
        with suppress(FileNotFoundError, NotADirectoryError):
            os.stat(path)  # names that the system does not take
        place = nearest_place(path)
    if not place.is_dir():
        raise _unwritable(path, f"{place} is a file")
    if not os.access(place, os.W_OK | os.X_OK):
        raise _unwritable(path, f"{place} is read-only for you")
    if hasattr(os, "statvfs") and not os.statvfs(place).f_blocks:  # such as /proc
        raise _unwritable(path, f"{place} is no place for files")
    return place


def check_space(folder: Path, needed: int) -> None:
    """Raise OutputError when `folder` cannot be made, or its disk has fewer than `needed` bytes free."""
    free = shutil.disk_usage(check_writable(folder)).free
    if free < needed:
        raise OutputError(
            f"{folder}: {readable(needed)} are needed, {readable(free)} are free on that disk; make room or choose "
            "another output folder"
        )


def nearest_place(folder: Path) -> Path:
    """Return the nearest path above a folder that exists."""
    place = Path(os.path.realpath(folder)).parent
    while not place.exists():
        place = place.parent
    return place


@contextmanager
def disk_faults(folder: Path, needed: int) -> Iterator[None]:
    """Turn an error of the disk while `folder` (`needed` bytes) is written into a StageError that says what to do."""
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(nearest_place(folder)).free
        full = error.errno in _FULL
        what = f"{error.filename} was read" if error.filename else "it was written"
        raise StageError(
            f"{folder}: {error.strerror or error} while {what}; its weights need {needed} bytes, {free} are free. "
            f"{'Make room and run' if full else 'Run'} the same command again; finished shards stay"
        ) from error
