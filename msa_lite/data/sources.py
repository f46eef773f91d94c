"""Tables of a source: a file, read by `records`, or a folder or Hub id, which `datasets` reads once it is checked."""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from msa_lite.data.forms import DataSource
from msa_lite.data.lines import Numbered
from msa_lite.data.records import READERS, check_file, load_file, stream_file
from msa_lite.errors import DataError, UsageError, nearest
from msa_lite.io.files.reading import local_path, read_bytes
from msa_lite.io.weights.hub import explain


def check_folder(folder: Path, names: frozenset[str]) -> None:
    """Check the data files below a folder, as `check_file` does, and that its README.md has no YAML aliases."""
    for path in sorted(folder.rglob("*")):
        if not path.is_dir() and not any(name.startswith(".") for name in path.relative_to(folder).parts):
            state = path.stat() if path.exists() else None
            _check_once(path, (state.st_size, state.st_mtime_ns) if state else None, names)
    if (folder / "README.md").exists():
        _check_card(folder / "README.md")


@functools.lru_cache(maxsize=1024)  # a benchmark loads one folder many times
def _check_once(path: Path, state: tuple[int, int] | None, names: frozenset[str]) -> None:
    check_file(path, names)


def _check_card(path: Path) -> None:
    """Raise DataError for a data card with YAML aliases: a few lines of them may expand to gigabytes."""
    import yaml

    text = read_bytes(path, kind=DataError).decode("utf-8", errors="replace")
    block = text.removeprefix("---\n").partition("\n---")[0] if text.startswith("---\n") else ""
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(block, yaml.SafeLoader)):
            raise DataError(f"{path}: YAML aliases in its head; write the values out")
    except (yaml.YAMLError, RecursionError) as error:
        raise DataError(f"{path}: its head is no YAML ({' '.join(str(error).split())})") from error


_COMMIT = re.compile(r"[0-9a-f]{40}")
_ENDINGS = (*READERS, ".parquet")


def load_table(source: DataSource) -> Any:
    """Load the table of a source: a `FileTable` for a file, one of `datasets` for anything else.

    Raise UsageError or DataError if that fails.
    """
    if path := _plain_file(source):
        return load_file(path, source.row_columns)
    source, where = _locate(source)
    import datasets

    with _explained(source), tempfile.TemporaryDirectory() as fresh:
        if Path(where["path"]).is_dir():
            # The cache knows a folder by name and layout only: it would return the rows of another folder with that
            # name, or those from before a change.
            where |= {"cache_dir": fresh, "keep_in_memory": True}
        tables = datasets.load_dataset(**where)
    files = [item["filename"] for table in tables.values() for item in table.cache_files]
    _check_commit(source, [Path(file).parent.name for file in files])  # the cache names these folders after the commit
    return _choose_split(source, tables)


def stream_table(source: DataSource) -> Iterator[Numbered]:
    """Yield the rows of a source in its order, each with its line if it is in a file. Raise as `load_table`.

    Nothing is fetched or read beyond the row that the caller takes.
    """
    if path := _plain_file(source):
        yield from stream_file(path, source.row_columns)
        return
    source, where = _locate(source)
    import datasets

    with _explained(source):
        builder = datasets.load_dataset_builder(**where)
        tables = builder.as_streaming_dataset()
    _check_commit(source, [builder.hash or ""])
    table = _choose_split(source, tables)
    with _explained(source):
        yield from ((None, row) for row in table)


def _plain_file(source: DataSource) -> Path | None:
    """Return the path of a file that `records` reads; None for other sources. Raise DataError for an empty one."""
    path = local_path(source.path)
    if not path.is_file() or path.suffix not in READERS:
        return None
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the data set is empty")
    _choose_split(source, {"train": None})
    return path


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
        if path.suffix not in _ENDINGS:
            raise UsageError(f"{path}: unknown ending '{path.suffix}'; choose from {', '.join(_ENDINGS)}, or a folder")
        check_file(path)
        return source, {"path": "parquet", "data_files": str(path)}
    if path.is_dir():
        check_folder(path, source.row_columns)
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
    commits = sorted({name for name in names if _COMMIT.fullmatch(name) and name != source.revision})
    if source.revision and commits:
        raise UsageError(
            f"{source.path}: it is pinned to commit {source.revision}, but the Hub is out of reach and the cache "
            f"offers {', '.join(commits)}; go online, or set data.revision in the recipe"
        )


def is_remote_data(source: DataSource) -> bool:
    """Check whether a source is no path on this machine and could be a data set on the Hub."""
    path = local_path(source.path)
    is_path = path.suffix in _ENDINGS or source.path.startswith((".", "/", "~")) or source.path.count("/") > 1
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
