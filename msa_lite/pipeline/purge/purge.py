"""Remove what still holds the data of a run: vectors, records of rows, models that know it, answers.

The unlearned model, the report and the removal record stay. A removal that was killed is ended by the same call.
What is outside of the run's folder is only named. `search_folders` finds files there in which rows to forget stand.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from msa_lite.data import DataSource, Row, is_remote_data, load_rows
from msa_lite.errors import MsaError, StageError, UsageError, join_faults
from msa_lite.evals.judge.base import cache_folder
from msa_lite.io.files.reading import local_path, printable, read_bytes, read_object
from msa_lite.io.files.search import TextSearch
from msa_lite.io.files.writing import json_form, write_json
from msa_lite.io.finished.seal import MANIFEST, MANIFEST_SEAL, PURGING, entries, in_use, load_manifest, locked
from msa_lite.pipeline.purge.holdings import RESULTS, Holding, Remark, remove_empty, run_folders, survey_run
from msa_lite.pipeline.run.folder import RunFolder, open_run
from msa_lite.pipeline.run.report import write_run_report
from msa_lite.record.facts import utc
from msa_lite.record.seal import KEY_FILE, RECORD_FILE, RowContent, load_key, load_record
from msa_lite.report.run.provenance import PURGED_FILE, result_revision

logger = logging.getLogger(__name__)

_CHOSEN = "not known to msa-lite, and named with --also"
_MOST = 1000  # folders beside the run of which the manifest is read
UNKNOWN = (
    "msa-lite cannot know of copies of all these: backups and snapshots, other folders and machines, runs of later "
    "requests that asked their models these rows again (evaluation/earlier), models merged from the vectors "
    "elsewhere, tables and lists of rows that you saved, the global caches of other tools (of `datasets` and of the "
    "Hub's client), the history of your shell and logs. `msa-lite purge RUN --search FOLDER` prints the files of a "
    "folder in which rows to forget stand"
)
"""What no command of msa-lite can tell."""
AFTER = (
    "after that, no later request can name the run under `earlier`: it starts from the unlearned model instead. The "
    "recipe cannot repeat the run"
)


@dataclass(frozen=True)
class Purge:
    """The files that hold the data of a run, and the outcome of their removal."""

    json_keys: ClassVar = {
        "folder": "folder", "removed": "removed", "bytes": "nbytes", "holdings": "holdings", "kept": "kept",
        "left_alone": "strays", "not_removed": "elsewhere", "purged_before": "purged",
    }  # fmt: skip

    folder: Path
    """The run's folder."""
    holdings: Sequence[Holding]
    """The files that hold the data and can be removed."""
    kept: Sequence[Remark]
    """The files that stay in the folder."""
    strays: Sequence[Remark]
    """What msa-lite does not know in the folder. It may hold rows: until it is gone, the purge has not ended."""
    elsewhere: Sequence[str]
    """What the recipe names and the command does not remove: the data's own files, the target, earlier runs, …"""
    removed: bool
    """True once the holdings are gone."""
    purged: str | None
    """The time of an earlier purge of the run; None where there was none."""

    @property
    def nbytes(self) -> int:
        """Return the size of what holds the data."""
        return sum(holding.nbytes for holding in self.holdings)


def purge(folder: str | Path, remove: bool = False, also: Sequence[str | Path] = ()) -> Purge:
    """List the files that still hold the data of a run, and with `remove` remove them.

    The list has vectors, records of single rows, models and data of a demo, models written out of adapters, files of
    trackers and remains of stopped runs; in the runs of baselines, too. Nothing outside the run's folder is removed,
    and links are not followed. purged.json records what was removed and when; from then on, no run can use the folder.

    also: files and folders to remove, too, of what msa-lite does not know in the folder of the run; paths from there,
    or from the working folder. With `remove`, the unlearned model is hashed.

    Raise UsageError for a folder that is no run, and for paths that are not such; OutputError if a process works in the
    run or shows it; StageError, once all else is gone, for files that could not be removed or may hold rows.
    """
    run = open_run(folder)
    search, sure = _search(run)  # before the removal: the rows may lie in the folder
    if not remove:
        return _survey(run, also, sure)
    with ExitStack() as locks:
        locks.enter_context(locked(run.folder, PURGING))  # before the others, so that no baseline begins unseen
        for place in run_folders(run):
            locks.enter_context(locked(place))
            locks.enter_context(in_use(place, alone=True))
        listed = _survey(run, also, sure, hashed=True)
        is_unended = _read_note(run.folder).get("ended", utc(0)) is None
        if listed.holdings or listed.strays or is_unended:
            _remove(run, listed, search, sure)
        return replace(listed, removed=True, kept=survey_run(run, _write_report, sure).kept)


