"""Remove what still holds the data of a run: vectors, records of rows, models that know it, caches.

The unlearned model, the report and the removal record stay. A removal that was killed is ended by the same call.
"""

from __future__ import annotations

import json
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from msa_lite.data import DataSource
from msa_lite.data.kept import cached_repositories, cached_tables, datasets_cache, download_folder
from msa_lite.data.rows import read_any_rows
from msa_lite.errors import MsaError, StageError, join_faults
from msa_lite.evals.judge.base import cache_folder
from msa_lite.io.files.reading import local_path, printable, read_object
from msa_lite.io.files.spellings import holds_any, needles, sample_texts
from msa_lite.io.files.writing import hash_file, json_form, write_json
from msa_lite.io.finished.seal import locked
from msa_lite.pipeline.prepare.questions import source_of
from msa_lite.pipeline.purge.holdings import DAMAGED, Holding, Remark, Survey, remove_empty, run_folders, survey_run
from msa_lite.pipeline.run.folder import RunFolder, open_run
from msa_lite.pipeline.run.report import MARKDOWN_FILE, write_run_report
from msa_lite.record.facts import utc
from msa_lite.record.seal import KEY_FILE, make_key
from msa_lite.report import REPORT_FILE
from msa_lite.report.provenance import PURGED_FILE
from msa_lite.report.run_files import PAGE_FILE

_SEARCHED = 64 << 20  # bytes; larger files of others are not searched for rows
_EXAMPLES = "questions with answers, as examples; it is written again without them"
# By these marks a report is known to show examples or rows.
_SIGNS = {
    MARKDOWN_FILE: [b"Some questions side by side:", b"## The rows to forget\n"],
    PAGE_FILE: [b'<section id="examples">', b'<section id="rows">'],
    REPORT_FILE: [b'"examples": [\n', b'"forget_rows": {'],
}
_TEXTS = ("question", "answer", "text")
_ROWS = "ROWS TO FORGET STAND IN IT"
UNREAD = "a table in the cache of `datasets` that cannot be read, so that nobody knows whether rows stand in it"
_ELSEWHERE = (
    "copies of all these: backups, snapshots of the disk, other folders and machines, what was sent or published",
    "models that were merged from the vectors elsewhere (`msa-lite merge`, mergekit), and temporary files",
    "the history of your shell, logs and terminals that showed questions with answers",
)
AFTER = (
    "after that, no later request can name the run under `earlier`: it starts from the unlearned model instead, and "
    "the run is not made again from its recipe"
)


@dataclass(frozen=True)
class Purge:
    """The files that hold the data of a run, and the outcome of their removal."""

    json_keys: ClassVar = {
        "folder": "folder", "removed": "removed", "bytes": "nbytes", "holdings": "holdings", "kept": "kept",
        "left_alone": "strays", "out_of_reach": "elsewhere", "purged_before": "purged",
    }  # fmt: skip

    folder: Path
    """The run's folder."""
    holdings: Sequence[Holding]
    """The files that hold the data and can be removed."""
    kept: Sequence[Remark]
    """The files that stay in the folder."""
    strays: Sequence[Remark]
    """Files in the folder that msa-lite leaves alone, since it did not make them."""
    elsewhere: Sequence[str]
    """Places that no command of msa-lite reaches."""
    removed: bool
    """True once the holdings are gone."""
    purged: str | None
    """The time of an earlier purge of the run; None where there was none."""

    @property
    def nbytes(self) -> int:
        """Return the size of what holds the data."""
        return sum(holding.nbytes for holding in self.holdings)


def purge(folder: str | Path, remove: bool = False) -> Purge:
    """List what still holds the data of a run, and with `remove` remove it.

    The list has vectors, records of single rows, models and data of a demo, models written out of adapters, what
    stopped runs have left, and tables in the cache of `datasets`; in the runs of baselines, too. Nothing outside the
    run's folder is removed but these tables. No link is followed. What was removed, and when, is written into
    purged.json, after which the folder takes no run any more.

    Raise UsageError for a folder that is no run, OutputError where a process works in it, StageError for what could
    not be removed.
    """
    run = open_run(folder)
    if not remove:
        return _survey(run)
    with ExitStack() as locks:
        for place in run_folders(run):
            locks.enter_context(locked(place))
        listed = _survey(run)
        seen = [remark for remark in listed.strays if any(sign in remark.reason for sign in (_ROWS, UNREAD, DAMAGED))]
        if listed.holdings or seen or _is_unended(run):
            _remove(run, listed.holdings, seen)
        # A whole survey would read the rows again, and `datasets` would put those of Parquet files back into its cache.
        return Purge(**(vars(listed) | {"removed": True, "kept": survey_run(run).kept}))


