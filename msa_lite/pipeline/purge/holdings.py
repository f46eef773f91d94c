"""Tell which files of a run's folder hold the data or can put it back, which stay, and which may hold it.

A file is known by its content: the manifest of its folder, or the run's record, has its hash. A name or a place shows
nothing: folders are copied, and models are trained on or swapped. Whatever is not known may hold rows.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

from msa_lite.errors import MsaError
from msa_lite.evals.scores.evaluation import EVALUATION_KIND
from msa_lite.evals.scores.probe import PROBE_KIND
from msa_lite.evals.scores.records import ANSWERS_FILE
from msa_lite.io.files.reading import parse_yaml, printable, read_object, read_text
from msa_lite.io.files.search import TextSearch
from msa_lite.io.files.writing import hash_file, indented_json
from msa_lite.io.finished.manifest import is_partial, remove_partial
from msa_lite.io.finished.seal import (
    CARD_FILE,
    LOCK,
    MANIFEST,
    MARKER,
    NOT_OURS,
    PURGING,
    drop_files,
    entries,
    file_fault,
    load_manifest,
    remove_ours,
    strange_files,
)
from msa_lite.pipeline.attack.campaign import ATTACK_KIND
from msa_lite.pipeline.prepare.models import WRITTEN_OUT
from msa_lite.pipeline.prepare.prompt import PROMPT_FILE
from msa_lite.pipeline.run.evidence import EVIDENCE_KIND
from msa_lite.pipeline.run.folder import BASELINES, TRACKING, RunFolder
from msa_lite.pipeline.run.report import REPORT_FILES
from msa_lite.recipe import dump_recipe
from msa_lite.recipe.load import load_any
from msa_lite.record.facts import UNSIGNED, utc
from msa_lite.record.schema import Removal
from msa_lite.record.seal import KEY_FILE, RECORD_FILE, SIGNATURE_FILE, load_key, load_record
from msa_lite.report.run.choice import CHOICE_FILE, CHOICE_TABLE
from msa_lite.report.run.provenance import PURGED_FILE, RECIPE_FILE
from msa_lite.report.run.stages import STAGES_FILE, add_stages, load_stages
from msa_lite.report.tables.reports import REPORT_FILE
from msa_lite.report.verdict.verdict import VERDICT_FILE

ROWS = "questions, answers and scores of single rows"
RECORDED = (EVALUATION_KIND, PROBE_KIND, EVIDENCE_KIND, ATTACK_KIND, "sweep")
"""The kinds of folders with records of rows: of these, the reports stay."""
HOLDS = {
    "vector": "what training on the rows changed: with it the data can be put back",
    "moments": "the inputs of the target's layers on the rows, from which texts could be guessed",
    **dict.fromkeys(("model", "adapter"), "a model or an update that is not the run's result: it may know the data"),
    **dict.fromkeys(RECORDED, ROWS),
}
"""What folders hold, by the kind in their manifest. Of any other kind all is removed."""
_ALL = "a model or data that the run was made from"
_SUMMARIES = (REPORT_FILE, CHOICE_FILE, CHOICE_TABLE)  # of folders with records, the files without rows
RESULTS = {
    "model": "the unlearned model",
    "adapter": "the result of the run. It is a switch: the target without it knows the data",
}
"""The kinds of a result, and what it is."""
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
# By these marks a report of msa-lite is known to show examples or rows.
_SIGNS = (b'<section id="examples">', b'<section id="rows">', b'"examples": [\n', b'"forget_rows": {')
_LOCKS = (LOCK, PURGING, ".candidate.lock", *(f".{name}.lock" for name in WRITTEN_OUT))
_HALF = "half-written"
_DAMAGED = f"its {MANIFEST} is damaged, so msa-lite cannot tell its own files"


@dataclass(frozen=True)
class Holding:
    """Something that holds the data, and can be removed."""

    json_keys: ClassVar = {"name": "name", "reason": "reason", "bytes": "nbytes"}

    name: str
    """Its path from the run's folder."""
    reason: str
    """The part of the data that it holds."""
    nbytes: int
    """The size of its files."""
    remove: Callable[[], object]
    """Removes it; ends a removal that was killed."""


