"""Read from a run's folder what its record says, and write it; a rerun that changes nothing leaves it byte for byte."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from msa_lite.errors import FormatError
from msa_lite.io.files.writing import hash_file
from msa_lite.io.finished.seal import MANIFEST, load_manifest
from msa_lite.io.weights.hub import content_files, revision_of
from msa_lite.record.schema import EarlierRecord, FileHash, Judgement, Removal, ResultWeights, VectorWeights
from msa_lite.record.seal import KEY_FILE, RECORD_FILE, SIGNATURE_FILE, load_record, record_hash, store_record
from msa_lite.report import REPORT_FILE
from msa_lite.report.run.attacks import ATTACKS_FOLDER
from msa_lite.report.run.provenance import RECIPE_FILE
from msa_lite.report.verdict.verdict import VERDICT_FILE, NoVerdict, Verdict

logger = logging.getLogger(__name__)


ResultKind = Literal["model", "adapter"]
"""The kind of a result: its folder in the run, and the kind of its manifest."""


def hashed_revision(files: Mapping[str, FileHash]) -> str:
    """Return the revision of a local folder by its files."""
    return revision_of({name: file.sha256 for name, file in files.items()})


def hash_files(folder: Path) -> dict[str, FileHash]:
    """Return size and hash of a model's or vector's files. Those of a file in the manifest are read from there."""
    known = (load_manifest(folder) or {"files": {}})["files"]
    return {
        name: FileHash(**known[name]) if name in known else FileHash(sha256=hash_file(path), bytes=path.stat().st_size)
        for name, path in content_files(folder).items()
    }


def hash_result(folder: Path, kind: ResultKind) -> ResultWeights:
    """Return the unlearned model of a run by its content."""
    files = hash_files(folder / kind)
    return ResultWeights(name=kind, revision=hashed_revision(files), files=files)


def hash_run_files(folder: Path, kind: ResultKind, reports: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of a run's recipe, verdict, manifest, attacks and reports, as far as they are there."""
    names = (RECIPE_FILE, VERDICT_FILE, f"{kind}/{MANIFEST}", f"{ATTACKS_FOLDER}/{REPORT_FILE}", *reports)
    return {name: hash_file(folder / name) for name in names if (folder / name).is_file()}


def read_vectors(manifest: Mapping[str, Any]) -> list[VectorWeights]:
    """Return the vectors that a merge's manifest names."""
    weights = {term["name"]: float(term["weight"]) for term in manifest["terms"]}
    return [
        VectorWeights(name=name, weight=weights[name], revision=value["revision"])
        for name, value in manifest["inputs"].items()
        if isinstance(value, dict) and "revision" in value and name not in ("target", "prior")
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
    """Write record.json into a run's folder, unless the one that is there says the same but for its times."""
    former = _former(folder)
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


def seal_reports(folder: Path, written: Collection[str], hidden: Collection[str] = ()) -> None:
    """Enter files that were written anew into the record of a run that has one. All other hashes stay as they are.

    hidden: files that show rows by now, so that the record has no hash of them.
    """
    if former := _former(folder):
        files = {name: value for name, value in former.files.items() if name not in (*written, *hidden)}
        files |= {name: hash_file(folder / name) for name in written if (folder / name).is_file()}
        write_run_record(folder, former.model_copy(update={"files": files}))


def _former(folder: Path) -> Removal | None:
    """Return the record that is there; None where there is none, or a broken one, which is made anew."""
    try:
        return load_record(folder / RECORD_FILE) if (folder / RECORD_FILE).exists() else None
    except FormatError as error:
        logger.warning("%s; it is written anew", error)
        return None
