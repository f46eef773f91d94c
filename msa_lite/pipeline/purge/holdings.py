"""Tell which files of a run's folder hold the data or can put it back, which stay, and which are not msa-lite's."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from msa_lite.evals.scores.records import ANSWERS_FILE
from msa_lite.io.files.reading import printable
from msa_lite.io.finished.manifest import is_partial, remove_partial
from msa_lite.io.finished.seal import (
    LOCK,
    MANIFEST,
    MARKER,
    PURGING,
    WORKING,
    drop_files,
    entries,
    load_manifest,
    remove_ours,
    strange_files,
)
from msa_lite.pipeline.prepare.models import WRITTEN_OUT
from msa_lite.pipeline.prepare.prompt import PROMPT_FILE
from msa_lite.pipeline.run.folder import BASELINES, TRACKING, RunFolder
from msa_lite.pipeline.run.report import REPORT_FILES
from msa_lite.record.seal import KEY_FILE, RECORD_FILE, SIGNATURE_FILE
from msa_lite.report.run.attacks import ATTACKS_FOLDER
from msa_lite.report.run.provenance import PURGED_FILE, RECIPE_FILE
from msa_lite.report.run.stages import ALL, ROWS, STAGES_FILE, Holds, load_stages
from msa_lite.report.tables.reports import REPORT_FILE
from msa_lite.report.verdict.verdict import VERDICT_FILE

_LATER = Holds("all", "an update from before, which can put the data back")
_STOPPED = Holds("all", "what a stopped run has left")
_FILES = {
    PROMPT_FILE: "how the models did on rows in several prompts",
    **dict.fromkeys((ANSWERS_FILE, f"{ANSWERS_FILE}-journal"), "answers to questions, and scores of single rows"),
}
_KEPT = {
    RECIPE_FILE: "names the data, and does not hold it",
    STAGES_FILE: "the list of the run's stages",
    **dict.fromkeys(REPORT_FILES, "scores and counts"),
    VERDICT_FILE: "counts",
    RECORD_FILE: "the removal record: keyed hashes of the rows, useless without the key",
    SIGNATURE_FILE: "the signature of the record",
    KEY_FILE: "without it nobody can tell whether a row was among those removed; keep it to yourself",
    PURGED_FILE: "what was removed, and when",
}
_SUMMARIES = {ATTACKS_FOLDER: (REPORT_FILE,)}  # beside stages, in their folder
_LOCKS = (LOCK, PURGING, ".candidate.lock", *(f".{name}.lock" for name in WRITTEN_OUT))
_DAMAGED = f"its {MANIFEST} is damaged, so msa-lite cannot tell its own files; they may hold the data"
_FOREIGN = "not made by msa-lite"


@dataclass(frozen=True)
class Holding:
    """Something that holds the data, and can be removed."""

    json_keys: ClassVar = {"name": "name", "reason": "reason", "bytes": "nbytes"}

    name: str
    """Its path from the run's folder, or the whole path outside of it."""
    reason: str
    """The part of the data that it holds."""
    nbytes: int
    """The size of its files."""
    remove: Callable[[], object]
    """Removes it; ends a removal that was killed."""


@dataclass(frozen=True)
class Remark:
    """Something that stays, and why."""

    json_keys: ClassVar = {"name": "name", "reason": "reason", "may_hold_rows?": "may_hold_rows"}

    name: str
    """Its path from the run's folder, or the whole path outside of it."""
    reason: str
    may_hold_rows: bool = False
    """True where nobody can tell whether rows stand in it: until it is gone, a purge has not ended."""


@dataclass(frozen=True)
class Survey:
    """The content of a run's folder."""

    holdings: list[Holding]
    kept: list[Remark]
    strays: list[Remark]
    """Files that msa-lite did not make, or cannot know as its own."""

    def leave(self, name: str, reason: str, may_hold_rows: bool = False) -> None:
        """Enter a file or folder that is not msa-lite's own."""
        self.strays.append(Remark(name, reason, may_hold_rows))


def survey_run(run: RunFolder) -> Survey:
    """Return what is in a run's folder, the runs of baselines in it included. Links are not followed."""
    survey = Survey([], [], [])
    _look(run, run.folder, survey)
    return survey


def run_folders(run: RunFolder) -> list[Path]:
    """Return the folders of the run and of its baselines' runs, each of which has a lock of its own.

    A baseline that has just begun may have no more than the lock.
    """
    inner = [path for path in sorted((run.folder / BASELINES).glob("*")) if not path.is_symlink()]
    begun = (path for path in inner if (path / RECIPE_FILE).is_file() or (path / LOCK).is_file())
    return [run.folder, *(path for path in begun if not path.parent.is_symlink())]


