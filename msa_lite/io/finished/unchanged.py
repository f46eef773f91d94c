"""Notice files that change while they are read: a result of half the old and half the new content looks like any other.

Size, time of change and inode are compared. Content is not: that would be gigabytes.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from msa_lite.errors import StageError, join_faults
from msa_lite.io.files.reading import printable
from msa_lite.io.finished.manifest import discarded
from msa_lite.io.finished.seal import MANIFEST

Marks = Mapping[Path, tuple[int, ...]]
"""Device, inode, size and time of change by file: they change when somebody writes the file."""


def take_marks(folder: Path, patterns: Iterable[str]) -> Marks:
    """Return the marks of a folder's files of these patterns, as they are now."""
    files = {path for pattern in patterns for path in folder.glob(pattern) if path.name != MANIFEST}
    return {path: mark for path in sorted(files) if (mark := _mark(path))}


def _mark(path: Path) -> tuple[int, ...] | None:
    """Return a file's mark, or None where it is no regular file."""
    try:
        status = path.stat()
    except OSError:
        return None
    mark = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    return mark if stat.S_ISREG(status.st_mode) else None


def check_unchanged(marks: Marks) -> None:
    """Raise StageError with all files that have changed. After it, the partial folder is removed."""
    changed = [path for path, mark in marks.items() if _mark(path) != mark]
    if changed:
        raise discarded(
            StageError(
                join_faults(
                    "files changed or vanished while they were read, so the result was removed; run this again when "
                    "nobody writes there any more:",
                    map(printable, changed),
                )
            )
        )