@dataclass(frozen=True)
class Remark:
    """Something that stays, and why."""

    name: str
    """Its path from the run's folder."""
    reason: str


@dataclass(frozen=True)
class Survey:
    """The content of a run's folder."""

    holdings: list[Holding]
    kept: list[Remark]
    strays: dict[Path, Remark]
    """What msa-lite does not know: it may hold rows, or put them back."""


def survey_run(
    run: RunFolder, rewrite: Callable[[Path], object], sure: TextSearch | None, hashed: bool = False
) -> Survey:
    """Return what is in a run's folder, the runs of baselines in it included. Links are not followed.

    rewrite: writes the report of the run in a folder again, without rows. sure: finds all rows to forget in cards
    and reports that were edited; None where some are gone. hashed: True to compare the unlearned model with its
    manifest by content, False by size.
    """
    survey = Survey([], [], {})
    _Home(run, run.folder, survey, rewrite, sure, hashed).look()
    return survey


def run_folders(run: RunFolder) -> list[Path]:
    """Return the folders of the run and of its baselines' runs, each of which has a lock of its own.

    A baseline that has just begun may have no more than the lock.
    """
    inner = [path for path in sorted((run.folder / BASELINES).glob("*")) if not path.is_symlink()]
    begun = (path for path in inner if (path / RECIPE_FILE).is_file() or (path / LOCK).is_file())
    return [run.folder, *(path for path in begun if not path.parent.is_symlink())]


