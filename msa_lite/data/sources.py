"""Sources of rows: a Hub id, a folder in Hub layout, or a file, which is checked before a library reads it."""

from __future__ import annotations

import codecs
import csv
import functools
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

from msa_lite.errors import DataError, UsageError, clip, nearest
from msa_lite.io.files.reading import local_path, open_file, parse_json, read_bytes, read_text
from msa_lite.io.weights.hub import explain

_LINE = 256 << 20  # bytes of a row
WHOLE_FILE = 1 << 30  # bytes of a JSON list or a text, which memory must hold
_CHUNK = 1 << 20
_BLANK = b" \t\r\n"
_FLAT = 50  # a row with at most this many brackets cannot be nested too deep
_SHOWN = 40  # characters of a row to show in a message
_PARQUET = b"PAR1"


def check_file(path: Path) -> None:
    """Raise DataError, with the row's number, for a file whose content does not match its ending.

    .jsonl, .json: objects, one after the other, or a list of objects or texts. .csv, .txt: UTF-8 text without zero
    bytes. .parquet: it begins and ends as such. Others are only checked to be regular files.
    """
    kind = path.suffix
    with os.fdopen(open_file(path, DataError), "rb") as stream:
        if kind in (".json", ".jsonl"):
            _check_json(path, stream)
        elif kind in (".csv", ".txt"):
            _check_text(path, stream)
        elif kind == ".parquet":
            _check_parquet(path, stream)


def csv_columns(path: Path) -> list[str]:
    """Return the names in the first row of a CSV file.

    Raise DataError where the row after it has more cells, as with a comma in a text without quotes: pandas would take
    the first cell for a row number and shift the others by a column.
    """
    csv.field_size_limit(_LINE)
    with open(path, encoding="utf-8-sig", newline="") as stream:
        try:
            rows = (row for row in csv.reader(stream) if any(cell.strip() for cell in row))
            names, first = next(rows, []), next(rows, [])
        except csv.Error as error:
            raise DataError(f"{path}: not CSV ({error})") from error
    if len(first) > len(names):
        raise DataError(
            f"{path}: row 0: {len(first)} cells for {len(names)} columns; write texts that hold commas in double quotes"
        )
    return names


def check_folder(folder: Path) -> None:
    """Check the data files below a folder, as `check_file` does, and that its README.md has no YAML aliases."""
    for path in sorted(folder.rglob("*")):
        if not path.is_dir() and not any(name.startswith(".") for name in path.relative_to(folder).parts):
            state = path.stat() if path.exists() else None
            _check_once(path, (state.st_size, state.st_mtime_ns) if state else None)
    if (folder / "README.md").exists():
        _check_card(folder / "README.md")


@functools.lru_cache(maxsize=1024)  # a benchmark loads one folder many times
def _check_once(path: Path, state: tuple[int, int] | None) -> None:
    check_file(path)


def _check_json(path: Path, stream: BinaryIO) -> None:
    start = _first(stream)
    if start == b"[":
        rows = parse_json(read_bytes(path, WHOLE_FILE, DataError), str(path), DataError)
        kinds = {dict} if any(isinstance(row, dict) for row in rows) else {str}
        for row, value in enumerate(rows):
            if type(value) not in kinds:
                raise _no_row(path, row, json.dumps(value))
        return
    row = 0
    for line in _lines(path, stream):
        if line.strip(_BLANK):
            try:
                value = _parse(line, path, row)
            except DataError as error:
                if not line.lstrip().startswith(b"{") or isinstance(error.__cause__, UnicodeError):
                    raise
                _check_spread(path)
                return
            if not isinstance(value, dict):
                raise _no_row(path, row, line.decode(errors="replace"))
            row += 1


def _parse(line: bytes, path: Path, row: int) -> Any:
    """Parse a row as `parse_json` does, several times faster when it has neither escapes nor deep nesting."""
    if line.startswith(b"{") and b"\\u" not in line and line.count(b"[") + line.count(b"{") <= _FLAT:
        with suppress(ValueError):
            return json.loads(line.decode())
    return parse_json(line, f"{path}: row {row}", DataError)


def _check_spread(path: Path) -> None:
    """Check a file of objects that go over several lines."""
    for row, (value, text) in enumerate(_values(path, read_text(path, WHOLE_FILE, DataError))):
        parse_json(text, f"{path}: row {row}", DataError)
        if not isinstance(value, dict):
            raise _no_row(path, row, text)


def _values(path: Path, text: str) -> Iterator[tuple[Any, str]]:
    """Yield the JSON values that stand one after the other in a text, each with its part of the text."""
    decoder, place, row = json.JSONDecoder(), 0, 0
    while place < len(text):
        try:
            value, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: row {row}: not JSON ({error})") from error
        yield value, text[place:end]
        place, row = end, row + 1
        while place < len(text) and text[place].isspace():
            place += 1


def read_raw_rows(path: Path) -> list[dict[str, Any]] | None:
    """Read the objects of a checked JSON file; return None for a file above a gigabyte."""
    if path.stat().st_size > WHOLE_FILE:
        return None
    text = read_text(path, WHOLE_FILE, DataError).strip()
    return list(json.loads(text)) if text.startswith("[") else [value for value, _ in _values(path, text)]


def _no_row(path: Path, row: int, text: str) -> DataError:
    start = clip(text.strip(), _SHOWN)
    return DataError(f'{path}: row {row}: {start} is no row; a row is an object, as in {{"question": …, "answer": …}}')


def _first(stream: BinaryIO) -> bytes:
    """Return the first character of a file after any byte order mark, and go back to the beginning."""
    head = stream.read(_CHUNK).removeprefix(codecs.BOM_UTF8).lstrip(_BLANK)[:1]
    stream.seek(0)
    return head


def _lines(path: Path, stream: BinaryIO) -> Iterator[bytes]:
    for number, line in enumerate(iter(lambda: stream.readline(_LINE), b"")):
        if len(line) == _LINE:
            raise DataError(f"{path}: row {number}: longer than {_LINE >> 20} MB; divide it into several rows")
        yield line


def _check_text(path: Path, stream: BinaryIO) -> None:
    for number, line in enumerate(_lines(path, stream), start=1):
        if b"\0" in line:
            raise DataError(f"{path}: line {number}: a zero byte, which no text has")
        try:
            line.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: line {number}: not UTF-8 text ({error.reason})") from error


def _check_parquet(path: Path, stream: BinaryIO) -> None:
    size = os.fstat(stream.fileno()).st_size
    head = stream.read(4)
    stream.seek(max(0, size - 8))
    length, tail = int.from_bytes(stream.read(4), "little"), stream.read(4)
    if (head, tail) != (_PARQUET, _PARQUET) or length + 12 > size:
        raise DataError(f"{path}: not a parquet file, or cut off")


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
    """The column of questions. With the defaults here and below, other forms are recognised (`msa_lite.data.rows`)."""
    answer: str = "answer"
    """The column of answers."""
    text: str = "text"
    """The column of texts."""
    revision: str | None = None
    """A revision of a repository of the Hub."""
    messages: str | None = None
    """The column of conversations."""
    subject: str | None = None
    """The column that says whom or what a row is about. None: a usual one, if there is one (`msa_lite.data.rows`).
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
    commits = sorted({name for name in names if _COMMIT.fullmatch(name) and name != source.revision})
    if source.revision and commits:
        raise UsageError(
            f"{source.path}: it is pinned to commit {source.revision}, but the Hub is out of reach and the cache "
            f"offers {', '.join(commits)}; go online, or set data.revision in the recipe"
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
