"""Gather the texts of a run's rows to forget, or hashes of them, and search the files of others for them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from msa_lite.data import DataSource, Row
from msa_lite.data.rows import read_any_rows
from msa_lite.data.search import NO_TEXTS, RowSearch, Texts
from msa_lite.data.sources import load_table
from msa_lite.errors import FormatError, MsaError
from msa_lite.io.files.reading import printable, read_object
from msa_lite.io.finished.seal import entries
from msa_lite.pipeline.prepare.questions import source_of
from msa_lite.pipeline.purge.holdings import Remark, Survey
from msa_lite.pipeline.run.folder import RunFolder
from msa_lite.record.seal import KEY_FILE, RECORD_FILE, RecordKey, load_key, load_record
from msa_lite.report.provenance import PURGED_FILE

_TEXTS = ("question", "answer", "text")
_PARTS = ("instruction", "input")  # columns that a question is put together from
_OFTEN, _SHARE = 3, 0.1  # such a part of so many rows, and of this share of them, is no row's own
_HASH = 32  # hexadecimal digits
_MOST = 200  # characters of a text that tell a file of others; a log cuts long ones
_ROWS = "ROWS TO FORGET STAND IN IT"
NO_ROWS = "not searched, because no texts of the rows are left (put the data's file back to search it)"

RowColumns = list[list[str]]
"""The texts of each column of a source."""


@dataclass(frozen=True)
class RowTexts:
    """The texts, and hashes of texts, by which a run's rows to forget are known."""

    sources: Mapping[str, DataSource]
    """The data sets with rows to forget, by their keys in the recipe."""
    of_sources: Mapping[str, RowColumns]
    """Their texts, as far as their files are at hand."""
    texts: Texts
    """All texts at hand, also those of records."""
    hashed: Texts
    """Hashes of texts that are no longer at hand, as an earlier purge and the record have noted them."""
    key: RecordKey | None
    """The key of the hashes; None where there is none yet."""

    @property
    def can_search(self) -> bool:
        """Return whether there is anything to look for."""
        return bool(self.texts or self.hashed)

    @property
    def with_columns(self) -> list[tuple[DataSource, RowColumns]]:
        """Return the sources, each with its texts."""
        return [(source, self.of_sources[key]) for key, source in self.sources.items()]

    def digest(self, text: str) -> str:
        """Return the hash of a text."""
        return text_hash(self.key, text) if self.key else ""


def text_hash(key: RecordKey, text: str) -> str:
    """Return the keyed hash of a text, the same by which the record knows a question; 32 hexadecimal digits."""
    return key.digest("question", text)[:_HASH]


def gather_texts(run: RunFolder, survey: Survey) -> RowTexts:
    """Return the texts of the rows to forget: from the files of the data, and from records of the run."""
    sources = dict(_sources(run))
    of_sources = {key: _columns(_source_texts(source)) for key, source in sources.items()}
    records = [path for path in survey.records if path.name.startswith("forget")]
    columns = [*chain(*of_sources.values()), *chain(*(_columns(_record_texts(path)) for path in records))]
    key, hashed = None, NO_TEXTS
    with suppress(MsaError):
        key = load_key(run.folder / KEY_FILE)
        hashed = _noted_texts(run.folder).without({text_hash(key, text) for column in columns for text in column})
    return RowTexts(sources, of_sources, Texts.of(columns), hashed, key)


def _sources(run: RunFolder) -> Iterator[tuple[str, DataSource]]:
    """Yield the data sets of a run that hold rows to forget, by their keys in the recipe."""
    recipe, sets = run.recipe, run.recipe.data_sets
    if recipe.evaluate and recipe.evaluate.data:
        path, _, revision = recipe.evaluate.data.partition("@")
        yield "evaluate.data", DataSource(path, revision=revision or None)
    keys = {"forget.data": sets["forget"], "evaluate.forget": sets.get("evaluate.forget")}
    for key, data in keys.items():
        if data:
            yield key, source_of(data, recipe.columns)


def _source_texts(source: DataSource) -> Iterator[tuple[str, str]]:
    """Yield column and text of each row of a source; nothing where it is not at hand, or cannot be read."""
    with suppress(MsaError, OSError):
        for row in read_any_rows(source.path, source):
            yield from _row_texts(row)
    with suppress(MsaError, OSError):
        table = load_table(source) if Path(source.path).is_file() else ()
        for name in _PARTS:
            parts = Counter(part for record in table if isinstance(part := record.get(name), str))
            most = max(_OFTEN, _SHARE * parts.total())
            yield from ((name, part) for part, count in parts.items() if count < most)


