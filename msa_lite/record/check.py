"""Check a record and the chain of earlier ones; answer by them whether a row was to be forgotten."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from msa_lite.errors import MismatchError, MsaError, UsageError
from msa_lite.io.files.reading import local_path, read_yaml
from msa_lite.io.files.writing import hash_file
from msa_lite.record.facts import hash_files, hashed_revision
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
    signing_command,
)
from msa_lite.report.run.provenance import RECIPE_FILE


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


@dataclass
class RecordCheck:
    """The findings of the check of a record."""

    record: Removal | None
    """The record; None where it cannot be read."""
    file: Path
    """The record's file."""
    faults: list[str] = field(default_factory=list)
    """The faults: parts that do not fit."""
    statements: list[str] = field(default_factory=list)
    """The parts that were checked and fit."""
    notes: list[str] = field(default_factory=list)
    """The parts that could not be checked, each with a way out."""
    json_keys: ClassVar = {
        "request": "record.request", "faults": "faults", "statements": "statements", "notes": "notes",
    }  # fmt: skip

    def add_link(self, place: Path, item: EarlierRecord, run: Path | None) -> None:
        """Add what became of one earlier record that the record at `place` names. run: the folder that has it."""
        request = f"the earlier request {item.request or 'without an id'}"
        names = place / RECORD_FILE
        if run:
            self.statements.append(f"{run / RECORD_FILE}: {request}, as {names} names it")
        elif item.record_sha256 is None:
            self.notes.append(f"{names}: an earlier request has no record")
        else:
            self.notes.append(f"{names}: {request} is out of reach: no run here has it")


def check_records(folder: Path, allowed_signers: str | Path | None = None) -> dict[Path, RecordCheck]:
    """Check the record of a run and those of all runs below it, such as baselines; return the checks by folder.

    allowed_signers: OpenSSH's file of signers. With it, a run's own record without a signature is a fault. Raise
    UsageError where a signature is to be checked and cannot be.
    """
    below = [path.parent for path in sorted(folder.rglob(RECORD_FILE)) if path.parent != folder]
    checks = {}
    if allowed_signers or (folder / RECORD_FILE).exists():
        checks[folder] = check_record(folder, allowed_signers)
    return checks | {place: check_record(place) for place in below}


def check_record(folder: Path, allowed_signers: str | Path | None = None) -> RecordCheck:
    """Check the record in a run's folder. Raise UsageError where a signature is to be checked and cannot be."""
    try:
        record = load_record(folder / RECORD_FILE)
    except MsaError as error:
        return RecordCheck(None, folder / RECORD_FILE, faults=[str(error)])
    findings = RecordCheck(record, folder / RECORD_FILE)
    findings.faults += [f"{findings.file}: {fault}" for fault in _inner_faults(record)]
    present = [name for name in record.files if (folder / name).exists()]
    for faults in (_key_faults(folder, record, findings.notes), _file_faults(folder, record, present)):
        try:
            findings.faults += faults
        except (MsaError, ValueError) as error:  # a damaged file; a manifest that another program wrote
            findings.faults.append(str(error))
    if missing := [name for name in record.files if name not in present]:
        findings.notes.append(f"{folder}: {', '.join(missing)}: not there, so not compared with the record")
    if not findings.faults:
        compared = ", ".join(present) or "itself alone"
        findings.statements.append(f"{findings.file}: as it was written, and agrees with {compared}")
    _check_signed(folder, allowed_signers, findings)
    _check_chain(folder, record, findings)
    return findings


def _inner_faults(record: Removal) -> Iterator[str]:
    """Yield what does not fit within the record."""
    if hashed_revision(record.result.files) != record.result.revision:
        yield "result: its revision is not the hash of its files"
    for name in ("rows", "questions"):
        hashes = getattr(record.forget_rows, name)
        if hashes != sorted(set(hashes)):
            yield f"forget_rows.{name}: not sorted, or a hash stands twice"
    if len(record.forget_rows.rows) > record.row_counts.get("forget", 0):
        yield "forget_rows.rows: more hashes than rows were learnt"
    last = record.earlier[-1].record_sha256 if record.earlier else None
    if record.previous_sha256 != last:
        yield "previous_sha256: not the hash of the last earlier record"


def _key_faults(folder: Path, record: Removal, notes: list[str]) -> Iterator[str]:
    if not (folder / KEY_FILE).exists():
        notes.append(
            f"{folder / KEY_FILE}: not there; without it nobody can tell whether a row is among the hashed ones"
        )
    elif load_key(folder / KEY_FILE).digest("check") != record.forget_rows.check:
        yield f"{folder / KEY_FILE}: is not the key that the record was made with"


def _file_faults(folder: Path, record: Removal, present: Sequence[str]) -> Iterator[str]:
    """Yield the files of the run, and of the unlearned model, that are not those that the record has the hashes of."""
    for name in present:
        if hash_file(folder / name) != record.files[name]:
            way = f"; `msa-lite report {folder}` writes it anew" if name.startswith("report.") else ""
            yield f"{folder / name}: is not the file that {RECORD_FILE} has the hash of{way}"
    model = folder / record.result.name
    files = hash_files(model) if model.is_dir() else record.result.files
    if others := [name for name, known in record.result.files.items() if files.get(name) != known]:
        yield f"{model}: not the weights that {RECORD_FILE} has the hashes of: {', '.join(others)}"


def _check_signed(folder: Path, allowed_signers: str | Path | None, findings: RecordCheck) -> None:
    if not (folder / SIGNATURE_FILE).exists():
        where = findings.faults if allowed_signers else findings.notes
        where.append(f"{findings.file}: not signed; to sign it: {signing_command(folder)}")
        return
    try:
        findings.statements.append(f"{folder / SIGNATURE_FILE}: {check_signature(folder, allowed_signers)}")
    except MsaError as error:
        if error.exit_code == 2 and allowed_signers:
            raise
        (findings.notes if error.exit_code == 2 else findings.faults).append(f"{folder / SIGNATURE_FILE}: {error}")


def _check_chain(folder: Path, record: Removal, findings: RecordCheck) -> None:
    """Follow the chain of earlier records as far as the recipes name folders that are there."""
    records = {folder: record}
    try:
        reached = reach_earlier(folder)
    except MsaError as error:
        findings.faults.append(str(error))
        return
    for place in reached:
        try:
            if (place / RECORD_FILE).exists():
                records[place] = load_record(place / RECORD_FILE)
        except MsaError as error:
            findings.faults.append(str(error))
    hashes = {record_hash(place): place for place in records if place != folder}
    named = set()
    for place, later in records.items():
        for item in later.earlier:
            named.add(item.record_sha256)
            run = hashes.get(item.record_sha256)
            findings.add_link(place, item, run)
            if run and records[run].request != item.request:
                findings.faults.append(
                    f"{place / RECORD_FILE}: earlier: names the request {item.request}, whose record says "
                    f"{records[run].request}"
                )
    findings.faults += [
        f"{place / RECORD_FILE}: is not as a later record names it; if the change is right, run the later recipe again"
        for sha256, place in hashes.items()
        if sha256 not in named
    ]
