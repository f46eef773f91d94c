"""Search folders for files in which rows to forget stand."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from msa_lite.data import DataSource, Row
from msa_lite.data.rows import read_any_rows
from msa_lite.errors import MsaError, UsageError, join_faults
from msa_lite.io.files.reading import local_path, printable
from msa_lite.io.files.search import TextSearch
from msa_lite.pipeline.prepare.questions import source_of
from msa_lite.pipeline.run.folder import RunFolder, open_run


@dataclass(frozen=True)
class FoundRows:
    """The outcome of a search for rows to forget."""

    json_keys: ClassVar = {"found": "files", "not_searched": "unread"}

    files: Sequence[str]
    """The files in which a text of a row stands."""
    unread: Sequence[str]
    """The files that could not be read, with the reason."""


def search_folders(folder: str | Path, places: Sequence[str | Path]) -> FoundRows:
    """Search folders for files that hold a question, answer or text of a run's rows to forget.

    folder: that of the run. A text of fewer than 12 bytes is not looked for. It is found in UTF-8, as it stands or
    escaped as in JSON; in packed files (Parquet, zip, PDF) and other encodings it is not. Links are not followed.
    Raise UsageError for a folder that is no run or not there, and for rows whose files are gone.
    """
    run = open_run(folder)
    search = TextSearch(_texts(run))
    if not search:
        raise UsageError(f"{run.folder}: all texts of its rows are too short to be looked for")
    found, unread = [], []
    for place in places:
        path = local_path(place)
        if not path.exists():
            raise UsageError(f"{path}: no such folder")
        for file in _files(path):
            try:
                if search.is_in(file):
                    found.append(printable(file))
            except (MsaError, OSError) as error:
                unread.append(f"{printable(file)}: {getattr(error, 'strerror', None) or error}")
    return FoundRows(found, unread)


def forget_sources(run: RunFolder) -> Iterator[tuple[str, DataSource]]:
    """Yield the data sets of a run that hold rows to forget, by their keys in the recipe."""
    sets = run.recipe.data_sets
    for key, data in {"forget.data": sets["forget"], "evaluate.forget": sets.get("evaluate.forget")}.items():
        if data:
            yield key, source_of(data, run.recipe.columns)


def _texts(run: RunFolder) -> list[str]:
    rows, faults = list[Row](), []
    for key, source in forget_sources(run):
        try:
            rows += read_any_rows(source.path, source)
        except (MsaError, OSError) as error:
            faults.append(f"{key}: {error}")
    if faults:
        raise UsageError(join_faults(f"{run.folder}: its rows cannot be read; put their files back to search:", faults))
    return [text for row in rows for text in (row.question, row.answer, row.text)]


def _files(path: Path) -> Iterator[Path]:
    """Yield a file, or the regular files below a folder."""
    if path.is_file():
        yield path
    for folder, _, names in os.walk(path):
        for file in sorted(Path(folder, name) for name in names):
            if file.is_file() and not file.is_symlink():
                yield file
