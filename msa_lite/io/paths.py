"""Paths that people name."""

from __future__ import annotations

import os
from pathlib import Path

from msa_lite.errors import MsaError, UsageError
from msa_lite.io.reading import printable


def user_path(name: str | Path, kind: type[MsaError] = UsageError) -> Path:
    """Return the path of a name, with the home folder for `~`. Nothing has to be there.

    Raises an error of this kind for names that no file can have: too long, with a zero byte, of a user whom nobody
    knows, or a link that leads to itself.
    """
    try:
        path = Path(name).expanduser()
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass
    except (OSError, ValueError, RuntimeError) as error:  # of `stat`, of encodings, of `expanduser`
        reason = getattr(error, "strerror", None) or error
        raise kind(f"{printable(name)[:300]}: cannot be the name of a file or folder ({reason})") from error
    return path
