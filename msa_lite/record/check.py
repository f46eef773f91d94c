"""Check a record and the chain of earlier ones; answer by them whether a row was to be forgotten."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import ClassVar, Literal

from msa_lite.errors import MismatchError, MsaError, UsageError
from msa_lite.io.files.reading import local_path, read_yaml
from msa_lite.io.files.writing import hash_file
from msa_lite.io.finished.seal import MANIFEST, entries, verify_stages
from msa_lite.io.weights.checkpoint import INDEX_FILE
from msa_lite.io.weights.companions import CODE, name_in
from msa_lite.io.weights.hub import content_files, hash_content, tokenizer_files
from msa_lite.record.facts import handed_on, hashed_revision, way_out
from msa_lite.record.schema import EarlierRecord, Removal
from msa_lite.record.seal import (
    KEY_FILE,
    RECORD_FILE,
    SIGNATURE_FILE,
    RowContent,
    RowMatch,
    check_signature,
    load_key,
    load_record,
    record_hash,
    signature_of,
    signing_command,
)
from msa_lite.report.run.provenance import RECIPE_FILE
from msa_lite.report.run.stages import load_stages


def reach_earlier(folder: Path) -> list[Path]:
    """Return the folders of all earlier runs that are there, also those that earlier runs name in turn."""
    reached: dict[Path, Path] = {}
    places = _earlier_folders(folder)
    while places:
        place = places.pop(0)
        if place.resolve() not in (*reached, folder.resolve()):
            reached[place.resolve()] = place
            places += _earlier_folders(place)
    return list(reached.values())


def _earlier_folders(folder: Path) -> list[Path]:
    """Return the folders of earlier runs that recipe.yaml names, as far as they are there."""
    if not (folder / RECIPE_FILE).exists():
        return []
    recipe = read_yaml(folder / RECIPE_FILE)
    names = recipe.get("earlier") if isinstance(recipe, dict) else None
    folders = [local_path(name) for name in names or () if isinstance(name, str)]
    return [place for place in folders if place.is_dir()]


_BETTER = {"none": 0, "question": 1, "row": 2}


@dataclass(frozen=True)
class RowAnswer:
    """The answer for one row."""

    match: RowMatch
    """row: it is among the rows to forget. question: only its question is. none: neither."""
    folder: Path
    """The run whose record has it; the first one for `none`."""


def find_rows(folder: Path, rows: Sequence[RowContent], key: str | Path | None = None) -> list[RowAnswer]:
    """Return an answer for each row, by the record and the key in a run's folder.

    Earlier runs that the run names are searched too, as far as they are there with their keys. key: a copy of the
    run's record.key. Raise UsageError without record or key, FormatError for a broken one, and MismatchError for the
    key of another record, and for texts where the rows to forget were questions, or the other way round.
    """
    if not (folder / RECORD_FILE).exists():
        raise UsageError(f"{folder}: no {RECORD_FILE} in there; a finished run has one")
    answers = _answers(folder, rows, local_path(key) if key else folder / KEY_FILE)
    earlier = reach_earlier(folder)
    if not earlier and all(answer.match == "none" for answer in answers):
        _check_form(folder, rows)
    for place in earlier:
        if (place / RECORD_FILE).exists() and (place / KEY_FILE).exists():
            others = _answers(place, rows, place / KEY_FILE)
            pairs = zip(answers, others, strict=True)
            answers = [b if _BETTER[b.match] > _BETTER[a.match] else a for a, b in pairs]
    return answers


def _answers(folder: Path, rows: Sequence[RowContent], key: Path) -> list[RowAnswer]:
    record = load_record(folder / RECORD_FILE)
    return [RowAnswer(match, folder) for match in load_key(key).find(rows, record.forget_rows)]


def _check_form(folder: Path, rows: Sequence[RowContent]) -> None:
    """Raise MismatchError if the rows given are texts and those to forget questions, or the reverse: none matches."""
    has_questions = bool(load_record(folder / RECORD_FILE).forget_rows.questions)
    if any(bool(question) == has_questions for question, _, _ in rows):
        return
    here, there = ("texts", "questions with answers") if has_questions else ("questions", "texts")
    raise MismatchError(f"these rows are {here}, and those to forget were {there}; give them in that form")


FileState = Literal[
    "same", "as published", "differs", "missing", "not here", "unreadable", "unnamed", "unsealed", "not in the record"
]
"""The state of a file against a record, by its bytes.

