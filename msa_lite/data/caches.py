"""Find what `datasets` has kept of data sets in its cache. The package itself is not needed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from msa_lite.data.sources import DataSource, is_remote_data
from msa_lite.io.search import holds_any, sample_texts

_BUILDERS = ("csv", "json", "parquet", "text")  # of single files; those of folders are never kept (`load_table`)
_MOST = 2000  # characters of a text to look for
_SHORTEST = 12  # characters; shorter texts stand in tables by chance
_BETWEEN = "___"  # owner and name


def datasets_cache() -> Path:
    """Return the folder in which `datasets` keeps tables."""
    from huggingface_hub import constants

    place = os.environ.get("HF_DATASETS_CACHE") or os.path.join(constants.HF_HOME, "datasets")
    return Path(place).expanduser()


def cached_tables(texts: Sequence[str]) -> Iterator[Path]:
    """Yield the folders of the cache with a table of a file in which one of these texts stands, whole.

    The names of these folders are hashes of paths and times, which change with the file, so the tables are searched.
    """
    folders = [folder for builder in _BUILDERS for folder in sorted((datasets_cache() / builder).glob("*"))]
    tables = {folder: list(folder.rglob("*.arrow")) for folder in folders if not folder.is_symlink()}
    size = sum(path.stat().st_size for paths in tables.values() for path in paths)
    known = [text for text in texts if len(text) >= _SHORTEST]
    parts = [text[:_MOST].encode("utf-8", "replace") for text in sample_texts(known, size)]
    yield from (folder for folder, paths in tables.items() if any(holds_any(path, parts) for path in paths))


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
