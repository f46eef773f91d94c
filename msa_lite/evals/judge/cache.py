"""Keep replies of judges on disk, so that nobody pays for a question twice: hash of the ask → reply.

The file holds hashes of prompts and answers alone, since these may be the data to forget; replies are letters. Where
a reply is a text, the file belongs in the folder of the run.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from msa_lite.errors import OutputError
from msa_lite.evals.judge.prompts import NONE, Ask
from msa_lite.evals.judge.settings import Ruling, Usage
from msa_lite.io.console.progress import Progress, part_of

CACHE_FILE = "judge.sqlite"
_PATIENCE = 60.0  # seconds to wait while another process writes


def cache_folder() -> Path:
    """Return the folder of the cache: $MSA_LITE_CACHE, or ~/.cache/msa-lite."""
    return Path(os.environ.get("MSA_LITE_CACHE") or "~/.cache/msa-lite").expanduser()


class Cache:
    """Keys and values in one SQLite file; threads and processes may share it, since each call is one transaction.

    Keys are hashes of asks, with the reply as value ("" for an invalid one), or hashes of whole batches, with the
    server's id as value. Raise OutputError when the file cannot be made, read or written.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Open or make the file. folder: None for `cache_folder`."""
        folder = folder or cache_folder()
        self.path = folder / CACHE_FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{folder}: cannot be made ({error}); set MSA_LITE_CACHE to another folder") from error
        with self._open() as database:
            database.execute("CREATE TABLE IF NOT EXISTS kept (key TEXT PRIMARY KEY, value TEXT NOT NULL)")

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self.path, timeout=_PATIENCE)) as database, database:
                yield database
        except sqlite3.Error as error:
            message = (
                f"{self.path}: cannot be used as cache of the judge ({error}); set MSA_LITE_CACHE to another folder"
            )
            raise OutputError(message) from error

    def read(self, keys: Iterable[str]) -> dict[str, str]:
        """Return the values of those keys that exist."""
        query = "SELECT key, value FROM kept WHERE key = ?"
        with self._open() as database:
            return dict(row for key in keys for row in database.execute(query, (key,)))

    def keep(self, values: Mapping[str, str]) -> None:
        """Write all values or none; they are on disk when this returns."""
        with self._open() as database:
            database.executemany("INSERT OR REPLACE INTO kept VALUES (?, ?)", values.items())

    def forget(self, key: str) -> None:
        """Remove a key, if it exists."""
        with self._open() as database:
            database.execute("DELETE FROM kept WHERE key = ?", (key,))


@dataclass
class Spent:
    """Calls, tokens and cost so far; the fields are those of `Usage`."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None


def answer(
    cache: Cache,
    keys: Sequence[str],
    asks: Sequence[Ask],
    progress: Progress,
    send: Callable[[Mapping[str, Ask], Progress], Spent],
) -> tuple[list[Ruling], Usage]:
    """Return verdicts from the cache, after `send` has added the missing ones; equal asks are sent once.

    keys: the hash of each ask. send: takes the missing asks by key, adds each reply to the cache as it comes, and
    returns the calls, tokens and cost.
    """
    replies = cache.read(keys)
    todo = {key: ask for key, ask in zip(keys, asks, strict=True) if key not in replies}
    total = len(set(keys))
    spent = send(todo, part_of(progress, "judge", total - len(todo), total)) if todo else Spent()
    progress("judge", total, total)
    replies = cache.read(keys)
    verdicts = [Ruling(replies[key] or NONE, bool(replies[key])) for key in keys]
    invalid = sum(not verdict.valid for verdict in verdicts)
    cached = len(asks) - len(todo)
    return verdicts, Usage(spent.calls, cached, spent.prompt_tokens, spent.completion_tokens, invalid, spent.cost)