as published: as `msa-lite publish` sends it. missing: its folder is here. not here: nor is its folder, or it is a run's
own file, which may be left out. unnamed: a loader reads it with the model, and the record has no hash of it. unsealed:
it goes with a record, such as a report, and this one has no hash of it.
"""
_FAULTS: Mapping[str, str] = {
    "differs": "is not the file that {} has the hash of",
    "missing": "is missing, and {} has its hash",
    "unreadable": "cannot be read, so it was not compared with {}",
    "unnamed": "is loaded with the model, and {} has no hash of it",
    "unsealed": "is not sealed: {} has no hash of it",
}
_LOADED = ("*.safetensors", "*config.json", INDEX_FILE, CODE)


@dataclass
class RecordCheck:
    """The findings of the check of a record."""

    folder: Path
    """The folder that is compared with it: a run's, or that of a model alone."""
    file: Path
    """The record's file."""
    record: Removal | None = None
    """The record; None where it cannot be read."""
    files: dict[str, FileState] = field(default_factory=dict)
    """The state of each file, by its name in the folder, or its path where it lies beside a record elsewhere."""
    beside: frozenset[str] = frozenset()
    """The paths of those that lie beside a record elsewhere."""
    broken: list[str] = field(default_factory=list)
    """Faults of the record itself, of its key, signature and chain, and a model that is known as another."""
    statements: list[str] = field(default_factory=list)
    """The parts that were checked and fit."""
    notes: list[str] = field(default_factory=list)
    """The parts that could not be checked, each with a way out."""
    json_keys: ClassVar = {
        "request": "record.request", "files": "files", "faults": "faults", "statements": "statements", "notes": "notes",
    }  # fmt: skip

    @property
    def differing(self) -> list[str]:
        """Return the names of the files that do not fit the record."""
        return [name for name, state in self.files.items() if state in _FAULTS]

    @property
    def faults(self) -> list[str]:
        """Return all faults, of files too."""
        return self.broken + [
            f"{name if name in self.beside else self.folder / name}: {_FAULTS[self.files[name]].format(self.file.name)}"
            + (f"; {way}" if (way := way_out(name)) else "")
            for name in self.differing
        ]

    def add_link(self, file: Path, item: EarlierRecord, run: Path | None) -> None:
        """Add what became of one earlier record that the record in `file` names. run: the folder that has it."""
        request = f"the earlier request {item.request or 'without an id'}"
        if run:
            self.statements.append(f"{run / RECORD_FILE}: {request}, as {file} names it")
        elif item.record_sha256 is None:
            self.notes.append(f"{file}: an earlier request has no record")
        else:
            self.notes.append(f"{file}: {request} is out of reach: no run here has it")


@dataclass(frozen=True)
class Verification:
    """The findings of the check of a folder. Each byte was read once."""

    folder: Path
    stages: dict[str, list[str]]
    """The faults of each folder with a manifest, by its place in the folder."""
    records: dict[str, RecordCheck]
    """The check of each record, by the place of its run."""
    unsealed: list[str]
    """Files of which no manifest and no record has a hash."""
    json_keys: ClassVar = ("folder", "faults", "stages", "records", "unsealed")

    @property
    def stage_faults(self) -> list[str]:
        """Return the faults of all folders with a manifest."""
        pairs = [(place, fault) for place, faults in self.stages.items() for fault in faults]
        return [fault if place == "." else f"{place}/{fault}" for place, fault in pairs]

    @property
    def faults(self) -> list[str]:
        """Return all faults."""
        return self.stage_faults + [fault for check in self.records.values() for fault in check.faults]


def verify(folder: Path, allowed_signers: str | Path | None = None) -> Verification:
    """Check a stage's folder, or all stages and records of a run, those of baselines in it included, by content.

    allowed_signers: OpenSSH's file of signers. With it, a run's own record without a signature is a fault. Raise
    UsageError where a signature is to be checked and cannot be, and OutputError where nothing can be checked.
    """
    signs = (path for name in (RECORD_FILE, SIGNATURE_FILE) for path in folder.rglob(name))
    homes = sorted({path.parent for path in signs} | ({folder} if allowed_signers else set()))
    checks = {home: check_record(home, allowed_signers if home == folder else None) for home in homes}
    stages = verify_stages(folder, needed=not checks)
    known = {home / name for home in homes for name in (*checks[home].files, RECORD_FILE, SIGNATURE_FILE, KEY_FILE)}
    strange = {
        path: name
        for name, path in entries(folder).items()
        if path not in known and not _is_lock(path) and stages.keys().isdisjoint((path, *path.parents))
    }
    for home in {folder, *homes}:
        with suppress(MsaError):  # no run, or a damaged list, which is one of these files itself
            places = [home / stage.folder for stage in load_stages(home).stages if stage.folder]
            lost = [place for place in places if any(place in path.parents for path in strange)]
            stages |= {place: [f"{MANIFEST}: missing"] for place in lost if place not in stages}
    return Verification(
        folder,
        {str(place.relative_to(folder)): faults for place, faults in sorted(stages.items())},
        {str(home.relative_to(folder)): check for home, check in checks.items()},
        [*strange.values()],
    )


