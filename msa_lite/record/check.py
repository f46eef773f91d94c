"""Check a record and the chain of earlier ones; answer by them whether a row was to be forgotten."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from msa_lite.errors import MismatchError, MsaError, UsageError
from msa_lite.io.files.reading import local_path, read_yaml
from msa_lite.io.finished.seal import load_manifest
from msa_lite.record.facts import (
    hash_files,
    hashed_revision,
    read_attacks,
    read_evidence,
    read_scores,
    read_vectors,
    read_verdict,
)
from msa_lite.record.schema import EarlierRecord, Removal, VectorWeights
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
from msa_lite.report.attacks import ATTACKS_FOLDER
from msa_lite.report.evidence import EVIDENCE_FOLDER
from msa_lite.report.provenance import RECIPE_FILE
from msa_lite.report.verdict import VERDICT_FILE


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
    """Raise MismatchError where no row can be among the rows to forget, since one are texts, the others questions."""
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
    places: list[str] = field(default_factory=list)
    """The parts of the run that the record was compared with."""
    json_keys: ClassVar = {
        "request": "record.request", "faults": "faults", "statements": "statements", "notes": "notes",
    }  # fmt: skip

    def add_faults(self, faults: Iterator[str]) -> None:
        """Add faults of the record."""
        self.faults += [f"{self.file}: {fault}" for fault in faults]

    def compare(self, where: str, recorded: Any, actual: Any) -> None:
        """Add each value that differs, as `scores.models.target.accuracy_f.value: 0.1, in the run 0.2`."""
        self.add_faults(_differences(where, recorded, actual))

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

    allowed_signers: those whose signature counts for the run's own record; where it has none, that is a fault. Raise
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
    findings.add_faults(_inner_faults(record))
    for check in (_check_key, _check_result, _check_outcome, _check_attacks, _check_evidence):
        try:
            check(folder, record, findings)
        except MsaError as error:
            findings.faults.append(str(error))
        except (KeyError, TypeError, ValueError) as error:  # a manifest that another program wrote
            findings.faults.append(f"{folder / record.result.name}: its manifest is not one of a merge ({error!r})")
    if not findings.faults:
        compared = ", ".join(findings.places) or "itself alone"
        findings.statements.append(f"{findings.file}: as it was written, and agrees with {compared}")
    _check_signed(folder, allowed_signers, findings)
    _check_chain(folder, record, findings)
    return findings


def _inner_faults(record: Removal) -> Iterator[str]:
    """Yield what does not fit within the record."""
    weights = {**{f"models.{name}": source for name, source in record.models.items()}, "result": record.result}
    weights |= {f"vectors.{vector.name}": vector for vector in record.vectors}
    for place, model in weights.items():
        if model.revision.startswith("sha256:") and model.files and hashed_revision(model.files) != model.revision:
            yield f"{place}: its revision is not the hash of its files"
    for name in ("rows", "questions"):
        hashes = getattr(record.forget_rows, name)
        if hashes != sorted(set(hashes)):
            yield f"forget_rows.{name}: not sorted, or a hash stands twice"
    if len(record.forget_rows.rows) > record.row_counts.get("forget", 0):
        yield "forget_rows.rows: more hashes than rows were learnt"
    last = record.earlier[-1].record_sha256 if record.earlier else None
    if record.previous_sha256 != last:
        yield "previous_sha256: not the hash of the last earlier record"


def _check_key(folder: Path, record: Removal, findings: RecordCheck) -> None:
    if not (folder / KEY_FILE).exists():
        findings.notes.append(
            f"{folder / KEY_FILE}: not there; without it nobody can tell whether a row is among the hashed ones"
        )
        return
    if load_key(folder / KEY_FILE).digest("check") != record.forget_rows.check:
        findings.faults.append(f"{folder / KEY_FILE}: is not the key that the record was made with")


def _check_result(folder: Path, record: Removal, findings: RecordCheck) -> None:
    """Compare the record with the manifest of the unlearned model."""
    kind = record.result.name
    manifest = load_manifest(folder / kind)
    if manifest is None:
        findings.notes.append(
            f"{folder / kind}: not there, or damaged, so its hashes were not compared with the record's"
        )
        return
    findings.places.append(f"{kind}/")
    files = {name: manifest["files"].get(name) for name in record.result.files}
    known = {name: file.model_dump() for name, file in record.result.files.items()}
    findings.compare("result.files", known, files)
    inputs = manifest["inputs"]
    for name, model in record.models.items():
        if name in inputs:
            findings.compare(f"models.{name}.revision", model.revision, inputs[name]["revision"])
    merged = read_vectors(manifest, record.vectors)
    for key in ("revision", "weight"):
        ours, theirs = ({v.name: getattr(v, key) for v in vectors} for vectors in (record.vectors, merged))
        findings.compare(f"vectors.{key}", ours, theirs)
    is_later = "θ_12" in record.formula  # a checkpoint's β takes θ_2 out again; its weight is compared above
    merged_by = {name: value for name, value in inputs.items() if not (is_later and name == "beta")}
    strengths = {name: merged_by.get(name, value) for name, value in record.strengths.items()}
    findings.compare("strengths", record.strengths, strengths)
    findings.compare("versions", record.versions, manifest["versions"])
    for vector in record.vectors:
        _check_vector(folder, manifest["sources"].get(vector.name, vector.name), vector, findings)


def _check_vector(folder: Path, source: str, vector: VectorWeights, findings: RecordCheck) -> None:
    """Compare a vector with its folder, if that is still there. source: the folder's name in the manifest."""
    place, beside = local_path(source), folder / "vectors" / source.rpartition("vectors/")[2]
    if beside.is_dir() and hashed_revision(hash_files(beside)) == vector.revision:
        place = beside  # the run was moved; in its former place there may be another
    if not place.is_dir():
        findings.notes.append(f"{folder}: the {vector.name} vector is gone (purged?), so its hashes were not compared")
        return
    findings.places.append(f"the {vector.name} vector")
    known, files = ({n: f.model_dump() for n, f in hashes.items()} for hashes in (vector.files, hash_files(place)))
    findings.compare(f"vectors.{vector.name}.files", known, files)