@dataclass(frozen=True)
class _Home:
    """The folder of one run, which is looked at: its own, or that of a baseline in it."""

    run: RunFolder
    folder: Path
    survey: Survey
    rewrite: Callable[[Path], object]
    sure: TextSearch | None
    hashed: bool

    @cached_property
    def record(self) -> Removal | None:
        """Return the record of the run; None where there is none, or it is not as it was written."""
        with suppress(MsaError):
            return load_record(self.folder / RECORD_FILE)
        return None

    @cached_property
    def has_result(self) -> bool:
        """Check whether the unlearned model of the record is there, under whatever name."""
        return any(self._is_recorded(path) for path in self.folder.glob(f"*/{MANIFEST}"))

    def look(self) -> None:
        """Look at all that is in the folder."""
        for path in sorted(self.folder.iterdir()):
            if path.is_symlink() or not path.is_dir():
                self._look_at_file(path)
            elif path.name == BASELINES:
                for inner in sorted(path.iterdir()):
                    if inner.is_dir() and not inner.is_symlink():
                        replace(self, folder=inner).look()
                    else:
                        self._leave(inner)
            elif path.name == TRACKING:
                remove = partial(shutil.rmtree, path)
                self._hold(path, "what was sent to trackers", entries(path).values(), remove)
            else:
                self._look_into(path)

    def _look_at_file(self, path: Path) -> None:
        """Look at what is no folder, in the folder of the run."""
        status = path.lstat()
        again = path.name in REPORT_FILES or path.name.removesuffix(".tmp") in {*_KEPT, *_FILES} - {path.name}
        if not stat.S_ISREG(status.st_mode):
            self._leave(path)
        elif self._is_known(path):
            self.survey.kept.append(Remark(self._name(path), _KEPT[path.name]))
        elif path.name in REPORT_FILES:
            reason = "not known to be without rows, such as examples; it is written again without"
            reason += f"; {UNSIGNED}" if (self.folder / SIGNATURE_FILE).exists() else ""
            self._hold(path, reason, [path], partial(self._write_again, path))
        elif path.name == STAGES_FILE and self._has_stages():
            remove = partial(add_stages, (), self.folder)
            self._hold(path, "not as this version writes it; it is written again", [path], remove)
        elif path.name in _FILES or again:
            remove = partial(path.unlink, missing_ok=True)
            self._hold(path, _FILES.get(path.name, _HALF), [path], remove)
        elif path.name not in _LOCKS or status.st_size:
            self._leave(path)

    def _is_known(self, path: Path) -> bool:
        """Check whether a file is as msa-lite wrote it, and holds no row."""
        with suppress(MsaError, OSError):
            if self._is_recorded(path):
                return path.name not in REPORT_FILES or not any(sign in path.read_bytes() for sign in _SIGNS)
            return path.name in _FORMS and _FORMS[path.name](path)
        return False

    def _has_stages(self) -> bool:
        with suppress(MsaError):
            return bool(load_stages(self.folder))
        return False

    def _is_recorded(self, path: Path) -> bool:
        """Check whether the record has the hash of a file: under its name, or of a result's manifest under any."""
        files = self.record.files if self.record else {}
        hashes = {files.get(path.relative_to(self.folder).as_posix())}
        if path.name == MANIFEST:
            hashes = {files.get(f"{kind}/{MANIFEST}") for kind in RESULTS}
        with suppress(MsaError, OSError):
            return hashes != {None} and hash_file(path) in hashes
        return False

    def _write_again(self, path: Path) -> None:
        """Write a report without rows; remove what is not known to be one then."""
        if not self.survey.strays and path.exists():  # from files that are not known, rows could come into it
            self.rewrite(self.folder)
        if not replace(self)._is_known(path):  # by the record as it is now
            path.unlink(missing_ok=True)

    def _look_into(self, folder: Path) -> None:
        """Look at a folder in that of a run: a stage, or a folder of stages."""
        try:
            files = entries(folder)
        except OSError as error:
            self._leave(folder, f"cannot be read ({error.strerror})")
            return
        if is_partial(folder):
            remove = partial(remove_partial, folder)
            self._hold(folder, "what a stopped run has left", files.values(), remove)
        elif manifest := load_manifest(folder):
            self._look_at_stage(folder, files, manifest)
        elif not any(path.name in (MANIFEST, MARKER) or self._is_recorded(path) for path in files.values()):
            for path in [folder, *(path for path in files.values() if path.is_symlink())] if files else ():
                self._leave(path)  # a link by itself, too: it tells where the data is
        else:
            for path in sorted(folder.iterdir()):
                if path.is_dir() and not path.is_symlink():
                    self._look_into(path)
                elif not path.is_symlink() and (
                    self._is_recorded(path) or (path.name == REPORT_FILE and self._is_without_rows(path))
                ):
                    self._keep_summary(folder)
                elif path.name == f"{REPORT_FILE}.tmp" and path.is_file():
                    self._hold(path, _HALF, [path], partial(path.unlink, missing_ok=True))
                else:
                    self._leave(path, _DAMAGED if MANIFEST in files else NOT_OURS)

    def _look_at_stage(self, folder: Path, files: Mapping[str, Path], manifest: Mapping[str, Any]) -> None:
        """Look at a folder with a manifest of msa-lite."""
        kind, strange = manifest["kind"], strange_files(folder, manifest)
        strange.pop(f"{MANIFEST}.tmp", None)  # a kill has left it
        links = {name for name, path in files.items() if path.is_symlink()} - strange.keys()
        own = {name: path for name, path in files.items() if name not in strange.keys() | links}
        for name in strange.keys() | links:
            self._leave(files[name])
        is_result = kind in RESULTS and self._is_recorded(folder / MANIFEST)
        names = own.keys() | manifest["files"].keys() - links
        if is_result:
            staying, hashed = {MANIFEST, *manifest["files"]}, self.hashed
        elif kind in RECORDED:
            staying, hashed = {name for name in names if Path(name).name in (MANIFEST, *_SUMMARIES)}, True
        elif kind in RESULTS and not self._is_other(folder):
            self._leave(folder, f"{RECORD_FILE} names no such {kind}, so whether it knows the data is unknown")
            return
        else:
            remove = partial(drop_files, folder, own) if links else partial(remove_ours, folder)
            if own.keys() - {MANIFEST} or not links:  # while a link is there, the manifest tells what its file is
                self._hold(folder, HOLDS.get(kind, _ALL), own.values(), remove)
            return
        named = [(name, item) for name, item in manifest["files"].items() if name in own.keys() & staying]
        faults = {name: fault for name, item in named if (fault := file_fault(own[name], item, hashed))}
        if CARD_FILE in faults and self._is_without_rows(own[CARD_FILE]):
            del faults[CARD_FILE]  # people edit cards
        for name, fault in faults.items():
            self._leave(own[name], f"not as msa-lite wrote it: {fault}")
        if is_result and not faults and not links:
            self.survey.kept.append(Remark(self._name(folder), RESULTS[kind]))
        elif not is_result:
            self._keep_summary(folder)
        if gone := names - staying:  # those of a removal that was killed, too
            remove = partial(drop_files, folder, gone)
            self._hold(folder, ROWS, [own[name] for name in gone & own.keys()], remove)

    def _is_without_rows(self, path: Path) -> bool:
        """Check whether a file was searched for the rows to forget, and holds none."""
        with suppress(MsaError, OSError):
            return bool(self.sure and not self.sure.is_in(path))
        return False

    def _is_other(self, folder: Path) -> bool:
        """Check whether a model is surely not the result: that is known, or this one has a place of its own."""
        return self.has_result or folder.parent != self.folder or folder.name in WRITTEN_OUT

    def _keep_summary(self, folder: Path) -> None:
        top = self.folder / folder.relative_to(self.folder).parts[0]
        remark = Remark(self._name(top), "metrics, without the rows; one hash over all rows of a set")
        if remark not in self.survey.kept:
            self.survey.kept.append(remark)

    def _hold(self, path: Path, reason: str, files: Iterable[Path], remove: Callable[[], object]) -> None:
        size = sum(file.lstat().st_size for file in files)
        self.survey.holdings.append(Holding(self._name(path), reason, size, remove))

    def _leave(self, path: Path, reason: str = NOT_OURS) -> None:
        """Enter what is not known."""
        if path.is_symlink():
            reason = f"a link to {printable(os.readlink(path))}, which is not followed"
        name = self._name(path)
        self.survey.strays[path] = Remark(name if path.is_symlink() or not path.is_dir() else f"{name}/", reason)

    def _name(self, path: Path) -> str:
        return printable(path.relative_to(self.run.folder))


