"""Read from a run's folder what its record says, and write it; a rerun that changes nothing leaves it byte for byte."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from msa_lite.errors import FormatError
from msa_lite.io.files.reading import local_path, read_object
from msa_lite.io.files.writing import hash_file
from msa_lite.io.finished.seal import CARD_FILE, MANIFEST, load_manifest
from msa_lite.io.weights.hub import content_files, revision_of
from msa_lite.record.schema import (
    INTERVAL,
    EarlierRecord,
    FileHash,
    Judgement,
    ModelWeights,
    RecordedAttack,
    RecordedBound,
    RecordedEarlier,
    RecordedEvidence,
    RecordedMetric,
    RecordedScores,
    Removal,
    ResultWeights,
    VectorWeights,
)
from msa_lite.record.seal import (
    KEY_FILE,
    RECORD_FILE,
    SIGNATURE_FILE,
    RowContent,
    load_record,
    make_key,
    record_hash,
    store_record,
)
from msa_lite.report import Metric, Report, load_report
from msa_lite.report.attacks import ATTACKS_FOLDER, load_attacks
from msa_lite.report.comeback import earlier_facts
from msa_lite.report.evidence import EVIDENCE_FOLDER, load_evidence
from msa_lite.report.provenance import result_revision
from msa_lite.report.verdict import VERDICT_FILE

logger = logging.getLogger(__name__)


ResultKind = Literal["model", "adapter"]
"""The kind of a result: its folder in the run, and the kind of its manifest."""
# Written beside the weights; they may be made anew, and a later card says nothing of when the weights were made.
_TEXTS = (CARD_FILE,)


def hashed_revision(files: Mapping[str, FileHash]) -> str:
    """Return the revision of a local folder by its files."""
    return revision_of({name: file.sha256 for name, file in files.items()})


def hash_files(folder: Path) -> dict[str, FileHash]:
    """Return size and hash of a model's or vector's files; a manifest's are taken, and no file is read for them."""
    known = (load_manifest(folder) or {"files": {}})["files"]
    return {
        name: FileHash(**known[name]) if name in known else FileHash(sha256=hash_file(path), bytes=path.stat().st_size)
        for name, path in content_files(folder).items()
    }


def read_vectors(manifest: Mapping[str, Any], former: Iterable[VectorWeights] = ()) -> list[VectorWeights]:
    """Return the vectors that a merge's manifest names.

    former: vectors with known files, for those whose folder is gone.
    """
    inputs, vectors = manifest["inputs"], []
    weights = {term["name"]: float(term["weight"]) for term in manifest["terms"]}
    known = {vector.revision: vector.files for vector in former}
    for name, value in inputs.items():
        if isinstance(value, dict) and "revision" in value and name not in ("target", "prior"):
            revision, folder = value["revision"], local_path(manifest["sources"].get(name, name))
            files = known.get(revision) or (hash_files(folder) if folder.is_dir() else {})
            vectors.append(VectorWeights(name=name, weight=weights[name], revision=revision, files=files))
    return vectors


