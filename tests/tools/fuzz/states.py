"""The states of a folder that a kill of a command may leave: one before each file operation, and within each write.

Python tells an audit hook of every operation before it is done, whoever calls it: open, rename, replace, unlink, rmdir,
mkdir, link, truncate, connect. The command runs once; the hook keeps the folder as it is then, and that is what SIGKILL
at this moment leaves, for what the process still has in buffers of its own is lost. Two neighbours differ by one
operation, and by what was written meanwhile: libraries in C, such as safetensors, torch and sqlite, tell nobody.
Of each file that was written in between there are two states more: the file is empty, and it holds half.

Not covered: the order in which a machine that loses its power writes to its disk, and several files that are half
written at once.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.vary import Listing

_OPERATIONS = (
    "open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "sqlite3.connect",
)  # fmt: skip
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_REPLACES = ".replaces.json"  # holds the number of a folder's inode, which a copy does not have
_MARKS = ("complete", "manifest.json", ".msa-lite-partial.json", "report.json", "rung.json", "recipe.yaml")
Content = dict[str, bytes | None]
"""What is in a folder: bytes by path, None for a folder."""


Known = dict[str, tuple[tuple[int, ...] | None, bytes]]
"""The inode, time and size of files, with their bytes, by path."""
_TICK = 50 * 10**6  # nanoseconds within which a file may be written twice at the same time


@dataclass(frozen=True)
class State:
    """A folder as a kill leaves it."""

    operation: str
    """The operation that the kill prevents, or cuts off: "os.rename", "half", …"""
    place: str
    """The first path that the operation changes."""
    content: Content
    inodes: dict[int, str]
    """The path of each folder by its inode."""

    def restore(self, root: Path, without: frozenset[str]) -> None:
        """Put a folder into this state. without: names directly below it that stay as they are."""
        now = read_content(root, without)
        for name in sorted(now.keys() - self.content.keys(), reverse=True):
            shutil.rmtree(root / name) if now[name] is None else (root / name).unlink(missing_ok=True)
        for name, content in sorted(self.content.items()):
            path = root / name
            if content is None:
                path.mkdir(exist_ok=True)
            elif now.get(name) != content:
                path.unlink(missing_ok=True)
                path.write_bytes(content)
        for path in (root / name for name in self.content if name.endswith(_REPLACES)):
            with suppress(ValueError, KeyError):  # half-written; the folder is gone
                former = (root / self.inodes[json.loads(path.read_bytes())["inode"]]).stat()
                path.write_text(json.dumps({"device": former.st_dev, "inode": former.st_ino}, indent=2) + "\n")


@dataclass
class Recorder:
    """Keeps the states of a folder while a command runs in this process."""

    root: Path
    without: frozenset[str]
    """Names directly below the folder that do not count."""
    file: Path
    """Gets the states when the command ends."""
    _kept: list[tuple[str, dict[str, tuple[int, int, bytes | None]]]] = field(default_factory=list)
    _known: Known = field(default_factory=dict)
    _busy: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        """Begin to listen, to the end of the process. Folders are listed in the worst order: marks come last."""
        listdir, scandir = os.listdir, os.scandir
        os.listdir = lambda *place: sorted(listdir(*place), key=_late)  # type: ignore[assignment]
        order = partial(sorted, key=lambda item: _late(item.name))
        os.scandir = lambda *place: Listing(scandir(*place), order)  # type: ignore[assignment]
        sys.addaudithook(self._hear)

    def end(self) -> None:
        """Keep the last state, too, and write all of them."""
        self._keep("end")
        self._busy.acquire()
        self.file.write_bytes(pickle.dumps(self._kept))

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _OPERATIONS or (event == "open" and not arguments[2] & _WRITING):
            return
        self._keep(event)

    def _keep(self, event: str) -> None:
        if self._busy.acquire(blocking=False):  # not for what it does itself
            try:
                self._kept.append((event, dict(_scan(self.root, self.without, self._known))))
            finally:
                self._busy.release()


def _late(name: str) -> tuple[bool, str]:
    """Return the place of a name in a listing; that of a mark, by which something counts as whole, is at the end."""
    return name in _MARKS, name


def _scan(
    root: Path, without: frozenset[str], known: Known | None = None
) -> Iterator[tuple[str, tuple[int, int, bytes | None]]]:
    """Yield the path of each entry with its inode, its time of change and its bytes, which are None for a folder.

    known: files that were read before; they are read again where they have changed since, or may have.
    """
    known = {} if known is None else known
    places = [""]
    while places:
        place = places.pop()
        with os.scandir(root / place) as items:
            for item in sorted(items, key=lambda item: item.name):
                name = f"{place}/{item.name}".removeprefix("/")
                if name in without:
                    continue
                state = item.stat(follow_symlinks=False)
                if stat.S_ISDIR(state.st_mode):
                    places.append(name)
                    yield name, (state.st_ino, 0, None)
                else:
                    mark = (state.st_ino, state.st_mtime_ns, state.st_size)
                    former, content = known.get(name, (None, b""))
                    if mark != former or time.time_ns() - state.st_mtime_ns < _TICK:
                        now = Path(item.path).read_bytes()
                        content = content if now == content else now
                        known[name] = (mark, content)
                    yield name, (state.st_ino, state.st_mtime_ns, content)


def read_content(root: Path, without: frozenset[str]) -> Content:
    """Return what is in a folder."""
    return {name: content for name, (_, _, content) in _scan(root, without)}


def load_states(file: Path) -> list[State]:
    """Return the different states that a recorder has kept, in their order."""
    kept, states = pickle.loads(file.read_bytes()), dict[int, State]()
    for (operation, before), (_, after) in zip(kept, [*kept[1:], kept[-1]], strict=True):
        changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        content = {name: entry[2] for name, entry in before.items()}
        inodes = {entry[0]: name for name, entry in before.items()}
        found = [State(operation, min(changed, default=""), content, inodes)]
        for name in sorted(filter(after.get, changed), key=lambda name: after[name][1]):
            inode, _, whole = after[name]
            is_moved = inode in inodes and before.get(name, (None,))[0] != inode
            if whole is None or is_moved or name.endswith(".sqlite"):  # which never leaves half of what it writes
                continue
            former = content.get(name) or b""
            start = len(former) if whole.startswith(former) else 0  # a line was added, or all is new
            missing = {place: None for place in after if name.startswith(f"{place}/") and place not in content}
            for what, length in (("cut off", start), ("half", (start + len(whole)) // 2), ("whole", len(whole))):
                content = {**content, **missing, name: whole[:length]}
                found.append(State(what, name, content, inodes))
        for state in found:
            key = hash(frozenset(state.content.items()))
            if key not in states or states[key].operation == "whole":
                states[key] = state
    return [*states.values()]
