"""Keep two processes from working in one folder."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msa_lite.errors import OutputError
from msa_lite.io.disk import reachable
from msa_lite.io.seal import LOCK


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a folder and hold the lock in it. Raise OutputError where another process holds it."""
    from filelock import FileLock, Timeout

    place = folder / LOCK
    with reachable(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(place) and not stat.S_ISREG(place.lstat().st_mode):
        raise OutputError(f"{place}: is no file; move it elsewhere")
    lock = FileLock(place)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise OutputError(f"{folder}: another msa-lite is working in it; wait until it is done") from error
    try:
        yield
    finally:
        lock.release()
