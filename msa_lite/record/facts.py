"""Read from a run's folder what its record says of the outcome: result, vectors, verdict, scores, times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from msa_lite.errors import FormatError
from msa_lite.io.files import hash_file
from msa_lite.io.hub import content_files, revision_of
from msa_lite.io.reading import local_path, read_object
from msa_lite.io.seal import CARD_FILE, MANIFEST, load_manifest
from msa_lite.record.schema import (
    INTERVAL,
    FileHash,
    Judgement,
    RecordedAttack,
    RecordedMetric,
    RecordedScores,
    VectorWeights,
)
from msa_lite.report import Metric, Report, load_report
from msa_lite.report.attacks import ATTACKS_FOLDER, load_attacks
from msa_lite.report.card import terms_of
from msa_lite.report.verdict import VERDICT_FILE

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
        path.name: FileHash(**known[path.name])
        if path.name in known
        else FileHash(sha256=hash_file(path), bytes=path.stat().st_size)
        for path in content_files(folder)
    }


def read_vectors(manifest: Mapping[str, Any], former: Iterable[VectorWeights] = ()) -> list[VectorWeights]:
    """Return the vectors that a merge's manifest names.

    former: vectors with known files, for those whose folder is gone.
    """
    inputs, vectors = manifest["inputs"], []
    weights = {term["name"]: float(term["weight"]) for term in terms_of(manifest)}
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
        if value["outcome"] is None:
            return Judgement(outcome=None, sentence=value["reason"])
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
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{folder / VERDICT_FILE}: no verdict of msa-lite ({error!r})") from error


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
    return datetime.fromtimestamp(int(seconds), timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
