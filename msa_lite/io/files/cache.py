"""Keep values by key in one SQLite file: whole once it is written, for any number of threads and processes."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from msa_lite.errors import OutputError

_PATIENCE = 60.0  # seconds to wait while another process writes


class Cache:
    """Keys and values in one SQLite file; threads and processes may share it, since each call is one transaction.

    Raise OutputError when the file cannot be made, read or written.
    """

    def __init__(self, path: Path, advice: str, others: Sequence[Path] = ()) -> None:
        """Open or make the file. advice: what to try where it cannot be used. others: files that are read, too."""
        self.path, self._advice = path, advice
        self._read = [other for other in others if other.is_file()] + [path]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{path.parent}: cannot be made ({error}); {advice}") from error
        with self._open(path) as database:
            database.execute("CREATE TABLE IF NOT EXISTS kept (key TEXT PRIMARY KEY, value TEXT NOT NULL)")

    @contextmanager
    def _open(self, path: Path) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(path, timeout=_PATIENCE)) as database, database:
                yield database
        except sqlite3.Error as error:
            raise OutputError(f"{path}: cannot be used as a cache ({error}); {self._advice}") from error

    def read(self, keys: Iterable[str]) -> dict[str, str]:
        """Return the values of those keys that exist."""
        query, wanted, values = "SELECT key, value FROM kept WHERE key = ?", list(keys), dict[str, str]()
        for path in self._read:
            with self._open(path) as database:
                values |= dict(row for key in wanted for row in database.execute(query, (key,)))
        return values

    def keep(self, values: Mapping[str, str]) -> None:
        """Write all values or none; they are on disk when this returns."""
        with self._open(self.path) as database:
            database.executemany("INSERT OR REPLACE INTO kept VALUES (?, ?)", values.items())