def _check_outcome(folder: Path, record: Removal, findings: RecordCheck) -> None:
    """Compare the record with verdict and scores."""
    if (folder / VERDICT_FILE).exists():
        findings.places.append(VERDICT_FILE)
        actual = read_verdict(folder).model_dump(mode="json")
        findings.compare("verdict", record.verdict.model_dump(mode="json"), actual)
    elif record.verdict.outcome is not None:
        findings.notes.append(f"{folder / VERDICT_FILE}: not there, so the verdict was not compared with the record's")
    if record.scores and (scores := read_scores(folder, record.scores.models)):
        findings.places.append("evaluation/")
        findings.compare("scores", record.scores.model_dump(mode="json"), scores.model_dump(mode="json"))
    elif record.scores:
        findings.notes.append(
            f"{folder / 'evaluation'}: not all models' reports are there, so the scores were not compared"
        )


def _check_attacks(folder: Path, record: Removal, findings: RecordCheck) -> None:
    """Compare the record with what attacks brought back."""
    if record.attacks is None:
        return
    if attacks := read_attacks(folder, record.result.name):
        findings.places.append(f"{ATTACKS_FOLDER}/")
        ours, theirs = ({a.name: a.model_dump(mode="json") for a in several} for several in (record.attacks, attacks))
        findings.compare("attacks", ours, theirs)
    else:
        findings.notes.append(f"{folder / ATTACKS_FOLDER}: not there, so the attacks were not compared")


def _check_evidence(folder: Path, record: Removal, findings: RecordCheck) -> None:
    """Compare the record with what was found beside the scores."""
    if not record.evidence:
        return
    if evidence := read_evidence(folder, record.result.name):
        findings.places.append(f"{EVIDENCE_FOLDER}/")
        pair = (record.evidence, evidence)
        ours, theirs = ({found.kind: found.model_dump(mode="json") for found in several} for several in pair)
        findings.compare("evidence", ours, theirs)
    else:
        findings.notes.append(f"{folder / EVIDENCE_FOLDER}: not there, so the evidence was not compared")


def _differences(where: str, recorded: Any, actual: Any) -> Iterator[str]:
    """Yield each value that differs, with its dotted key."""
    if isinstance(recorded, Mapping) and isinstance(actual, Mapping):
        for key in sorted({*recorded, *actual}):
            yield from _differences(f"{where}.{key}", recorded.get(key), actual.get(key))
    elif recorded != actual:
        yield f"{where}: {recorded}, in the run {actual}"


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
    reached = reach_earlier(folder)
    records = {folder: record}
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
