"""Write the record of a finished run. A rerun that changes nothing leaves it as it is, byte for byte."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msa_lite.errors import FormatError
from msa_lite.io.seal import load_manifest
from msa_lite.record.facts import (
    ResultKind,
    hash_files,
    hashed_revision,
    read_attacks,
    read_scores,
    read_vectors,
    read_verdict,
    stage_times,
    utc,
)
from msa_lite.record.keyed import KEY_FILE, RowContent, make_key
from msa_lite.record.schema import EarlierRecord, ModelWeights, Removal, ResultWeights
from msa_lite.record.store import RECORD_FILE, SIGNATURE_FILE, load_record, record_hash, store_record

logger = logging.getLogger(__name__)

_CHANGING = {"started", "finished", "stages", "record_sha256"}  # may differ where nothing changed


@dataclass(frozen=True)
class ModelSource:
    """A model that a run read."""

    name: str
    """repo@commit, or "local folder"."""
    folder: Path
    revision: str
    """The commit of a Hub repository, or the hash of a local folder."""
    tokenizer: str | None = None
    """The revision of its tokenizer, where it is not the model's own."""


@dataclass(frozen=True)
class RunFacts:
    """The facts of a run that its folder does not tell."""

    request: str | None
    """The id of the request."""
    method: str
    """"msa", or the name of a baseline."""
    formula: str
    """The merge in one line."""
    strengths: Mapping[str, Any]
    """alpha and beta; of a baseline all that was chosen."""
    kind: ResultKind
    """The form of the result."""
    models: Mapping[str, ModelSource]
    """The models by name: target, prior, ideal."""
    forget_rows: Sequence[RowContent]
    """The rows to forget."""
    row_counts: Mapping[str, int]
    """The rows that each vector learnt."""
    scored: Sequence[str]
    """The models that were scored, by name; none where the recipe wants no scores."""
    stages: Sequence[str]
    """The folders of its stages, in their order."""
    began: float
    """The time at which the run began, in seconds since 1970."""
    earlier: Sequence[Path] = ()
    """The folders of earlier runs whose vectors are part of the result."""


def write_run_record(folder: Path, run: RunFacts) -> Removal:
    """Write record.json into a run's folder, unless the one that is there says the same but for its times."""
    former, path = _former(folder), folder / RECORD_FILE
    record = _make(folder, run, former)
    if former and former.model_dump(exclude=_CHANGING) == record.model_dump(exclude=_CHANGING):
        return former
    if former and former.forget_rows.check != record.forget_rows.check:
        logger.warning("%s is not the one that the record had before; that one does not fit the new record", KEY_FILE)
    _store(record, path)
    return record


def write_attacks(folder: Path) -> None:
    """Enter what attacks brought back into the record of a run that has one."""
    former = _former(folder)
    if former is None:
        return
    attacks = read_attacks(folder, former.result.name)
    if attacks != former.attacks:
        _store(former.model_copy(update={"attacks": attacks}), folder / RECORD_FILE)


def _store(record: Removal, path: Path) -> None:
    store_record(record, path)
    signature = path.with_name(SIGNATURE_FILE)
    if signature.exists():
        logger.warning("%s has changed, so %s is no signature of it any more; sign it again", path, SIGNATURE_FILE)


def _former(folder: Path) -> Removal | None:
    """Return the record that is there; None where there is none, or a broken one, which is made anew."""
    try:
        return load_record(folder / RECORD_FILE) if (folder / RECORD_FILE).exists() else None
    except FormatError as error:
        logger.warning("%s; it is written anew", error)
        return None


def _make(folder: Path, run: RunFacts, former: Removal | None) -> Removal:
    manifest = load_manifest(folder / run.kind)
    assert manifest is not None, "the run is finished"
    files = hash_files(folder / run.kind)
    times = stage_times(folder, run.stages)
    known = {model.revision: model.files for model in former.models.values()} if former else {}
    earlier = [EarlierRecord(request=_request(other), record_sha256=record_hash(other)) for other in run.earlier]
    return Removal(
        request=run.request,
        method=run.method,
        formula=run.formula,
        strengths=dict(run.strengths),
        started=min([utc(run.began), *times.values()]),
        finished=max(times.values()),
        stages=times,
        models={
            name: ModelWeights(
                name=model.name,
                revision=model.revision,
                tokenizer=model.tokenizer,
                files=known.get(model.revision) or hash_files(model.folder),
            )
            for name, model in run.models.items()
        },
        vectors=read_vectors(manifest, former.vectors if former else ()),
        result=ResultWeights(name=run.kind, revision=hashed_revision(files), files=files),
        row_counts=dict(run.row_counts),
        forget_rows=make_key(folder / KEY_FILE).hash_rows(run.forget_rows),
        verdict=read_verdict(folder),
        scores=read_scores(folder, run.scored),
        attacks=read_attacks(folder, run.kind),
        versions=manifest["versions"],
        earlier=earlier,
        previous_sha256=earlier[-1].record_sha256 if earlier else None,
    )


def _request(folder: Path) -> str | None:
    """Return the id of an earlier run's request, by its record."""
    if not (folder / RECORD_FILE).exists():
        logger.warning(
            "%s: has no record (an earlier version of msa-lite made the run), so the chain ends there", folder
        )
        return None
    return load_record(folder / RECORD_FILE).request
