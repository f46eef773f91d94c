"""What may stand in the place of a file and is none: pipes, sockets, devices, links that lead nowhere."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path


def link(to: str) -> Callable[[Path], object]:
    """Return what puts a link to somewhere in a place."""
    return lambda path: path.symlink_to(to)


def _put_socket(path: Path) -> None:
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as made:  # whose names are short
        made.bind(path.name)


NO_FILES: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "socket": _put_socket,
    "device": link("/dev/zero"),
    "link to nothing": link("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
}
