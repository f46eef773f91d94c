"""Tables of a source: a file, a folder in Hub layout, or a data set of the Hub. All are read by `records`.

`datasets` only tells which files make up a split. It reads no rows, so its cache never holds any.
"""

from __future__ import annotations

import glob
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from msa_lite.data.forms import row_columns
from msa_lite.data.records import READ_ALONE, READERS, ending_of, row_place, stream_file
from msa_lite.errors import DataError, UsageError, nearest
from msa_lite.io.console.libraries import require
from msa_lite.io.files.addresses import HUB_FILES
from msa_lite.io.files.reading import local_path, open_file, read_bytes
from msa_lite.io.weights.hub import explain
from msa_lite.settings import DataSource

logger = logging.getLogger(__name__)

_CARDS = ["README.md", ".huggingface.yaml"]  # they name the files of each configuration and split


class RecordPlace(NamedTuple):
    """The place of a record."""

    file: str
    """The file in its folder; "" where a source is one file."""
    line: int | None
    """The line in which it begins; None where it is not known."""

    def of_row(self, row: int) -> str:
        """Return where a row stands, for messages."""
        return f"{self.file}, {row_place(row, self.line)}" if self.file else row_place(row, self.line)


@dataclass(frozen=True)
class RecordTable:
    """The records of a source; a record may lack columns."""

    records: Sequence[dict[str, Any]]
    places: Sequence[RecordPlace]

    @property
    def column_names(self) -> list[str]:
        """Return the columns that any record has, in their order."""
        return list(dict.fromkeys(key for record in self.records for key in record))

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.records)


def load_table(source: DataSource) -> RecordTable:
    """Load the table of a source. Raise UsageError or DataError if that fails."""
    placed = list(_stream(source, to_fetch=True))
    return RecordTable([record for _, record in placed], [place for place, _ in placed])


def stream_table(source: DataSource) -> Iterator[tuple[RecordPlace, dict[str, Any]]]:
    """Yield the records of a source in its order. Raise as `load_table`.

    Nothing is fetched or read beyond the record that the caller takes, and a little more of its file.
    """
    return _stream(source, to_fetch=False)


def _stream(source: DataSource, to_fetch: bool) -> Iterator[tuple[RecordPlace, dict[str, Any]]]:
    for name, path in _files(source, to_fetch):
        yield from ((RecordPlace(name, line), record) for line, record in stream_file(path, row_columns(source)))


def _files(source: DataSource, to_fetch: bool) -> list[tuple[str, Path | str]]:
    """Return the files of a source, each with its name in a folder. to_fetch: fetch those of the Hub, too."""
    path = local_path(source.path)
    if path.is_file():
        if ending_of(path) not in READERS:
            raise UsageError(f"{path}: unknown ending '{path.suffix}'; choose from {', '.join(READERS)}, or a folder")
        if path.stat().st_size == 0:
            raise DataError(f"{path}: the data set is empty")
        _choose_split(source, {"train": None})
        return [("", path)]
    repo, file = _place(source)
    if file:
        _check_ending(source, file)
        _choose_split(source, {"train": None})
        names = [file]
    else:
        with _layout(source) as folder:
            names = _split_files(source, folder)
            if path.is_dir():
                return [(name, path / name) for name in names]
    if not to_fetch:
        return [(name, f"{HUB_FILES}{repo}@{pin_source(source).revision}/{name}") for name in names]
    fetched = _fetch(pin_source(source), [glob.escape(name) for name in names])
    if file and not (fetched / file).exists():
        raise UsageError(f"{source.path}: {repo} has no such file at {source.revision or 'main'}")
    return [(name, fetched / name) for name in names]


@contextmanager
def _layout(source: DataSource) -> Iterator[Path]:
    """Yield a folder whose names of files and cards are the source's: its own, or one of empty files for the Hub's."""
    path = local_path(source.path)
    if path.is_dir():
        _check_folder(path)
        yield path
        return
    if path.exists():
        raise UsageError(f"{path}: is no file but a pipe or device")
    if not is_remote_data(source):
        raise UsageError(f"{source.path}: no such file or folder")
    source = pin_source(source)
    cards = _fetch(source, _CARDS)
    from huggingface_hub import get_cached_repo_tree

    with tempfile.TemporaryDirectory() as folder:
        for file in get_cached_repo_tree(source.path, repo_type="dataset", revision=source.revision):
            place = Path(folder, file.path)
            if ".." in place.parts:
                raise DataError(f"{source.path}: has a file outside of itself, {file.path}")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
        for card in filter(os.path.exists, (cards / name for name in _CARDS)):
            shutil.copy(card, folder)
        _check_folder(Path(folder))
        yield Path(folder)