def _look(run: RunFolder, home: Path, survey: Survey) -> None:
    """Look at the folder of one run, `home`."""
    stages = load_stages(home).stages if (home / STAGES_FILE).is_file() else ()
    holds = {stage.folder: stage.holds for stage in stages if stage.folder}
    for path in sorted(home.iterdir()):
        name = _name(run, path)
        if path.is_symlink():
            survey.leave(name, f"a link to {printable(os.readlink(path))}, which is not followed")
        elif path.is_dir() and path.name == BASELINES:
            for inner in sorted(path.iterdir()):
                if inner.is_dir() and not inner.is_symlink():
                    _look(run, inner, survey)
                else:
                    survey.leave(_name(run, inner), _FOREIGN)
        elif path.is_dir() and path.name == TRACKING:
            size = _size(list(entries(path).values()))
            survey.holdings.append(Holding(name, "what was sent to trackers", size, partial(shutil.rmtree, path)))
        elif path.is_dir():
            _look_into(run, home, path, holds, survey)
        elif path.name in _FILES or path.name.removesuffix(".tmp") in {*_KEPT, *_FILES} - {path.name}:
            reason = _FILES.get(path.name, "half-written")
            survey.holdings.append(Holding(name, reason, _size([path]), partial(path.unlink, missing_ok=True)))
        elif path.name in _KEPT:
            survey.kept.append(Remark(name, _KEPT[path.name]))
        elif path.name not in _LOCKS:
            survey.leave(name, _FOREIGN)


def _look_into(run: RunFolder, home: Path, folder: Path, listed: Mapping[str, Holds], survey: Survey) -> None:
    """Look at a folder in that of a run: a stage, or a folder of stages."""
    name, top = _name(run, folder), folder.relative_to(home).parts[0]
    files = list(entries(folder).values())
    if is_partial(folder):
        remove = partial(remove_partial, folder)
        survey.holdings.append(Holding(name, "what a stopped run has left", _size(files), remove))
    elif manifest := load_manifest(folder):
        strange = strange_files(folder, manifest)
        for path in strange.values():
            survey.leave(_name(run, path), _FOREIGN)
        written = [path for path in files if path not in strange.values()]
        holds = _holds(run, home, folder, listed)
        if holds.part == "all":
            survey.holdings.append(Holding(name, holds.reason, _size(written), partial(remove_ours, folder)))
        elif holds.part == "nothing":
            survey.kept.append(Remark(name, holds.reason))
        else:
            _look_at_records(run, home / top, folder, manifest, survey)
    elif not any(path.name in (MANIFEST, MARKER, LOCK) for path in files):
        if files:
            survey.leave(f"{name}/", _FOREIGN)
    else:
        for path in sorted(folder.iterdir()):
            if path.is_dir() and not path.is_symlink():
                _look_into(run, home, path, listed, survey)
            elif path.name not in WORKING and path.name not in _SUMMARIES.get(top, ()):
                is_damaged = (folder / MANIFEST).is_file()
                survey.leave(_name(run, path), _DAMAGED if is_damaged else _FOREIGN, is_damaged)


def _holds(run: RunFolder, home: Path, folder: Path, listed: Mapping[str, Holds]) -> Holds:
    """Return the part of a stage's folder that holds the data: all where no list has it."""
    place = folder.relative_to(home)
    places = [place.with_name(place.name.removesuffix(".previous")), *place.parents]
    holds = next((listed[path.as_posix()] for path in places if path.as_posix() in listed), ALL)
    if holds.part == "nothing" and places[0].name != run.result.name:
        return _LATER
    return _STOPPED if holds.part == "rows" and folder.name.endswith(".previous") else holds


def _look_at_records(run: RunFolder, top: Path, folder: Path, manifest: Mapping[str, Any], survey: Survey) -> None:
    """Look at a stage that stays without its records."""
    remark = Remark(_name(run, top), "metrics, without the rows; one hash over all rows of a set")
    if remark not in survey.kept:
        survey.kept.append(remark)
    if records := [record for record in manifest["files"] if record.endswith(".jsonl")]:
        paths = [folder / record for record in records if (folder / record).is_file()]
        remove = partial(drop_files, folder, records)
        survey.holdings.append(Holding(_name(run, folder), ROWS.reason, _size(paths), remove))


def remove_empty(run: RunFolder, folders: Iterable[Path]) -> None:
    """Remove those of these folders that are empty once what they held is gone, and the empty ones above them.

    Only folders inside the run's are removed, whatever is given.
    """
    home = run.folder.resolve()
    for folder in folders:
        place = folder.resolve()
        while place != home and place.is_relative_to(home):
            if place.is_dir() and any(place.iterdir()):
                break
            if place.is_dir():
                place.rmdir()
            place = place.parent


def _size(paths: Sequence[Path]) -> int:
    return sum(path.lstat().st_size for path in paths)


def _name(run: RunFolder, path: Path) -> str:
    return printable(path.relative_to(run.folder))
