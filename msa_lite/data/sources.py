"""Sources of rows, which `datasets` reads: a Hub id, a folder in Hub layout, or a file."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from msa_lite.data.files import check_file, check_folder, csv_columns, read_raw_rows
from msa_lite.errors import DataError, UsageError, nearest
from msa_lite.io.hub import explain
from msa_lite.io.reading import local_path

_COMMIT = re.compile(r"[0-9a-f]{40}")
_BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}


@dataclass(frozen=True)
class DataSource:
    """A source of rows."""

    path: str
    """A Hub id, folder or file."""
    format: Literal["qa", "text"] = "qa"
    name: str | None = None
    """The configuration, as in `datasets.load_dataset`."""
    split: str | None = None
    """As in `datasets.load_dataset`."""
    question: str = "question"
    """The column of questions. With the defaults here and below, other forms are recognised (`msa_lite.data.forms`)."""
    answer: str = "answer"
    """The column of answers."""
    text: str = "text"
    """The column of texts."""
    revision: str | None = None
    """A revision of a repository of the Hub."""
    messages: str | None = None
    """The column of conversations."""
    subject: str | None = None
    """The column that says whom or what a row is about. None: a usual one, if there is one (`msa_lite.data.subjects`).
    """


def load_table(source: DataSource) -> Any:
    """Load the table of a source with `datasets`. Raise UsageError or DataError if that fails."""
    import datasets

    source, where = _locate(source)
    with _explained(source), tempfile.TemporaryDirectory() as fresh:
        if Path(where["path"]).is_dir():
            # The cache knows a folder by name and layout only: it would return the rows of another folder with that
            # name, or those from before a change.
            where |= {"cache_dir": fresh, "keep_in_memory": True}
        tables = _as_written(datasets.load_dataset(**where), where)
    files = [item["filename"] for table in tables.values() for item in table.cache_files]
    _check_commit(source, [Path(file).parent.name for file in files])  # the cache names these folders after the commit
    return _choose_split(source, tables)


def stream_table(source: DataSource) -> Iterator[dict[str, Any]]:
    """Yield the rows of a source in its order, fetching no more than the caller takes. Raise as `load_table`."""
    import datasets

    source, where = _locate(source)
    with _explained(source):
        builder = datasets.load_dataset_builder(**where)
        tables = builder.as_streaming_dataset()
    _check_commit(source, [builder.hash or ""])
    table = _choose_split(source, tables)
    with _explained(source):
        yield from table


def _as_written(tables: Any, where: Mapping[str, Any]) -> Any:
    """Return the tables of a JSON file with texts as written: Arrow would read 1999-01-31 as a time."""
    import datasets

    if where["path"] != "json" or not any(_holds_dates(table.features) for table in tables.values()):
        return tables
    records = read_raw_rows(Path(where["data_files"]))
    return tables if records is None else {name: datasets.Dataset.from_list(records) for name in tables}


def _holds_dates(feature: Any) -> bool:
    """Check for dates or times among features, also in lists and mappings of them."""
    if isinstance(feature, Mapping):
        return any(map(_holds_dates, feature.values()))
    inner = getattr(feature, "feature", None)
    return (
        _holds_dates(inner)
        if inner is not None
        else getattr(feature, "dtype", "").startswith(("timestamp", "date", "time"))
    )


@contextmanager
def _explained(source: DataSource) -> Iterator[None]:
    """Turn whatever `datasets` raises into one of our errors, and hide its progress bars."""
    import datasets

    bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    except datasets.exceptions.DatasetGenerationError as error:
        raise DataError(f"{source.path}: cannot be read ({error.__cause__ or error})") from error
    except Exception as error:  # the library raises whatever its readers raise; all of it means "not readable"
        raise UsageError(f"{source.path}: cannot be loaded ({type(error).__name__}: {error})") from error
    finally:
        if bars:
            datasets.enable_progress_bars()


def _locate(source: DataSource) -> tuple[DataSource, dict[str, Any]]:
    """Return (the source, pinned to a commit if it is on the Hub; the arguments for `datasets`)."""
    path = local_path(source.path)
    if path.is_file():
        builder = _BUILDERS.get(path.suffix)
        if builder is None:
            raise UsageError(f"{path}: unknown ending '{path.suffix}'; choose from {', '.join(_BUILDERS)}, or a folder")
        if path.stat().st_size == 0:
            raise DataError(f"{path}: the data set is empty")
        check_file(path)
        options: dict[str, Any] = {"sample_by": "document"} if builder == "text" else {}
        if builder == "csv":  # cells as written: 007 is no number, NA is a text
            options |= {"converters": dict.fromkeys(csv_columns(path), str), "keep_default_na": False}
        return source, {"path": builder, "data_files": str(path), **options}
    if path.is_dir():
        check_folder(path)
        return source, {"path": str(path), "name": source.name}
    if path.exists():
        raise UsageError(f"{path}: is no file but a pipe or device")
    if not is_remote_data(source):
        raise UsageError(f"{source.path}: no such file or folder")
    source = pin_source(source)
    return source, {"path": source.path, "name": source.name, "revision": source.revision}


def _choose_split(source: DataSource, tables: Mapping[str, Any]) -> Any:
    split = source.split or ("train" if "train" in tables else next(iter(tables)))
    if split not in tables:
        raise UsageError(f"{source.path}: no split '{split}'{nearest(split, tables)}; there are {', '.join(tables)}")
    if source.split is None and len(tables) > 1 and "train" not in tables:
        raise UsageError(f"{source.path}: which split? There are {', '.join(tables)}; set data.split in the recipe")
    return tables[split]


def _check_commit(source: DataSource, names: Sequence[str]) -> None:
    """Raise UsageError if `names` has a commit other than the one that the source is pinned to.

    Without the Hub, `datasets` returns the newest rows in its cache, whatever revision it is called with.
    """
    others = sorted({name for name in names if _COMMIT.fullmatch(name) and name != source.revision})
    if source.revision and others:
        raise UsageError(
            f"{source.path}: it is pinned to commit {source.revision}, but the Hub is out of reach and the cache "
            f"offers {', '.join(others)}; go online, or set data.revision in the recipe"
        )


def is_remote_data(source: DataSource) -> bool:
    """Check whether a source is no path on this machine and could be a data set on the Hub."""
    path = local_path(source.path)
    is_path = path.suffix in _BUILDERS or source.path.startswith((".", "/", "~")) or source.path.count("/") > 1
    return not path.exists() and not is_path


def pin_source(source: DataSource) -> DataSource:
    """Resolve a source's Hub revision to a commit (from the cache when the Hub is out of reach).

    A local source stays as it is; so does one without revision that cannot be resolved offline. Raise UsageError when
    the Hub has no such data set or revision.
    """
    if not is_remote_data(source):
        return source
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RevisionResolutionError

    try:
        revision = HfApi().resolve_revision(source.path, repo_type="dataset", revision=source.revision)
    except Exception as error:  # the errors of the HTTP client underneath have no base that is the Hub library's own
        if isinstance(error, RevisionResolutionError) and source.revision is None:
            return source
        raise UsageError(
            f"{source.path}: no such file or folder, and it could not be fetched from the Hub ({explain(error)})"
        ) from error
    return replace(source, revision=revision.resolved)