def _fetch(source: DataSource, names: Sequence[str]) -> Path:
    """Return the folder in which files of a data set of the Hub are, fetched if they are not. Raise UsageError."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                _place(source)[0], repo_type="dataset", revision=source.revision, allow_patterns=list(names)
            )
        )
    except Exception as error:  # the errors of the HTTP client underneath have no base that is the Hub library's own
        raise UsageError(f"{source.path}: cannot be loaded ({explain(error)})") from error


def _check_folder(folder: Path) -> None:
    """Raise DataError for data files that are no files but pipes and the like, and for YAML aliases in the card.

    A few lines of aliases may expand to gigabytes.
    """
    for path in folder.rglob("*"):
        if ending_of(path) in READERS and not path.is_dir() and not path.is_file():
            os.close(open_file(path, DataError))
    for card in filter(os.path.exists, (folder / name for name in _CARDS)):
        _check_card(card)


def _check_card(path: Path) -> None:
    import yaml

    text = read_bytes(path, kind=DataError).decode("utf-8", errors="replace")
    head = text.removeprefix("---\n").partition("\n---")[0] if text.startswith("---\n") else ""
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(head if path.suffix == ".md" else text)):
            raise DataError(f"{path}: YAML aliases in its head; write the values out")
    except (yaml.YAMLError, RecursionError) as error:
        raise DataError(f"{path}: its head is no YAML ({' '.join(str(error).split())})") from error


def _split_files(source: DataSource, folder: Path) -> list[str]:
    """Return the names of the files in a folder that hold the source's configuration and split."""
    require("train", f"{source.path}: {READ_ALONE}")
    import datasets

    folder = folder.resolve()
    try:
        with tempfile.TemporaryDirectory() as cache:
            builder = datasets.load_dataset_builder(str(folder), source.name, cache_dir=cache)
    except Exception as error:  # the library raises whatever it raises; all of it means "not readable"
        reason = " ".join(str(error).replace(str(folder), source.path).split()).partition(" with any supported ext")[0]
        raise UsageError(f"{source.path}: cannot be loaded ({type(error).__name__}: {reason})") from error
    splits = {str(split): files for split, files in builder.config.data_files.items()}
    _say_what_is_left_out(source, folder, set(chain.from_iterable(splits.values())))
    paths = _choose_split(source, splits)
    names = [os.path.relpath(path, folder) for path in paths]
    for name in names:
        if name.startswith(".."):
            raise DataError(f"{source.path}: its card names {name}, which is outside of it")
        _check_ending(source, name)
    return names


def _check_ending(source: DataSource, name: str) -> None:
    """Raise UsageError for a file that no reader reads."""
    if ending_of(Path(name)) not in READERS:
        way = "; write what save_to_disk wrote with to_parquet" if name.endswith(".arrow") else ""
        raise UsageError(f"{source.path}: {name} has an unknown ending; choose from {', '.join(READERS)}{way}")


def _place(source: DataSource) -> tuple[str, str]:
    """Return the repository of a source, and the file in it; "" for all of them."""
    if not source.path.startswith(HUB_FILES):
        return source.path, ""
    *names, file = source.path.removeprefix(HUB_FILES).split("/", 2)
    return "/".join(names), file


def _say_what_is_left_out(source: DataSource, folder: Path, read: Collection[str]) -> None:
    """Warn of data files beside those of a folder's splits, where no card names the files.

    A .txt file, such as a licence, counts only where others are read.
    """
    if any((folder / card).exists() for card in _CARDS):
        return
    kinds = READERS.keys() - ({".txt"} - {ending_of(Path(name)) for name in read})
    found = [path for path in folder.rglob("*") if ending_of(path) in kinds and str(path) not in read]
    names = sorted(str(path.relative_to(folder)) for path in found)
    if names := [name for name in names if not name.startswith(".")]:
        logger.warning(
            "%s: rows of %s are not read: in a folder, `datasets` takes files of one kind, and if one is named after a "
            "split, no others; give a file by itself, or name all in README.md",
            source.path,
            ", ".join(names),
        )


def configurations(source: DataSource) -> list[str]:
    """Return the names of a source's configurations; none where they cannot be read, of which loading says why."""
    import datasets

    try:
        with _layout(source) as folder:
            return list(datasets.get_dataset_config_names(str(folder)))
    except Exception:
        return []


def _choose_split(source: DataSource, splits: Mapping[str, Any]) -> Any:
    split = source.split or ("train" if "train" in splits else next(iter(splits)))
    if split not in splits:
        raise UsageError(f"{source.path}: no split '{split}'{nearest(split, splits)}; there are {', '.join(splits)}")
    if source.split is None and len(splits) > 1 and "train" not in splits:
        raise UsageError(f"{source.path}: which split? There are {', '.join(splits)}; set data.split in the recipe")
    return splits[split]


def is_remote_data(source: DataSource) -> bool:
    """Check whether a source is no path on this machine and could be a data set on the Hub."""
    if source.path.startswith(HUB_FILES):
        return True
    path = local_path(source.path)
    is_path = ending_of(path) in READERS or source.path.startswith((".", "/", "~")) or source.path.count("/") > 1
    return not path.exists() and not is_path


def pin_source(source: DataSource) -> DataSource:
    """Resolve a source's Hub revision to a commit (from the cache when the Hub is out of reach).

    A local source stays as it is; so does one without revision that cannot be resolved offline. Raise UsageError when
    the Hub has no such data set or revision.
    """
    if not is_remote_data(source) or re.fullmatch("[0-9a-f]{40}", source.revision or ""):
        return source
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RevisionResolutionError

    try:
        revision = HfApi().resolve_revision(_place(source)[0], repo_type="dataset", revision=source.revision)
    except Exception as error:  # the errors of the HTTP client underneath have no base that is the Hub library's own
        if isinstance(error, RevisionResolutionError) and source.revision is None:
            return source
        raise UsageError(
            f"{source.path}: no such file or folder, and it could not be fetched from the Hub ({explain(error)})"
        ) from error
    return replace(source, revision=revision.resolved)
