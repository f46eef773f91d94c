"""Find tables and downloads with certain rows in the cache of `datasets`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from msa_lite.data.forms import DataSource
from msa_lite.data.records import READERS
from msa_lite.data.search import RowSearch, fills_half
from msa_lite.data.sources import is_remote_data
from msa_lite.errors import FormatError, MsaError
from msa_lite.io.files.reading import local_path, printable, read_object

_TABLES = (".arrow", ".parquet")
_DOWNLOADS = "downloads"  # files from addresses, each with a .json that names the address
_BETWEEN = "___"  # owner and name of a repository


def datasets_cache() -> Path:
    """Return the folder in which `datasets` keeps tables."""
    from huggingface_hub import constants

    place = os.environ.get("HF_DATASETS_CACHE") or os.path.join(constants.HF_HOME, "datasets")
    return Path(place).expanduser()


@dataclass(frozen=True)
class Cached:
    """A table or download in the cache in which rows stand, or may stand."""

    path: Path
    """The folder of a table, with what was made of it by `map`; or the file of a download."""
    fault: str | None = None
    """The reason why nobody can tell whether rows stand in it; None where they do."""

    def remove(self) -> None:
        """Remove it."""
        if self.path.is_dir():
            shutil.rmtree(self.path)
            return
        for name in (self.path, *(self.path.with_name(self.path.name + end) for end in (".json", ".lock"))):
            name.unlink(missing_ok=True)


def find_cached(search: RowSearch, sources: Sequence[tuple[DataSource, Sequence[Sequence[str]]]]) -> Iterator[Cached]:
    """Yield what of the cache holds rows, and what cannot be searched.

    Names of folders there are hashes that change with a file's time, so all tables are searched, whatever they were
    loaded from: files, folders, generators. The table of a file of rows is also known by the size of the file, which
    stands in its dataset_info.json, if half of a column are cells of it, however short they are.

    sources: the rows' sources, each with its columns. Links are not followed.
    """
    sizes = {size: columns for source, columns in sources if (size := _size_of(source))}
    tables: dict[Path, list[Path]] = {}
    for path in _tables():
        tables.setdefault(path.parent, []).append(path)
    for folder, files in tables.items():
        columns = sizes.get(_loaded_size(folder))
        if columns and _searched(folder, files, partial(fills_half, columns=columns)) == Cached(folder):
            yield Cached(folder)
        elif cached := _searched(folder, files, search.is_in):
            yield cached
    for path in _downloads():
        if cached := _searched(path, [path], search.is_in):
            yield cached


def is_empty() -> bool:
    """Check whether the cache has neither tables nor downloads."""
    return next(chain(_tables(), _downloads()), None) is None


def _tables() -> Iterator[Path]:
    cache = datasets_cache()
    for path in sorted(cache.rglob("*")):
        if path.suffix in _TABLES and not path.is_symlink() and cache / _DOWNLOADS not in path.parents:
            yield path


def _downloads() -> Iterator[Path]:
    for path in sorted((datasets_cache() / _DOWNLOADS).rglob("*")):
        if path.suffix not in (".json", ".lock") and path.is_file() and not path.is_symlink():
            yield path


def _searched(place: Path, files: Sequence[Path], has_rows: Callable[[Path], bool]) -> Cached | None:
    """Return what the files of a place in the cache hold of rows; None for nothing."""
    fault = None
    for file in files:
        try:
            if file.stat().st_size and has_rows(file):
                return Cached(place)
        except OSError as error:
            fault = fault or f"{printable(file)}: cannot be read ({error.strerror or error})"
        except FormatError as error:
            fault = fault or str(error)
    return Cached(place, fault) if fault else None


def _size_of(source: DataSource) -> int:
    """Return the bytes of a source's file, or of the files of its folder; 0 where there are none on this machine."""
    try:
        path = local_path(source.path)
        if path.is_file():
            return path.stat().st_size
        return sum(file.stat().st_size for file in path.rglob("*") if file.suffix in (*READERS, ".parquet"))
    except (MsaError, OSError):
        return 0


def _loaded_size(folder: Path) -> int:
    """Return the bytes of the files that a table was loaded from; 0 where nothing says so."""
    try:
        size = read_object(folder / "dataset_info.json").get("download_size")
    except FormatError:
        return 0
    return size if isinstance(size, int) else 0


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
