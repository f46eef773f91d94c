"""Check that a folder can be written and its disk has room; recognise a full disk in the errors of libraries."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msa_lite.errors import OutputError, StageError
from msa_lite.io.progress import readable
from msa_lite.io.reading import local_path, printable

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Errors of the system where no folder can be made, whatever the room.
_UNREACHABLE = (
    errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EROFS,
    errno.EINVAL,
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
    for part in _chain(error):
        if (isinstance(part, OSError) and part.errno in _FULL) or _FULL_WORDS.search(str(part)):
            return " ".join(str(part).split())
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and those that it was raised from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


@contextmanager
def reachable(folder: Path) -> Iterator[None]:
    """Turn an error of the system about a place where no folder can be made into an OutputError."""
    try:
        yield
    except (OSError, ValueError) as error:
        is_gone = isinstance(error, FileNotFoundError) and error.filename is None  # the working folder
        if isinstance(error, OSError) and error.errno not in _UNREACHABLE and not is_gone:
            raise
        reason = getattr(error, "strerror", None) or error
        raise OutputError(f"{printable(folder)}: cannot be written ({reason}); choose another output folder") from error


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


def check_space(folder: Path, needed: int) -> None:
    """Raise OutputError when `folder` cannot be made, or its disk has fewer than `needed` bytes free."""
    with reachable(folder):
        place = nearest_place(folder)
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise OutputError(f"{folder}: {place} cannot be written to, or is no folder; choose another output folder")
    free = shutil.disk_usage(place).free
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
