"""Hold what a kind of evidence found in a run, and read it from evidence/KIND/report.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from msa_lite.catalogue import EVIDENCE, evidence_metric
from msa_lite.report.tables.metrics import metric_kind
from msa_lite.report.tables.reports import REPORT_FILE, Z95, Metric, Report, reading, report_on

EVIDENCE_FOLDER = "evidence"
UNDECIDED = "undecided"


@dataclass(frozen=True)
class EvidenceFigure:
    """One number of evidence about one model."""

    value: float
    interval: tuple[float, float] | None
    """Its 95 % interval, rows of one subject together; None where none can be given."""
    n: int
    """The rows, or weights, that it rests on."""

    @property
    def words(self) -> str:
        """Return the value with its interval: "0.85 (0.72 to 0.93)"."""
        ends = "" if self.interval is None else f" ({self.interval[0]:.2f} to {self.interval[1]:.2f})"
        return f"{self.value:.2f}{ends}"


@dataclass(frozen=True)
class EvidenceFinding:
    """The answer of one kind of evidence on one run."""

    kind: str
    """Its name in `msa_lite.catalogue.EVIDENCE`."""
    outcome: str
    """The answer in a word or three; `UNDECIDED` where the data cannot tell."""
    sentence: str
    """The answer for somebody who knows nothing of statistics; where it is undecided, the reason."""
    control: str | None
    """The model or rows that the unlearned model is held against: ideal, holdout, prior; None without any."""
    rows: int
    """The forget rows that it rests on."""
    figures: Mapping[str, Mapping[str, EvidenceFigure]] = field(default_factory=dict)
    """The figures by model, then by name as in the table of evidence."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """More numbers, JSON-able: statistics, p-values, counts by rule."""

    @property
    def question(self) -> str:
        """Return the question that it answers."""
        return EVIDENCE[self.kind].question if self.kind in EVIDENCE else self.kind

    @property
    def source(self) -> str:
        """Return the publication that it follows."""
        return EVIDENCE[self.kind].source if self.kind in EVIDENCE else ""

    def metrics_of(self, model: str) -> dict[str, Metric]:
        """Return the figures of a model as metrics, with the names and directions of the table of metrics.

        A standard error is half the width of the interval, divided by 1.96.
        """
        metrics = {}
        for name, figure in self.figures.get(model, {}).items():
            key, ends = evidence_metric(self.kind, name), figure.interval
            error = None if ends is None else (ends[1] - ends[0]) / (2 * Z95)
            metrics[key] = Metric(figure.value, figure.n, error, metric_kind(key).higher_is_better)
        return metrics


def undecided(kind: str, reason: str) -> EvidenceFinding:
    """Return the finding of evidence that cannot be given, with the reason."""
    return EvidenceFinding(kind, UNDECIDED, f"Undecided: {reason}.", None, 0)


def evidence_report(finding: EvidenceFinding, models: Mapping[str, Any]) -> Report:
    """Return report.json of a finding: each figure of each model as a metric, and everything as settings.

    models: the identities of the models by name, as evaluations name theirs.
    """
    metrics = {
        f"{name}.{model}": metric for model in finding.figures for name, metric in finding.metrics_of(model).items()
    }
    about = {"question": finding.question, "source": finding.source, "models": dict(models)}
    return Report("evidence", finding.kind, metrics, {**about, **asdict(finding)})


def load_evidence(folder: Path, revision: str | None, model: str = "unlearned") -> tuple[EvidenceFinding, ...]:
    """Load the findings of a run from its folder `evidence`, in the order of the table. Raise FormatError.

    revision: that of the model of this name; findings on another one are left out.
    """
    findings = []
    for kind in EVIDENCE:
        if report := report_on(folder / kind, model, revision):
            with reading(folder / kind / REPORT_FILE):
                findings.append(finding_of(report))
    return tuple(findings)


def finding_of(report: Report) -> EvidenceFinding:
    """Return what evidence/KIND/report.json says. Raise KeyError or ValueError where it has another form."""
    from pydantic import TypeAdapter

    keys = ("kind", "outcome", "sentence", "control", "rows", "figures", "details")
    return TypeAdapter(EvidenceFinding).validate_python({key: report.settings[key] for key in keys})


def evidence_metrics(findings: Sequence[EvidenceFinding], model: str) -> dict[str, Metric]:
    """Return all figures of a model as columns of a table."""
    return {name: metric for finding in findings for name, metric in finding.metrics_of(model).items()}
