"""Keep values by key in one SQLite file: whole once it is written, for any number of threads and processes.

Each value has a hash in front. One that is not as it was written counts as missing.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from msa_lite.errors import OutputError
from msa_lite.io.files.writing import digest

_PATIENCE = 60.0  # seconds to wait while another process writes
_HASH = 32  # characters of a value's hash


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
                database.text_factory = lambda raw: raw.decode(errors="replace")
                yield database
        except sqlite3.Error as error:
            raise OutputError(f"{path}: cannot be used as a cache ({error}); {self._advice}") from error

    def read(self, keys: Iterable[str]) -> dict[str, str]:
        """Return the values of those keys that exist, and are as they were written."""
        query, wanted, values = "SELECT key, value FROM kept WHERE key = ?", list(keys), dict[str, str]()
        for path in self._read:
            with self._open(path) as database:
                rows = [row for key in wanted for row in database.execute(query, (key,))]
            values |= {key: kept[_HASH:] for key, kept in rows if kept == _with_hash(key, kept[_HASH:])}
        return values

    def keep(self, values: Mapping[str, str]) -> None:
        """Write all values or none; they are on disk when this returns."""
        with self._open(self.path) as database:
            rows = [(key, _with_hash(key, value)) for key, value in values.items()]
            database.executemany("INSERT OR REPLACE INTO kept VALUES (?, ?)", rows)


def _with_hash(key: str, value: str) -> str:
    return digest([key, value])[:_HASH] + value
