"""Remove what still holds the data of a run: vectors, records of rows, models that know it, caches.

The unlearned model, the report and the removal record stay. A removal that was killed is ended by the same call.
"""

from __future__ import annotations

import json
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from msa_lite.data import DataSource
from msa_lite.data.caches import cached_repositories, datasets_cache, download_folder, find_cached, is_empty
from msa_lite.data.search import RowSearch
from msa_lite.errors import MsaError, StageError, join_faults
from msa_lite.evals.judge.base import cache_folder
from msa_lite.io.files.reading import local_path, printable
from msa_lite.io.files.search import ByteSearch
from msa_lite.io.files.writing import json_form, write_json
from msa_lite.io.finished.seal import PURGING, locked
from msa_lite.pipeline.purge.holdings import Holding, Remark, remove_empty, run_folders, survey_run
from msa_lite.pipeline.purge.rows import NO_ROWS, RowTexts, gather_texts, note_texts, read_note, search_strays
from msa_lite.pipeline.run.folder import RunFolder, open_run
from msa_lite.pipeline.run.report import MARKDOWN_FILE, write_run_report
from msa_lite.record.facts import utc
from msa_lite.record.seal import KEY_FILE, make_key
from msa_lite.report import REPORT_FILE
from msa_lite.report.provenance import PURGED_FILE
from msa_lite.report.run_files import PAGE_FILE