def _is_lock(path: Path) -> bool:
    return path.name.endswith(".lock") and path.is_file() and not path.stat().st_size


def check_record(folder: Path, allowed_signers: str | Path | None = None) -> RecordCheck:
    """Check the record in a run's folder. Raise UsageError where a signature is to be checked and cannot be."""
    findings = _open_record(folder, folder / RECORD_FILE)
    record = findings.record
    if record is None:
        return findings
    model = folder / record.result.name
    findings.files = _own_states(folder, record)
    there = f"{model.name}/" if model.is_dir() else "/"  # what is missing in there is a fault
    lost = [name for name, state in findings.files.items() if state == "missing" and not name.startswith(there)]
    findings.files |= dict.fromkeys(lost, "not here")
    if model.is_dir():
        _compare_model(findings, record, model)
    if absent := [*lost, *([] if model.is_dir() else [f"{model.name}/"])]:
        findings.notes.append(f"{folder}: {', '.join(absent)}: not here, so not compared with the record")
    _check_key(findings, record)
    _check_signed(findings, allowed_signers)
    _check_chain(findings, record)
    if not findings.faults:
        same = [name for name in record.files if findings.files[name] == "same"]
        same += [f"{len(record.result.files)} files of {model.name}/"] if model.is_dir() else []
        compared = f"agrees with {', '.join(same)}" if same else "there is nothing to compare it with"
        findings.statements.insert(0, f"{findings.file}: has its own hash, and {compared}")
    return findings


def _own_states(home: Path, record: Removal) -> dict[str, FileState]:
    """Return the states of a run's own files, which lie beside its record; unsealed ones, too."""
    states = {name: _state(home, name, sha256) for name, sha256 in record.files.items()}
    return states | {name: "unsealed" for name in handed_on(home) if name not in states}


def check_downloaded(folder: Path, file: Path, allowed_signers: str | Path | None = None) -> RecordCheck:
    """Check a model's folder against a record that lies elsewhere, and the signature, report and the like beside that.

    All files of the folder are named. Those that no loader reads may be others than in the run, such as the card. Raise
    UsageError for the folder of a run, without a record, and where a signature is to be checked and cannot be.
    """
    if not file.exists():
        raise UsageError(f"{file}: no such file; give the {RECORD_FILE} of a run")
    findings = _open_record(folder, file)
    record = findings.record
    if record is None:
        return findings
    if not any(folder.glob("*.safetensors")) and (folder / record.result.name).is_dir():
        raise UsageError(f"{folder}: holds no model itself; give {folder / record.result.name}")
    _compare_model(findings, record, folder)
    manifest = f"{record.result.name}/{MANIFEST}"
    absent = {name for name in record.files if name != manifest}
    for home in [folder] if folder.samefile(file.parent) else [folder, file.parent]:
        start = "" if home is folder else f"{home}/"
        states = {name: state for name, state in _own_states(home, record).items() if state != "missing"}
        states.pop(manifest, None)  # compared below, with the model
        findings.files |= {start + name: state for name, state in states.items()}
        findings.beside |= {start + name for name in states if start}
        absent -= states.keys()
    if absent:
        findings.notes.append(f"{file.parent}: {', '.join(sorted(absent))}: not here, so not compared with the record")
    for name in entries(folder):
        findings.files.setdefault(name, "not in the record")
    if _state(folder, MANIFEST, record.files.get(manifest, "")) == "same":
        findings.files[MANIFEST] = "same"
    _check_signed(findings, allowed_signers)
    for item in record.earlier:
        findings.add_link(file, item, None)
    if not findings.faults:
        request = f" of the request {record.request}" if record.request else ""
        agrees = f"agrees with {file}: the unlearned {record.result.name}{request}, {len(record.result.files)} files"
        beside = [name for name in findings.files if name in findings.beside]
        findings.statements.insert(0, f"{folder}: {', '.join([agrees, *beside])}")
        outcome = f"{record.verdict.outcome}. " if record.verdict.outcome else ""
        findings.statements.append(f"{file}: its verdict: {outcome}{record.verdict.sentence}")
    return findings


def _open_record(folder: Path, file: Path) -> RecordCheck:
    """Read a record and check it within."""
    try:
        record = load_record(file)
    except MsaError as error:
        return RecordCheck(folder, file, broken=[str(error)])
    return RecordCheck(folder, file, record, broken=[f"{file}: {fault}" for fault in _inner_faults(record)])