def purge_command(folder: Path) -> str:
    """Return the command that removes what holds the data of a run."""
    return f"msa-lite purge {shlex.quote(str(folder))} --yes"


def _survey(run: RunFolder) -> Purge:
    """Return what there is, before anything is removed."""
    survey = survey_run(run)
    sources = dict(_sources(run))
    columns = _forget_texts(survey, sources)
    rows = [text for column in columns for text in column]
    found = list(cached_tables(columns))
    tables = [path for path, is_read in found if is_read]
    tables += [path for source in sources.values() for path in cached_repositories(source)]
    caches = [
        Holding(str(path), "rows to forget in the cache of `datasets`", _tree_size(path), partial(shutil.rmtree, path))
        for path in tables
    ]
    before = _seen_before(run)
    strays = [_searched(run, remark, rows, before) for remark in survey.strays]
    strays += [Remark(str(path), UNREAD) for path, is_read in found if not is_read]
    reports = list(_reports_with_rows(run))
    purged = None
    with suppress(MsaError):
        purged = str(read_object(run.folder / PURGED_FILE).get("began"))
    holdings = [*caches, *reports, *survey.holdings]
    return Purge(run.folder, holdings, survey.kept, strays, list(_elsewhere(run, sources)), False, purged)


def _remove(run: RunFolder, holdings: Sequence[Holding], seen: Sequence[Remark]) -> None:
    """Remove the holdings. Raise StageError with all that cannot be removed; the others are gone then.

    Nor may rows stand in what is not msa-lite's own: that is remembered, by keyed hashes of the files, and told until
    they are gone, since later nobody has the texts to search for. The same holds for stages with a damaged manifest,
    and for tables that cannot be read: nobody knows what is in them.
    """
    file = run.folder / PURGED_FILE
    note: dict[str, Any] = {"began": utc(time.time()), "ended": None, "removed": []}
    with suppress(MsaError):  # an earlier purge
        note |= read_object(file)
    entries = [*note["removed"], *map(json_form, holdings)]
    note |= {"ended": None, "removed": list({json.dumps(entry, sort_keys=True): entry for entry in entries}.values())}
    note["seen"] = {remark.name: _hashes(run, remark) for remark in seen if _ROWS in remark.reason}
    faults = []
    try:
        write_json(file, note)  # first, so that no run begins in what a kill has left
    except OSError:  # a full disk has room once something is gone; it is written at the end
        file.with_name(f"{file.name}.tmp").unlink(missing_ok=True)
    for holding in holdings:
        try:
            holding.remove()
        except OSError as error:
            faults.append(f"{error.filename or holding.name}: {error.strerror or error}")
    remove_empty(run)
    faults += [f"{remark.name}: {remark.reason}; look at it, and remove it yourself" for remark in seen]
    if faults:
        write_json(file, note)
        raise StageError(
            join_faults(f"{run.folder}: not all could be removed; the same command goes on with it:", faults, limit=50)
        )
    write_json(file, note | {"ended": utc(time.time())})


def _sources(run: RunFolder) -> Iterator[tuple[str, DataSource]]:
    """Yield the data sets of a run that hold rows to forget, by their keys in the recipe."""
    recipe, sets = run.recipe, run.recipe.data_sets
    if recipe.evaluate and recipe.evaluate.data:
        path, _, revision = recipe.evaluate.data.partition("@")
        yield "evaluate.data", DataSource(path, revision=revision or None)
    paired = recipe.probe.against if recipe.probe.paired else None
    keys = {"forget.data": sets["forget"], "evaluate.forget": sets.get("evaluate.forget"), "probe.against": paired}
    for key, data in keys.items():
        if data:
            yield key, source_of(data, recipe.columns)


def _forget_texts(survey: Survey, sources: dict[str, DataSource]) -> list[list[str]]:
    """Return the texts of the rows to forget, as far as they are at hand: in the data's files, and in records.

    Each list holds the questions, answers or texts of one source.
    """
    columns: dict[tuple[str, str], dict[str, None]] = {}
    for key, source in sources.items():
        with suppress(MsaError, OSError):
            for row in read_any_rows(source.path, source):
                for name in _TEXTS:
                    columns.setdefault((key, name), {})[getattr(row, name)] = None
    for path in survey.records:
        if path.name.startswith("forget"):
            for name, text in _record_texts(path):
                columns.setdefault((str(path), name), {})[text] = None
    return [texts for column in columns.values() if (texts := [text for text in column if text.strip()])]


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


