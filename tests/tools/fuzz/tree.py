"""File trees in memory: what a case lays on the disk, and what was found there afterwards."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Special:
    """A place that holds no plain bytes: a pipe, folder, link, or file of nothing but holes."""

    kind: str
    """pipe, folder, link, sparse."""
    to: str = ""
    """The place that a link leads to."""
    size: int = 0
    """Bytes of a sparse file."""


# What may stand in the place of a file.
PLACES = (Special("pipe"), Special("folder"), Special("link", "nowhere"), Special("link", "/dev/zero"))
Node = bytes | Special
Tree = dict[bytes, Node]
"""Nodes by path below the case's folder, as bytes, for names need not be text."""


def lay(tree: Mapping[bytes, Node], root: Path) -> None:
    """Write a tree below a folder; what a file system refuses as a name is left out."""
    for name, node in tree.items():
        path = os.path.join(os.fsencode(root), name)
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if isinstance(node, bytes):
                with open(path, "wb") as stream:
                    stream.write(node)
            elif node.kind == "pipe":
                os.mkfifo(path)
            elif node.kind == "folder":
                os.makedirs(path, exist_ok=True)
            elif node.kind == "link":
                os.symlink(node.to, path)
            else:
                with open(path, "wb") as stream:
                    stream.truncate(node.size)
        except (OSError, ValueError):
            continue


def read_tree(root: Path, place: str) -> Tree:
    """Return the files below one place of a folder."""
    files = [path for path in (root / place).rglob("*") if path.is_file()]
    return {os.fsencode(path.relative_to(root)): path.read_bytes() for path in files}


def snapshot(root: Path, without: set[str] = frozenset()) -> dict[str, str]:  # type: ignore[assignment]
    """Return a mark of each entry below a folder: kind, and size and hash of small files.

    without: names directly below the root that are left out.
    """
    marks = {}
    for place, folders, files in os.walk(root):
        if place == str(root):
            folders[:] = [name for name in folders if name not in without]
            files = [name for name in files if name not in without]
        for name in [*folders, *files]:
            path = os.path.join(place, name)
            state = os.lstat(path)
            mark = f"{stat.S_IFMT(state.st_mode):o}"
            if stat.S_ISLNK(state.st_mode):
                mark += f" {os.readlink(path)!r}"
            elif stat.S_ISREG(state.st_mode):
                mark += f" {state.st_size}"
                if state.st_size < 1 << 24:
                    with open(path, "rb") as stream:
                        mark += f" {hashlib.sha256(stream.read()).hexdigest()}"
            marks[os.path.relpath(path, root)] = mark
    return marks