_EXAMPLES = "questions with answers, as examples; it is written again without them"
# By these marks a report is known to show examples or rows.
_SIGNS = {
    MARKDOWN_FILE: [b"Some questions side by side:", b"## The rows to forget\n"],
    PAGE_FILE: [b'<section id="examples">', b'<section id="rows">'],
    REPORT_FILE: [b'"examples": [\n', b'"forget_rows": {'],
}
_ELSEWHERE = (
    "runs of later requests, which asked their models some of these rows again (evaluation/earlier): purge them, too",
    "copies of all these: backups, snapshots of the disk, other folders and machines, what was sent or published",
    "models that were merged from the vectors elsewhere (`msa-lite merge`, mergekit), and temporary files",
    "the history of your shell, logs and terminals that showed questions with answers",
)
AFTER = (
    "after that, no later request can name the run under `earlier`: it starts from the unlearned model instead. The "
    "recipe cannot repeat the run"
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
    """List the files that still hold the data of a run, and with `remove` remove them.

    The list has vectors, records of single rows, models and data of a demo, models written out of adapters, remains of
    stopped runs, and tables in the cache of `datasets`; in the runs of baselines, too. Outside the run's folder, only
    these tables are removed. Links are not followed. purged.json records what was removed and when; from then on, no
    run can use the folder.

    Raise UsageError for a folder that is no run, OutputError if a process works in it, StageError for files that could
    not be removed.
    """
    run = open_run(folder)
    if not remove:
        return _survey(run)[0]
    with ExitStack() as locks:
        locks.enter_context(locked(run.folder, PURGING))  # before the others, so that no baseline begins unseen
        for place in run_folders(run):
            locks.enter_context(locked(place))
        listed, rows = _survey(run)
        is_unended = read_note(run.folder).get("ended", utc(0)) is None
        if listed.holdings or is_unended or any(remark.may_hold_rows for remark in listed.strays):
            _remove(run, listed, rows)
        # A whole survey would read the rows again, and `datasets` would put those of Parquet files back into its cache.
        return Purge(**(vars(listed) | {"removed": True, "kept": survey_run(run).kept}))


def purge_command(folder: Path) -> str:
    """Return the command that removes what holds the data of a run."""
    return f"msa-lite purge {shlex.quote(str(folder))} --yes"


def _survey(run: RunFolder) -> tuple[Purge, RowTexts]:
    """Return what there is before anything is removed, and by which texts it was found."""
    survey = survey_run(run)
    rows = gather_texts(run, survey)
    repositories = [path for source in rows.sources.values() for path in cached_repositories(source)]
    holdings = [_cached(path, partial(shutil.rmtree, path)) for path in repositories]
    strays = [] if rows.can_search else _unsearched()
    for cached in find_cached(RowSearch(rows.texts, rows.hashed, rows.digest), rows.with_columns):
        if cached.fault:
            strays.append(Remark(str(cached.path), f"in the cache of `datasets`; {cached.fault}", may_hold_rows=True))
        elif not {*repositories} & {*cached.path.parents}:
            holdings.append(_cached(cached.path, cached.remove))
    strays += search_strays(run, survey, rows)
    purged = read_note(run.folder).get("began")
    holdings += [*_reports_with_rows(run), *survey.holdings]
    elsewhere = list(_elsewhere(run, rows.sources))
    return Purge(run.folder, holdings, survey.kept, strays, elsewhere, False, str(purged) if purged else None), rows


def _cached(path: Path, remove: Callable[[], object]) -> Holding:
    return Holding(str(path), "rows to forget in the cache of `datasets`", _tree_size(path), remove)


def _unsearched() -> list[Remark]:
    """Return a remark on the cache of `datasets` where there are no texts to search it for."""
    reason = f"the cache of `datasets`; {NO_ROWS}"
    return [] if is_empty() else [Remark(str(datasets_cache()), reason, may_hold_rows=True)]


def _remove(run: RunFolder, listed: Purge, rows: RowTexts) -> None:
    """Remove the holdings. Raise StageError with all that cannot be removed; the others are gone then.

    Raise it, too, while rows stand, or may stand, in what is not msa-lite's own. Which files those are is noted, and
    so are keyed hashes of the rows' texts, since later nobody may have the texts to search for.
    """
    file = run.folder / PURGED_FILE
    note: dict[str, Any] = {"began": utc(time.time()), "removed": []} | read_note(run.folder)
    removed = note["removed"] if isinstance(note["removed"], list) else []
    entries = [*removed, *map(json_form, listed.holdings)]
    held = [remark for remark in listed.strays if remark.may_hold_rows]
    note |= {
        "ended": None,
        "removed": list({json.dumps(entry, sort_keys=True): entry for entry in entries}.values()),
        "seen": [remark.name for remark in held],
    }
    faults = []
    with suppress(OSError):  # a full disk has room once something is gone; it is written at the end
        with suppress(MsaError):  # a damaged key
            note["texts"] = note_texts(rows, make_key(run.folder / KEY_FILE))
        write_json(file, note)  # first, so that no run begins in what a kill has left
    for holding in listed.holdings:
        try:
            holding.remove()
        except OSError as error:
            faults.append(f"{error.filename or holding.name}: {error.strerror or error}")
    remove_empty(run, [run.folder / entry["name"] for entry in note["removed"]])
    faults += [f"{remark.name}: {remark.reason}; look at it, and remove it yourself" for remark in held]
    if faults:
        write_json(file, note)
        raise StageError(
            join_faults(f"{run.folder}: not all could be removed; repeat the command for the rest:", faults, limit=50)
        )
    write_json(file, note | {"ended": utc(time.time())})


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
        if path.is_file() and not path.is_symlink() and ByteSearch(signs).is_in(path):
            yield path


def _write_without(home: Path) -> None:
    """Write the reports of a run without examples; remove those that cannot be written again."""
    with suppress(MsaError, ImportError):  # a damaged run; a plain installation, which writes no page
        write_run_report(home)
    for path in _files_with_examples(home):
        path.unlink()


def _elsewhere(run: RunFolder, sources: Mapping[str, DataSource]) -> Iterator[str]:
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
    judges = [recipe.evaluate.judge] if recipe.evaluate else []
    for server in dict.fromkeys(
        judge.base_url or "OpenAI, or OPENAI_BASE_URL" for judge in judges if judge.kind == "openai"
    ):
        yield f"what the judge was asked: questions and answers went to its server ({server})"
    if any(judge.kind != "none" for judge in judges):
        yield f"the judge's replies in {cache_folder()}: hashes of what it was asked, no texts"
    yield f"tables in other caches of `datasets` than {datasets_cache()}, such as those of other users"
    yield from _ELSEWHERE


def _tree_size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