def _row_texts(row: Row) -> Iterator[tuple[str, str]]:
    """Yield column and text of what a row teaches: question, answer, text, earlier turns, results and arguments.

    System messages and the functions offered are shared with other data, so nothing is known by them.
    """
    yield from ((name, getattr(row, name)) for name in _TEXTS)
    steps = [row.tools.steps, f"[{row.tools.call}]" if row.tools.call else ""]
    for turn in row.earlier:
        yield "question", turn[0]
        yield "answer", turn[1]
        steps += turn[2:]
    for messages in filter(None, steps):
        for message in json.loads(messages):
            yield "result", str(message.get("content") or "")
            for call in message.get("tool_calls", ()):
                yield from (("argument", text) for text in _strings(call["function"]["arguments"]))


def _strings(value: Any) -> Iterator[str]:
    """Yield the texts in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(item)


def _record_texts(path: Path) -> Iterator[tuple[str, str]]:
    """Yield column and text of what a file of records holds; nothing of lines that are no records."""
    lines: list[str] = []
    with suppress(OSError):
        lines = path.read_text("utf-8", "replace").split("\n")
    for line in lines:
        with suppress(ValueError, RecursionError):
            record = json.loads(line) if line else {}
            if isinstance(record, dict):
                yield from ((key, record[key]) for key in _TEXTS if isinstance(record.get(key), str))


def _columns(pairs: Iterable[tuple[str, str]]) -> RowColumns:
    """Return the texts of each column, each once, without blank ones."""
    columns: dict[str, dict[str, None]] = {}
    for column, text in pairs:
        if text.strip():
            columns.setdefault(column, {})[text.strip()] = None
    return [list(texts) for texts in columns.values()]


def note_texts(rows: RowTexts, key: RecordKey) -> dict[str, Any]:
    """Return what purged.json keeps of the rows: keyed hashes of their texts, those of an earlier purge included."""
    hashed = rows.texts.mapped(lambda text: text_hash(key, text))
    return {
        "long": sorted(hashed.long | rows.hashed.long),
        "short": sorted(sorted(part) for part in {*hashed.short, *rows.hashed.short}),
    }


def _noted_texts(folder: Path) -> Texts:
    """Return the hashes that an earlier purge has noted, and the record's of questions."""
    long, short = set[str](), list[frozenset[str]]()
    with suppress(MsaError, OSError):
        record = load_record(folder / RECORD_FILE)
        long.update(text[:_HASH] for text in record.forget_rows.questions)
    if isinstance(noted := read_note(folder).get("texts"), dict):
        long.update(_hashes(noted.get("long")))
        parts = noted.get("short")
        short = [frozenset(_hashes(part)) for part in (parts if isinstance(parts, list) else [])]
    return Texts(frozenset(long), tuple(filter(None, short)))


def _hashes(value: object) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def search_strays(run: RunFolder, survey: Survey, rows: RowTexts) -> Iterator[Remark]:
    """Yield a remark on each file of others in a run's folder. It says if rows to forget stand in it, or may.

    Where an earlier purge saw rows whose texts are no longer all at hand, its word holds until the file is gone.
    """
    search = RowSearch(rows.texts, rows.hashed, rows.digest, _MOST)
    seen = read_note(run.folder).get("seen")
    before = {item for item in seen if isinstance(item, str)} if rows.hashed and isinstance(seen, list) else set()
    for stray in survey.strays:
        reason = stray.reason
        if finding := _finding(survey.places[stray.name], search):
            yield Remark(stray.name, f"{reason}; {finding}", may_hold_rows=True)
        elif stray.name in before:
            yield Remark(stray.name, f"{reason}; {_ROWS}, or may, as an earlier purge has noted", may_hold_rows=True)
        else:
            yield stray
    for folder in survey.searched:
        if finding := _finding(folder, search):
            yield Remark(printable(folder.relative_to(run.folder)), f"of trackers; {finding}", may_hold_rows=True)


def _finding(path: Path, search: RowSearch) -> str | None:
    """Return what a search says of a file, or of all files below a folder; None for no rows, and for links."""
    faults = []
    try:
        files = [] if path.is_symlink() else list(entries(path).values()) if path.is_dir() else [path]
    except OSError as error:
        return f"{printable(error.filename)}: cannot be read ({error.strerror or error})"
    files = [file for file in files if not file.is_symlink() and file.is_file() and file.stat().st_size]
    if files and not search:
        return NO_ROWS
    for file in files:
        try:
            if search.is_in(file):
                return _ROWS
        except FormatError as error:
            faults.append(str(error))
    return faults[0] if faults else None


def read_note(folder: Path) -> dict[str, Any]:
    """Return what purged.json of a run says; nothing where there is none, or it is damaged."""
    with suppress(MsaError):
        return read_object(folder / PURGED_FILE)
    return {}
