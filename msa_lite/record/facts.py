"""Read from a run's folder what its record says, and write it; a rerun that changes nothing leaves it byte for byte."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from msa_lite.catalogue import ATTACKS
from msa_lite.errors import FormatError, MismatchError, MsaError, join_faults
from msa_lite.io.files.writing import hash_file
from msa_lite.io.finished.seal import MANIFEST, describe_file
from msa_lite.io.weights.hub import content_files, revision_of
from msa_lite.record.schema import EarlierRecord, FileHash, Judgement, Removal, ResultWeights, VectorWeights
from msa_lite.record.seal import KEY_FILE, RECORD_FILE, SIGNATURE_FILE, load_record, record_hash, store_record
from msa_lite.report import REPORT_FILE
from msa_lite.report.run.attacks import ATTACKS_FOLDER
from msa_lite.report.run.provenance import PAGE_FILE, RECIPE_FILE
from msa_lite.report.verdict.verdict import VERDICT_FILE, NoVerdict, Verdict

logger = logging.getLogger(__name__)


ResultKind = Literal["model", "adapter"]
"""The kind of a result: its folder in the run, and the kind of its manifest."""


def hashed_revision(files: Mapping[str, FileHash]) -> str:
    """Return the revision of a local folder by its files."""
    return revision_of({name: file.sha256 for name, file in files.items()})


def hash_files(folder: Path) -> dict[str, FileHash]:
    """Return size and hash of a model's or vector's files."""
    return {name: FileHash(**describe_file(path)) for name, path in content_files(folder).items()}


def hash_result(folder: Path, kind: ResultKind) -> ResultWeights:
    """Return the unlearned model of a run by its content."""
    files = hash_files(folder / kind)
    return ResultWeights(name=kind, revision=hashed_revision(files), files=files)


def handed_on(folder: Path) -> list[str]:
    """Return the names of the files beside a record that go with it: recipe, verdict, findings of attacks, report."""
    findings = [f"{ATTACKS_FOLDER}/{name}{REPORT_FILE}" for name in ("", *(f"{name}/" for name in ATTACKS))]
    names = (RECIPE_FILE, VERDICT_FILE, *findings, PAGE_FILE, REPORT_FILE)
    return [name for name in names if os.path.lexists(folder / name)]


def hash_run_files(folder: Path, kind: ResultKind) -> dict[str, str]:
    """Return the SHA-256 of the files that a run writes at its end, and of the manifest of the unlearned model."""
    own = [name for name in handed_on(folder) if not name.startswith(ATTACKS_FOLDER)]
    return {name: hash_file(folder / name) for name in (*own, f"{kind}/{MANIFEST}")}


def read_vectors(manifest: Mapping[str, Any]) -> list[VectorWeights]:
    """Return the vectors that a merge's manifest names."""
    weights = {term["name"]: float(term["weight"]) for term in manifest["terms"]}
    return [
        VectorWeights(name=name, weight=weights[name], revision=value["revision"])
        for name, value in manifest["inputs"].items()
        if isinstance(value, dict) and "revision" in value and name not in ("target", "prior", "checkpoint")
    ]


def judgement_of(verdict: Verdict | NoVerdict) -> Judgement:
    """Return the verdict on a run, as its record has it."""
    sentence = verdict.reason if isinstance(verdict, NoVerdict) else verdict.sentence
    return Judgement(outcome=verdict.outcome, sentence=sentence)


def read_earlier(folder: Path) -> EarlierRecord:
    """Return an earlier run as the next record names it."""
    if not (folder / RECORD_FILE).exists():
        logger.warning("%s: has no record, so the chain ends there; run it again for one", folder)
        return EarlierRecord(request=None, record_sha256=None)
    return EarlierRecord(request=load_record(folder / RECORD_FILE).request, record_sha256=record_hash(folder))