def purge_command(folder: Path) -> str:
    """Return the command that removes what holds the data of a run."""
    return f"msa-lite purge {shlex.quote(str(folder))} --yes"


def _survey(run: RunFolder, also: Sequence[str | Path], sure: TextSearch | None, hashed: bool = False) -> Purge:
    """Return what there is before anything is removed."""
    survey = survey_run(run, _write_report, sure, hashed)
    holdings = [*survey.holdings, *_choose(run, survey.strays, also)]
    purged = _read_note(run.folder).get("began")
    elsewhere, strays = [*_elsewhere(run), *_made_from(run)], [*survey.strays.values()]
    return Purge(run.folder, holdings, survey.kept, strays, elsewhere, False, str(purged) if purged else None)


def _choose(run: RunFolder, strays: dict[Path, Remark], also: Sequence[str | Path]) -> Iterator[Holding]:
    """Take what is to be removed, too, out of the strays: those at and below each path, or a part of one.

    Raise UsageError, before anything is removed, for paths that name no stray.
    """
    home, faults, chosen = run.folder.resolve(), [], set[Path]()
    for given in also:
        place = next(filter(os.path.lexists, (run.folder / given, local_path(given))), run.folder / given)
        place = Path(os.path.abspath(place))
        place = place.parent.resolve() / place.name  # a link itself, and nothing behind one
        is_inside = home in place.parents
        place = run.folder / place.relative_to(home) if is_inside else place
        found = {stray for stray in strays if is_inside and (place == stray or place in stray.parents)}
        if not found and strays.keys() & {*place.parents} and os.path.lexists(place):
            found = {place}
        if not found:
            faults.append(f"{given}: names nothing in there that msa-lite does not know")
        chosen |= found
    if faults:
        raise UsageError(join_faults(f"{run.folder}: nothing was removed; --also:", faults))
    for place in sorted(place for place in chosen if not chosen & {*place.parents}):
        strays.pop(place, None)
        is_folder = place.is_dir() and not place.is_symlink()
        size = sum(path.lstat().st_size for path in (entries(place).values() if is_folder else [place]))
        remove = partial(shutil.rmtree, place) if is_folder else partial(place.unlink, missing_ok=True)
        yield Holding(printable(place.relative_to(run.folder)), _CHOSEN, size, remove)


def _remove(run: RunFolder, listed: Purge, search: TextSearch | None, sure: TextSearch | None) -> None:
    """Remove the holdings. Raise StageError with all that cannot be removed; the others are gone then.

    Raise it, too, for what may hold rows: files that are not known, and those in which a row is found.
    """
    file = run.folder / PURGED_FILE
    note: dict[str, Any] = {"began": utc(time.time()), "removed": []} | _read_note(run.folder)
    removed = note["removed"] if isinstance(note["removed"], list) else []
    entries = [*removed, *map(json_form, listed.holdings)]
    note |= {
        "ended": None,
        "removed": list({json.dumps(entry, sort_keys=True): entry for entry in entries}.values()),
    }
    faults = []
    with suppress(OSError):  # a full disk has room once something is gone; it is written at the end
        write_json(file, note)  # first, so that no run begins in what a kill has left
    for holding in listed.holdings:
        try:
            holding.remove()
        except OSError as error:
            faults.append(f"{error.filename or holding.name}: {error.strerror or error}")
    remove_empty(run, [run.folder / entry["name"] for entry in note["removed"]])
    strays = survey_run(run, _write_report, sure, hashed=True).strays
    faults += [f"{remark.name}: {remark.reason}" for remark in strays.values()]
    faults += [f"{name}: a row to forget stands in it" for name in _found(run, search, strays)]
    if faults:
        write_json(file, note)
        what = (
            "the purge has not ended: this could not be removed, or may hold rows. Look at each, move it elsewhere or "
            "name it with --also, and repeat the command"
        )
        raise StageError(join_faults(f"{run.folder}: {what}:", faults, limit=50))
    write_json(file, note | {"ended": utc(time.time())})


def _read_note(folder: Path) -> dict[str, Any]:
    """Return what purged.json of a run says; nothing where there is none, or it is damaged."""
    with suppress(MsaError):
        return read_object(folder / PURGED_FILE)
    return {}


def _write_report(home: Path) -> None:
    """Write the report of a run again, if that can be done."""
    try:
        write_run_report(home)
    except (MsaError, ImportError) as error:  # a damaged run; a plain installation, which writes no page
        logger.warning(
            "%s: its report goes, since it cannot be sealed anew; `msa-lite report` makes it: %s", home, error
        )


