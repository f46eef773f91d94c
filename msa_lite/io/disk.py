"""Disks: whether a folder can be written, how much room there is, and a full one in what libraries make of it."""

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
# What the system answers where no folder can be made, whatever the room.
_UNREACHABLE = (
    errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EROFS,
    errno.EINVAL,
)  # fmt: skip
# What the system says, as safetensors (an error of Rust), pyarrow and others repeat it; and what torch's zip writer
# says, which drops the system's reason.
_SAID = re.compile(
    r"no space left on device|disk quota exceeded|file too large|(os error|errno) (28|122|27)\b"
    r"|PytorchStreamWriter failed writing|inline_container\.cc.*(unexpected pos|write failed)",
    re.IGNORECASE,
)


def disk_fault(error: BaseException) -> str | None:
    """Return what was said where an error, or one it was raised from, means a full disk or quota; else None."""
    for part in _chain(error):
        if (isinstance(part, OSError) and part.errno in _FULL) or _SAID.search(str(part)):
            return " ".join(str(part).split())
    return None


def is_disk_full(error: BaseException) -> bool:
    """Check whether an error, or one that it was raised from, means that the disk or a quota is full."""
    return disk_fault(error) is not None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and those that it came from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


@contextmanager
def reachable(folder: Path) -> Iterator[None]:
    """Turn what the system says of a place where no folder can be made into an OutputError."""
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

    Raises OutputError for ~ and a name: that is somebody else's home.
    """
    start = str(name).partition("/")[0]
    if start.startswith("~") and start != "~":
        raise OutputError(
            f"{printable(name)[:80]}: the home of somebody else; write the path out, or ./~… for a folder"
        )
    return local_path(name, OutputError) if start == "~" else Path(name)


def check_space(folder: Path, needed: int) -> None:
    """Raise OutputError when `folder` cannot be made, or its disk has fewer than `needed` bytes free."""
    with reachable(folder):
        place = nearest_place(folder)
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise OutputError(f"{folder}: {place} is no folder that can be written to; choose another output folder")
    free = shutil.disk_usage(place).free
    if free < needed:
        raise OutputError(
            f"{folder}: {readable(needed)} are needed, {readable(free)} are free on that disk; make room or choose "
            "another output folder"
        )


def nearest_place(folder: Path) -> Path:
    """Return the nearest thing above a folder that is there."""
    place = Path(os.path.realpath(folder)).parent
    while not place.exists():
        place = place.parent
    return place


@contextmanager
def disk_faults(folder: Path, needed: int) -> Iterator[None]:
    """Turn what the disk reports while `folder` is made, out of `needed` bytes, into a StageError with what to do."""
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