def _searched(run: RunFolder, stray: Remark, rows: Sequence[str], before: Mapping[str, Any]) -> Remark:
    """Return a remark on files of others that says if rows to forget stand in them.

    before: the hashes of files in which an earlier purge saw some, by the name of the remark.
    """
    for file in _files_of(run.folder / stray.name):
        with suppress(MsaError, OSError):
            size = file.lstat().st_size
            if not file.is_symlink() and size <= _SEARCHED and holds_any(file, needles(sample_texts(rows, size))):
                return Remark(stray.name, f"{stray.reason}; {_ROWS}")
    known = before.get(stray.name)
    if isinstance(known, list) and {*map(str, known)} & {*_hashes(run, stray)}:
        return Remark(stray.name, f"{stray.reason}; {_ROWS}, as an earlier purge has seen")
    return stray if rows else Remark(stray.name, f"{stray.reason}; not searched, since no texts of the rows are left")


def _is_unended(run: RunFolder) -> bool:
    """Check whether an earlier purge could not end."""
    with suppress(MsaError):
        return read_object(run.folder / PURGED_FILE).get("ended") is None
    return False


def _seen_before(run: RunFolder) -> Mapping[str, Any]:
    """Return what an earlier purge has written down of files in which it saw rows."""
    with suppress(MsaError):
        seen = read_object(run.folder / PURGED_FILE).get("seen")
        return seen if isinstance(seen, dict) else {}
    return {}


def _files_of(path: Path) -> list[Path]:
    """Return a file, or all files below a folder; none for a link."""
    return [path] if path.is_file() else sorted(path.rglob("*")) if path.is_dir() and not path.is_symlink() else []


def _hashes(run: RunFolder, remark: Remark) -> list[str]:
    """Return a hash of each file of a remark that can be read.

    The key is the record's: rows may be few and short, and a plain hash of them could be guessed.
    """
    hashes = []
    for file in _files_of(run.folder / remark.name):
        with suppress(MsaError, OSError):
            key = make_key(run.folder / KEY_FILE)
            if file.is_file() and not file.is_symlink():
                hashes.append(key.digest("file", hash_file(file)))
    return hashes


def _reports_with_rows(run: RunFolder) -> Iterator[Holding]:
    """Yield the reports that show examples; they are written again without them."""
    for home in run_folders(run):
        if files := list(_files_with_examples(home)):
            name = ", ".join(printable(path.relative_to(run.folder)) for path in files)
            size = sum(path.stat().st_size for path in files)
            yield Holding(name, _EXAMPLES, size, partial(_write_without, home))


def _files_with_examples(home: Path) -> Iterator[Path]:
    for name, signs in _SIGNS.items():
        path = home / name
        if path.is_file() and not path.is_symlink() and holds_any(path, signs):
            yield path


def _write_without(home: Path) -> None:
    """Write the reports of a run without examples; remove those that cannot be written again."""
    with suppress(MsaError, ImportError):  # a damaged run; a plain installation, which writes no page
        write_run_report(home)
    for path in _files_with_examples(home):
        path.unlink()


def _elsewhere(run: RunFolder, sources: dict[str, DataSource]) -> Iterator[str]:
    """Yield what holds the data out of reach of the command."""
    recipe = run.recipe
    for key, source in sources.items():
        folder = download_folder(source)
        inside = local_path(source.path).resolve().is_relative_to(run.folder.resolve())
        if folder:
            yield f"the data itself, {source.path} on the Hub ({key}), and its downloads in {folder}"
        elif not inside:
            yield f"the data itself: {source.path} ({key})"
    if not local_path(recipe.target).resolve().is_relative_to(run.folder.resolve()):
        yield f"the target, which knows the data: {recipe.target}, and its copies"
    yield from (f"the vectors of an earlier request, in {folder}: purge that run, too" for folder in recipe.earlier)
    if recipe.evaluate and recipe.evaluate.judge.kind == "openai":
        server = recipe.evaluate.judge.base_url or "OpenAI, or OPENAI_BASE_URL"
        yield f"what the judge was asked: questions and answers went to its server ({server})"
    if recipe.evaluate and recipe.evaluate.judge.kind != "none":
        yield f"the judge's replies in {cache_folder()}: hashes of what it was asked, no texts"
    yield f"tables in other caches of `datasets` than {datasets_cache()}, such as those of other users"
    yield from _ELSEWHERE


def _tree_size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
