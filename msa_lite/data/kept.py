"""Data kept on disk: texts of the Hub that a stopped training goes on with, and tables in the cache of `datasets`."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

from msa_lite.data.forms import DataSource
from msa_lite.data.rows import stream_texts
from msa_lite.data.sources import is_remote_data, pin_source
from msa_lite.io.files.spellings import SHORTEST, holds_any, sample_texts, written_forms

logger = logging.getLogger(__name__)


def kept_texts(source: DataSource, file: Path) -> Iterator[str]:
    """Yield the texts of a source in its order. Each text that is read is kept as a line of `file`.

    A later call reads these lines first. The first line names source and revision; for another source or revision the
    file is begun anew. A source without a revision takes the file's. Raise as `stream_texts`.
    """
    head = kept_head(file)
    end, count = 0, 0
    if head is not None and head == _head(source, source.revision or head["revision"]):
        with open(file, "rb") as stream:
            end = len(stream.readline())
            for line in stream:
                if not line.endswith(b"\n"):  # a kill interrupted the writing
                    break
                if (text := json.loads(line)) is None:
                    return
                end, count = end + len(line), count + 1
                yield text
        source = replace(source, revision=head["revision"])
    else:
        source = pin_source(source)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(_head(source, source.revision)) + "\n", "utf-8")
        end = file.stat().st_size
    with open(file, "r+b") as stream:
        stream.truncate(end)
        stream.seek(end)
        for text in islice(stream_texts(source), count, None):
            stream.write(json.dumps(text).encode() + b"\n")
            yield text
        stream.write(b"null\n")  # there are no more


def kept_head(file: Path) -> dict[str, Any] | None:
    """Return the first line of a file of kept texts, with the source and its revision; None if there is none."""
    try:
        with open(file, encoding="utf-8") as stream:
            head = json.loads(stream.readline())
    except (OSError, ValueError):
        return None
    return head if isinstance(head, dict) and "revision" in head else None


def _head(source: DataSource, revision: str | None) -> dict[str, Any]:
    unread = ("messages", "subject")  # a stream of texts has neither
    fields = {key: value for key, value in asdict(source).items() if key not in unread}
    return fields | {"revision": revision}


_BUILDERS = ("csv", "json", "parquet", "text")  # of single files; those of folders are never kept (`load_table`)
_MOST = 2000  # characters of a text to look for
_LEAST, _CELLS = 4, 3  # characters of a cell that tells something, and how many it takes
_BETWEEN = "___"  # owner and name


def datasets_cache() -> Path:
    """Return the folder in which `datasets` keeps tables."""
    from huggingface_hub import constants

    place = os.environ.get("HF_DATASETS_CACHE") or os.path.join(constants.HF_HOME, "datasets")
    return Path(place).expanduser()


def cached_tables(columns: Sequence[Sequence[str]]) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of the cache with a table of a file in which texts of one of these columns stand.

    The names of these folders are hashes of paths and times, which change with the file, so the tables are searched,
    for each column on its own. A text of `SHORTEST` characters and more may stand anywhere. Shorter ones tell a table
    where at least half of a column, and three of them, are whole cells of it; "yes" and "12" stand in many tables, and
    tell none. False comes with a folder whose tables cannot be read so.
    """
    folders = [folder for builder in _BUILDERS for folder in sorted((datasets_cache() / builder).glob("*"))]
    tables = {folder: list(folder.rglob("*.arrow")) for folder in folders if not folder.is_symlink()}
    size = sum(path.stat().st_size for paths in tables.values() for path in paths)
    needles, short = list[bytes](), list[set[str]]()
    for texts in columns:
        known = [text for text in texts if len(text.strip()) >= SHORTEST]
        for text in sample_texts(known, size * max(1, len(columns))):
            needles += written_forms(text.strip()[:_MOST].strip())
        cells = {cell for text in texts if len(cell := text.strip()) >= _LEAST}
        if len(known) < len(texts) / 2 and len(cells) >= _CELLS:
            short.append(cells)
    for folder, paths in tables.items():
        if any(holds_any(path, needles) for path in paths):
            yield folder, True
        elif short and paths:
            try:
                if any(_has_cells(path, short) for path in paths):
                    yield folder, True
            except Exception as error:  # pyarrow's, of a damaged table; or it is not installed
                logger.debug("%s: %s", folder, error)
                yield folder, False


def _has_cells(path: Path, columns: Sequence[set[str]]) -> bool:
    """Check whether half of the texts of a column, or more, are whole cells of a table. Raise what pyarrow raises."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as stream:
        left = [set(texts) for texts in columns]
        for batch in stream:
            for column in batch.columns:
                if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
                    cells = {str(cell).strip() for cell in column.to_pylist() if cell is not None}
                elif pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
                    cells = {str(cell) for cell in column.to_pylist()}
                else:
                    continue
                for texts in left:
                    texts -= cells
    found = ((len(texts) - len(rest), len(texts)) for rest, texts in zip(left, columns, strict=True))
    return any(count >= max(_CELLS, whole / 2) for count, whole in found)


def cached_repositories(source: DataSource) -> list[Path]:
    """Return the folders of the cache with tables of a data set on the Hub; none for data on this machine."""
    if not is_remote_data(source):
        return []
    name = _plain_name(source.path.replace("/", _BETWEEN))
    return [folder for folder in sorted(datasets_cache().glob(f"*{_BETWEEN}*")) if _plain_name(folder.name) == name]


def download_folder(source: DataSource) -> Path | None:
    """Return where downloads of a data set on the Hub are kept; None for data on this machine."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    if not is_remote_data(source):
        return None
    return Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=source.path, repo_type="dataset"))


def _plain_name(name: str) -> str:
    """Return a name without what `datasets` changes in it: capitals, and blanks between words."""
    return name.replace("_", "").lower()
