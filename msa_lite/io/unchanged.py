"""Notice files that change while they are read: a result of half the old and half the new content looks like any other.

Size, time of change and inode are compared. Content is not: what is read once is gigabytes.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from msa_lite.errors import StageError, join_faults
from msa_lite.io.manifest import discarded
from msa_lite.io.reading import printable
from msa_lite.io.seal import MANIFEST

Marks = Mapping[Path, tuple[int, ...]]
"""Device, inode, size and time of change by file: they change when somebody writes the file."""


def look(folder: Path, patterns: Iterable[str]) -> Marks:
    """Return the marks of a folder's files of these patterns, as they are now."""
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.name != MANIFEST}
    return {path: mark for path in sorted(found) if (mark := _mark(path))}


def _mark(path: Path) -> tuple[int, ...] | None:
    """Return a file's mark, None where there is no file that can be read."""
    try:
        found = path.stat()
    except OSError:
        return None
    mark = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
    return mark if stat.S_ISREG(found.st_mode) else None


def check_unchanged(marks: Marks) -> None:
    """Raise StageError, after which nothing is kept, where a file is not the one that it was, with all of them."""
    changed = [path for path, mark in marks.items() if _mark(path) != mark]
    if changed:
        raise discarded(
            StageError(
                join_faults(
                    "files changed, or went away, while they were read, so the result is thrown away; run this again "
                    "when nobody writes there any more:",
                    map(printable, changed),
                )
            )
        )