def utc(seconds: float) -> str:
    """Return a time in seconds since 1970 as text, to the second."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


_CHANGING = {"started", "finished", "record_sha256"}  # may differ where nothing changed


def write_run_record(folder: Path, record: Removal) -> Removal:
    """Write record.json into a run's folder, unless the one that is there says the same but for its times.

    Findings of attacks, which have their hashes in the former one, keep them.
    """
    former = _former(folder)
    attacks = [name for name in handed_on(folder) if name.startswith(ATTACKS_FOLDER)]
    kept = {name: former.files[name] for name in attacks if former and name in former.files}
    record = record.model_copy(update={"files": kept | record.files})
    if former and former.model_dump(exclude=_CHANGING) == record.model_dump(exclude=_CHANGING):
        return former
    if former and former.forget_rows.check != record.forget_rows.check:
        logger.warning("%s has been replaced: the key of before does not fit the new record", KEY_FILE)
    store_record(record, folder / RECORD_FILE)
    if (folder / SIGNATURE_FILE).exists():
        logger.warning(
            "%s has changed, so %s is no signature of it any more; sign it again", folder / RECORD_FILE, SIGNATURE_FILE
        )
    return record


def way_out(name: str) -> str:
    """Return what makes a file anew that goes with a record; nothing for one that only the run makes."""
    ways = {"report": "`msa-lite report RUN` writes it anew"}
    ways[ATTACKS_FOLDER] = "`msa-lite attack RUN` writes it anew; once the data is purged, remove it"
    return ways.get(re.split("[./]", name)[0], "")


def edited_files(folder: Path) -> dict[str, str]:
    """Return the files that are not those that the record of a finished run has the hashes of: a fault for each name.

    A run that is unfinished, or was begun again, has none: its record tells of another state. Raise FormatError for a
    broken record.
    """
    record = _sealing_record(folder)
    known = record.files if record else {}
    here = dict.fromkeys([*known, *handed_on(folder)]) if record else {}
    edited = [name for name in here if os.path.lexists(folder / name) and _hash(folder / name) != known.get(name)]
    ways = {name: way_out(name) or "put that one back, or run the recipe again" for name in edited}
    return {name: f"{name}: not the file that {RECORD_FILE} has the hash of; {way}" for name, way in ways.items()}


@contextmanager
def resealed(folder: Path, hashes: Mapping[str, str]) -> Iterator[None]:
    """Seal files that the block writes, in the record of a finished run that has one; all other hashes stay.

    hashes: their SHA-256 by name. Raise MismatchError before the block where another file is not as recorded: nothing
    that was edited is sealed. The user is told that a signature will not fit any more.
    """
    if faults := [fault for name, fault in edited_files(folder).items() if name not in hashes]:
        raise MismatchError(join_faults(f"{folder}: differs from its record:", faults))
    record = _sealing_record(folder)
    if record is None and (folder / RECORD_FILE).exists():
        logger.warning("%s: the run is not finished, so its record has no hash of this report", folder)
    if record and not hashes.items() <= record.files.items() and (folder / SIGNATURE_FILE).exists():
        logger.warning("%s: %s", folder, UNSIGNED)
    yield
    if record:
        write_run_record(folder, record.model_copy(update={"files": record.files | dict(hashes)}))


UNSIGNED = f"{RECORD_FILE} is signed; it is sealed anew, and {SIGNATURE_FILE} will not fit it: sign it again afterwards"


def _sealing_record(folder: Path) -> Removal | None:
    """Return the record of a run; None without one, and where the verdict, which comes last, is not there."""
    has_record = (folder / RECORD_FILE).exists() and (folder / VERDICT_FILE).exists()
    return load_record(folder / RECORD_FILE) if has_record else None


def _hash(path: Path) -> str | None:
    """Return a file's SHA-256; None for what cannot be read."""
    with suppress(MsaError, OSError):
        return hash_file(path)
    return None


def _former(folder: Path) -> Removal | None:
    """Return the record that is there; None where there is none, or a broken one, which is made anew."""
    try:
        return load_record(folder / RECORD_FILE) if (folder / RECORD_FILE).exists() else None
    except FormatError as error:
        logger.warning("%s; it is written anew", error)
        return None