def _search(run: RunFolder) -> tuple[TextSearch | None, TextSearch | None]:
    """Return a search for the rows to forget; None where no file of this machine has them any more.

    And the same once more where it is sure to be for all rows: the record has the hashes of no others; else None.
    """
    sources = [(key, source) for key, source in forget_sources(run) if not is_remote_data(source)]
    search = None
    with suppress(MsaError):
        rows = _rows(run, sources)
        search = TextSearch(text for row in rows for text in row)
        known = load_key(run.folder / KEY_FILE).hash_rows(rows).rows
        return search, search if {*load_record(run.folder / RECORD_FILE).forget_rows.rows} <= {*known} else None
    return search, None


def _found(run: RunFolder, search: TextSearch | None, strays: Iterable[Path]) -> Iterator[str]:
    """Yield the files of a purged run in which a row stands; a model is known by its hashes, and is not searched."""
    stages = {path.parent: load_manifest(path.parent) for path in run.folder.rglob(MANIFEST)}
    passed = {*strays, *(folder for folder, manifest in stages.items() if manifest and manifest["kind"] in RESULTS)}
    for file in _files(run.folder) if search else ():
        with suppress(MsaError, OSError):
            if not passed & {file, *file.parents} and search and search.is_in(file):
                yield printable(file.relative_to(run.folder))


def _made_from(run: RunFolder) -> Iterator[str]:
    """Yield the folders beside the run that are copies of its vectors, or were made from them."""
    marks, home = set[str](), run.folder.resolve()
    for folder in run_folders(run):
        with suppress(MsaError):
            marks |= {vector.revision for vector in load_record(folder / RECORD_FILE).vectors}
    for path in run.folder.rglob(MANIFEST):
        marks |= _marks(path.parent)
    for pattern in (f"*/{MANIFEST}", f"*/*/{MANIFEST}"):
        for path in islice(home.parent.glob(pattern), _MOST):
            with suppress(MsaError, OSError):
                is_made = any(mark.encode() in read_bytes(path) for mark in marks) or marks & _marks(path.parent)
                if home not in path.parents and is_made:
                    yield f"a copy of its vectors or moments, or made from them: {printable(path.parent)}"


def _marks(folder: Path) -> set[str]:
    """Return what other manifests have of a folder that can put the data back, and its own seal."""
    manifest = load_manifest(folder) or {"kind": None}
    if manifest["kind"] not in ("vector", "moments"):
        return set()
    with suppress(MsaError, OSError):
        return {manifest[MANIFEST_SEAL], result_revision(folder)}
    return set()


def _elsewhere(run: RunFolder) -> Iterator[str]:
    """Yield what the recipe names and holds the data outside of the run's folder."""
    recipe, home = run.recipe, run.folder.resolve()
    for key, source in forget_sources(run):
        if is_remote_data(source):
            yield f"the data itself: {source.path} on the Hub ({key}), and its downloads in the Hub's cache"
        elif not local_path(source.path).resolve().is_relative_to(home):
            yield f"the data itself: {source.path} ({key})"
    if recipe.evaluate and recipe.evaluate.data:
        yield f"the benchmark's data: {recipe.evaluate.data} (evaluate.data)"
    if not local_path(recipe.target).resolve().is_relative_to(home):
        yield f"the target, which knows the data: {recipe.target}, and its copies"
    yield from (f"the vectors of an earlier request, in {folder}: purge that run, too" for folder in recipe.earlier)
    if recipe.publish.repo:
        yield f"what was published: {recipe.publish.repo}"
    if (judge := recipe.evaluate and recipe.evaluate.judge) and judge.kind != "none":
        if judge.kind == "openai":
            yield f"what the judge was asked, at its server: {judge.base_url or 'OpenAI, or OPENAI_BASE_URL'}"
        yield f"the judge's replies in {cache_folder()}: hashes of what it was asked, no texts"


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
    search = TextSearch(text for row in _rows(run, forget_sources(run)) for text in row)
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
            yield key, data.source(run.recipe.columns)


def _rows(run: RunFolder, sources: Iterable[tuple[str, DataSource]]) -> list[RowContent]:
    rows, faults = list[Row](), []
    for key, source in sources:
        try:
            rows += load_rows(source)
        except (MsaError, OSError) as error:
            faults.append(f"{key}: {error}")
    if faults:
        raise UsageError(join_faults(f"{run.folder}: its rows cannot be read; put their files back to search:", faults))
    return [(row.question, row.answer, row.text) for row in rows]


def _files(path: Path) -> Iterator[Path]:
    """Yield a file, or the regular files below a folder."""
    if path.is_file():
        yield path
    for folder, _, names in os.walk(path):
        for file in sorted(Path(folder, name) for name in names):
            if file.is_file() and not file.is_symlink():
                yield file
