"""Walls between the tests and whoever runs them: working folder, home, caches and environment of theirs stay out.

A test works in an empty folder, has a home of its own, and sees only the variables in `KEPT`. What it opens, lists or
changes in the clone or in the true home all the same is noted, here and in forked children, and fails it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KEPT = {
    "PATH", "LD_LIBRARY_PATH", "TMPDIR", "CI", "PYTHONPATH", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE",
    "ATEN_CPU_CAPABILITY", "HF_HUB_OFFLINE", "MSA_DRAWS", "MSA_PLAIN", "MSA_VARY",
}  # fmt: skip
"""The variables that tests may see: where programs are, how the processor is used, what the tests themselves take."""
_KEPT_STARTS = ("PYTEST_", "OMP_", "MKL_", "ONEDNN_", "CUDA_", "NVIDIA_", "PIP_", "SSL_")
_PLACE, _TRUE_HOME = "PYTEST_PLACE", "PYTEST_TRUE_HOME"  # of ours; child processes know by them that walls stand

_READS = {"open": 0, "os.listdir": 0, "os.scandir": 0}
_WRITES = {
    "os.mkdir": 0, "os.remove": 0, "os.rmdir": 0, "os.truncate": 0, "os.chmod": 0, "os.chown": 0, "os.utime": 0,
    "sqlite3.connect": 0, "os.rename": 1, "os.link": 1, "os.symlink": 1,
}  # fmt: skip
"""The audit events of Python that use a path, each with the place of the path among its arguments."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_IGNORED = {line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines()}


@dataclass(frozen=True)
class Walls:
    """The folders on this side of the walls, and what must not be used beyond them."""

    place: Path
    """The folder of all that the tests have instead."""
    true_home: str
    """The home of whoever runs the tests."""
    process: str
    """The name of the test process; those that it starts have the same."""

    @property
    def home(self) -> Path:
        """The home of the tests."""
        return self.place / "home"

    @property
    def working_folder(self) -> Path:
        """The empty folder that the tests work in."""
        return self.place / f"here-{self.process}"

    @property
    def notes(self) -> Path:
        """The file that says what was used beyond the walls, a line each; it is there only if something was."""
        return self.place / f"notes-{self.process}"

    def allow(self, path: str, writes: bool) -> bool:
        """Check whether a test may use a path: of the clone it may read what git knows, of the true home nothing."""
        if any(_is_in(path, folder) for folder in self._open):
            return True
        if _is_in(path, str(ROOT)):
            parts = Path(path).relative_to(ROOT).parts
            return "__pycache__" in parts or not (writes or _IGNORED.intersection(parts[:1]))
        return not _is_in(path, self.true_home) or _is_in(path, tempfile.gettempdir())

    @cached_property
    def _open(self) -> tuple[str, ...]:
        """The folders that are used freely: those of the tests, installed packages, and data sets beside the clone."""
        installed = (sys.prefix, sys.base_prefix, f"{self.true_home}/.local/lib")
        return (str(self.place), *installed, *map(os.path.realpath, installed), str(ROOT.parent / "shared"))

    def watch(self) -> None:
        """Note from now on what this process uses beyond the walls."""
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _READS and event not in _WRITES:
            return
        path = arguments[_READS[event] if event in _READS else _WRITES[event]]
        if not isinstance(path, str | bytes | os.PathLike):
            return
        writes = event in _WRITES or (event == "open" and bool((arguments[2] or 0) & _WRITING))
        try:
            used = os.path.abspath(os.fsdecode(path))
        except OSError:  # the working folder is gone
            return
        if not self.allow(used, writes):
            with self.notes.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{'writes' if writes else 'reads'} {used}\n")


def _is_in(path: str, folder: str) -> bool:
    return folder not in ("", "/") and (path == folder or path.startswith(f"{folder}/"))


def raise_walls() -> Walls:
    """Replace home and environment of this process; return the walls, perhaps those of the process above it."""
    kept = {key: value for key, value in os.environ.items() if key in KEPT or key.startswith(_KEPT_STARTS)}
    if _PLACE not in kept:
        kept |= {_TRUE_HOME: os.path.expanduser("~"), _PLACE: tempfile.mkdtemp(prefix="msa-lite-tests-")}
    os.environ.clear()
    os.environ.update(kept)
    walls = standing_walls()
    assert walls is not None
    for folder in (walls.home, walls.working_folder):
        folder.mkdir(exist_ok=True)
    os.environ |= {
        "HOME": str(walls.home),
        "LANG": "C.UTF-8",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(walls.place / "hypothesis"),
    }
    return walls


def standing_walls() -> Walls | None:
    """Return the walls that this process was started behind, if any."""
    place, true_home = (os.environ.get(name) for name in (_PLACE, _TRUE_HOME))
    process = os.environ.get("PYTEST_XDIST_WORKER", "alone")
    return Walls(Path(place), true_home, process) if place and true_home else None