def _compare_model(findings: RecordCheck, record: Removal, model: Path) -> None:
    """Compare the unlearned model's files by content; name others that a loader reads; tell a known other model."""
    result, prefix = record.result, "" if model == findings.folder else f"{model.name}/"
    for name, item in result.files.items():
        published = result.published.get(name)
        largest = _LARGEST if published else item.bytes
        findings.files[prefix + name] = _state(model, name, item.sha256, published, largest)
    try:
        present, loaded = content_files(model), {name_in(model, path) for path in tokenizer_files(model)}
        loaded |= {name for name in present if any(fnmatch(name, pattern) for pattern in _LOADED)}
        findings.files |= {prefix + name: "unnamed" for name in sorted(loaded - result.files.keys())}
        size = sum(path.stat().st_size for path in present.values())
        recorded = sum(item.bytes for item in result.files.values())
        if findings.differing and size <= 2 * recorded + _LARGEST:  # else it is none of these models
            revision, end = hash_content(model), f"of the record, not the unlearned {result.name}"
            roles = [role for role, weights in record.models.items() if weights.revision == revision]
            findings.broken += [f"{model}: is the {role} {end}" for role in roles]
    except (MsaError, OSError) as error:  # a name that is no UTF-8, a file that nobody may read
        findings.broken.append(str(error))


_LARGEST = 1 << 30  # bytes of a file of which a record has no size; a report with rows takes some hundreds a row


def _state(folder: Path, name: str, sha256: str, published: str | None = None, largest: int = _LARGEST) -> FileState:
    """Return the state of a file that a record names. A name that leads out of the folder names none in it.

    largest: the most bytes that it can have; more are not read.
    """
    path = folder / name
    if not os.path.lexists(path) or {"..", "/"} & {*Path(name).parts}:
        return "missing"
    try:
        if path.is_file() and path.stat().st_size > largest:
            return "differs"
        found = hash_file(path)
    except (MsaError, OSError):
        return "unreadable"
    return "same" if found == sha256 else "as published" if found == published else "differs"


def _inner_faults(record: Removal) -> Iterator[str]:
    """Yield what does not fit within the record."""
    if hashed_revision(record.result.files) != record.result.revision:
        yield "result: its revision is not the hash of its files"
    for name in ("rows", "questions"):
        hashes = getattr(record.forget_rows, name)
        if hashes != sorted(set(hashes)):
            yield f"forget_rows.{name}: not sorted, or a hash stands twice"
    if not any(name.endswith(".safetensors") for name in record.result.files):
        yield "result.files: no weights"
    if len(record.forget_rows.rows) > record.row_counts.get("forget", 0):
        yield "forget_rows.rows: more hashes than rows were learnt"
    last = record.earlier[-1].record_sha256 if record.earlier else None
    if record.previous_sha256 != last:
        yield "previous_sha256: not the hash of the last earlier record"


def _check_key(findings: RecordCheck, record: Removal) -> None:
    key = findings.folder / KEY_FILE
    if not key.exists():
        findings.notes.append(f"{key}: not there; without it nobody can tell whether a row is among the hashed ones")
        return
    try:
        if load_key(key).digest("check") != record.forget_rows.check:
            findings.broken.append(f"{key}: is not the key that the record was made with")
    except MsaError as error:
        findings.broken.append(str(error))


def _check_signed(findings: RecordCheck, allowed_signers: str | Path | None) -> None:
    signature = signature_of(findings.file)
    if not os.path.lexists(signature):
        where = findings.broken if allowed_signers else findings.notes
        where.append(
            f"{findings.file}: not signed, so nobody vouches for it; to sign it: {signing_command(findings.file)}"
        )
        return
    try:
        findings.statements.append(f"{signature}: {check_signature(findings.file, allowed_signers)}")
    except MsaError as error:
        if error.exit_code == 2 and allowed_signers:
            raise
        (findings.notes if error.exit_code == 2 else findings.broken).append(f"{signature}: {error}")


def _check_chain(findings: RecordCheck, record: Removal) -> None:
    """Follow the chain of earlier records as far as the recipes name folders that are there."""
    folder = findings.folder
    records = {folder: record}
    try:
        reached = reach_earlier(folder)
    except MsaError as error:
        findings.broken.append(str(error))
        return
    for place in reached:
        try:
            if (place / RECORD_FILE).exists():
                records[place] = load_record(place / RECORD_FILE)
        except MsaError as error:
            findings.broken.append(str(error))
    hashes = {record_hash(place): place for place in records if place != folder}
    named = set()
    for place, later in records.items():
        for item in later.earlier:
            named.add(item.record_sha256)
            run = hashes.get(item.record_sha256)
            findings.add_link(place / RECORD_FILE, item, run)
            if run and records[run].request != item.request:
                findings.broken.append(
                    f"{place / RECORD_FILE}: earlier: names the request {item.request}, whose record says "
                    f"{records[run].request}"
                )
    findings.broken += [
        f"{place / RECORD_FILE}: is not as a later record names it; if the change is right, run the later recipe again"
        for sha256, place in hashes.items()
        if sha256 not in named
    ]