def read_verdict(folder: Path) -> Judgement:
    """Return the verdict on a run. Raise FormatError where verdict.json is missing or broken."""
    value = read_object(folder / VERDICT_FILE)
    try:
        earlier = _earlier(value)
        if value["outcome"] is None:
            return Judgement(outcome=None, sentence=value["reason"], earlier=earlier)
        forgotten, kept = value["forgotten"], value["kept"]
        return Judgement(
            outcome=value["outcome"],
            sentence=value["sentence"],
            criteria=value["criteria"],
            reasons=value["reasons"],
            control=forgotten["control"],
            recited=forgotten["recited"],
            excess=forgotten["excess"],
            left=forgotten["left"],
            kept=kept["share"] if kept else None,
            earlier=earlier,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{folder / VERDICT_FILE}: no verdict of msa-lite ({error!r})") from error


def _earlier(verdict: Mapping[str, Any]) -> RecordedEarlier | None:
    """Return what verdict.json says of the rows of earlier requests, without the folders of their runs."""
    facts = earlier_facts(verdict)
    if facts is None:
        return None
    scored = facts.scored
    return RecordedEarlier(
        rows=scored.rows if scored else 0,
        total=facts.total,
        requests=facts.requests,
        unscored=len(facts.unscored),
        control=scored.control if scored else None,
        recited=dict(scored.recited) if scored else {},
        excess=RecordedBound(**vars(scored.excess)) if scored and scored.excess else None,
        back=facts.came_back,
    )


def read_scores(folder: Path, models: Iterable[str]) -> RecordedScores | None:
    """Return the metrics of these models of a run on its test rows; None where the unlearned model was not scored."""
    places = {name: folder / "evaluation" / name for name in models}
    reports = {name: load_report(place) for name, place in places.items() if (place / MANIFEST).is_file()}
    if "unlearned" not in reports:
        return None
    models = {name: _metrics(report) for name, report in reports.items()}
    of = reports["unlearned"]
    return RecordedScores(benchmark=of.benchmark, split=of.split, interval=INTERVAL, models=models)


def read_attacks(folder: Path, kind: ResultKind) -> list[RecordedAttack] | None:
    """Return what the attacks on a run's unlearned model brought back; None where none was made."""
    facts = load_attacks(folder / ATTACKS_FOLDER, folder / kind)
    if facts is None:
        return None
    recorded = []
    for attack in facts.attacks:
        if "unlearned" in attack.models:
            trial = attack.models["unlearned"].strongest
            share, interval = trial.signed
            figures = {"share": share, "interval": interval, "rows": trial.rows, "outcome": trial.outcome}
            recorded.append(RecordedAttack(name=attack.name, control=attack.control, trial=trial.label, **figures))
    return recorded


def read_evidence(folder: Path, kind: ResultKind) -> list[RecordedEvidence]:
    """Return what was found on a run's unlearned model beside its scores."""
    return [
        RecordedEvidence(
            kind=finding.kind,
            outcome=finding.outcome,
            sentence=finding.sentence,
            control=finding.control,
            rows=finding.rows,
            figures={name: float(metric.value or 0.0) for name, metric in finding.metrics_of("unlearned").items()},
        )
        for finding in load_evidence(folder / EVIDENCE_FOLDER, result_revision(folder / kind))
    ]


def _metrics(report: Report) -> dict[str, RecordedMetric]:
    return {name: _score(metric) for name, metric in report.metrics.items()}


def _score(metric: Metric) -> RecordedMetric:
    value, stderr = _finite(metric.value), _finite(metric.stderr)
    interval = None if value is None or stderr is None else (value - metric.margin, value + metric.margin)
    return RecordedMetric(
        value=value, n=metric.n, stderr=stderr, interval=interval, higher_is_better=metric.higher_is_better
    )  # fmt: skip


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def stage_times(folder: Path, stages: Iterable[str]) -> dict[str, str]:
    """Return the time at which each stage of a run was done, where it is there: that of its latest file."""
    times = {}
    for stage in stages:
        if manifest := load_manifest(folder / stage):
            files = [folder / stage / name for name in manifest["files"] if name not in _TEXTS]
            if latest := max((path.stat().st_mtime for path in files if path.is_file()), default=None):
                times[stage] = utc(latest)
    return times


def utc(seconds: float) -> str:
    """Return a time in seconds since 1970 as text, to the second."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


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
        evidence=read_evidence(folder, run.kind),
        versions=manifest["versions"],
        earlier=earlier,
        previous_sha256=earlier[-1].record_sha256 if earlier else None,
    )


def _request(folder: Path) -> str | None:
    """Return the id of an earlier run's request, by its record."""
    if not (folder / RECORD_FILE).exists():
        logger.warning("%s: has no record, so the chain ends there; run it again for one", folder)
        return None
    return load_record(folder / RECORD_FILE).request