def _is_recipe(path: Path) -> bool:
    text = read_text(path)
    notes = [f"{line}\n" for line in text.splitlines() if line.startswith("#")]
    recipe = load_any(parse_yaml(text, RECIPE_FILE))
    return text == "".join(notes) + dump_recipe(recipe)


def _is_purge_note(path: Path) -> bool:
    note = read_object(path)
    items = note.get("removed")
    times = [note.get("began"), note.get("ended") or utc(0)]
    is_whole = note.keys() <= {"began", "removed", "ended"} and all(_TIME.fullmatch(str(value)) for value in times)
    return is_whole and isinstance(items, list) and all(map(_is_entry, items))


def _is_entry(item: Any) -> bool:
    return isinstance(item, dict) and item.keys() <= set(Holding.json_keys)


_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
_SIGNATURE = re.compile(r"-----BEGIN SSH SIGNATURE-----\n[A-Za-z0-9+/=\n]+-----END SSH SIGNATURE-----\n?")
_FORMS: dict[str, Callable[[Path], bool]] = {
    RECIPE_FILE: _is_recipe,
    STAGES_FILE: lambda path: read_text(path) == indented_json(load_stages(path.parent)),
    RECORD_FILE: lambda path: bool(load_record(path)),
    SIGNATURE_FILE: lambda path: bool(_SIGNATURE.fullmatch(read_text(path))),
    KEY_FILE: lambda path: bool(load_key(path)),
    PURGED_FILE: _is_purge_note,
}
"""How files are known that the record has no hash of."""


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
