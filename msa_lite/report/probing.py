"""Read what a run's probes of its models said: has a model seen the forget set before?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from msa_lite.report.faults import reading, stage_report
from msa_lite.report.findings import Finding, ProbeVerdict, read_verdicts
from msa_lite.report.reports import REPORT_FILE, Metric

_CONTROLS = ("target", "ideal")


@dataclass(frozen=True)
class ProbedModel:
    """The scores of one model in a probe."""

    name: str
    """The model: "prior", "checkpoint-2", "target", "ideal"."""
    metrics: Mapping[str, Metric]
    """The AUCs by name: ½ where forget rows look no better known than the rows beside them, 1 where all do."""
    intervals: Mapping[str, tuple[float, float]]
    """The 95 % interval of each."""
    verdict: ProbeVerdict
    """"signs" that it has seen the forget set, "no signs", or "cannot tell"."""
    explanation: str
    """The verdict in a sentence without its subject: "shows signs of …"."""


@dataclass(frozen=True)
class ProbeFacts:
    """A probe: the forget rows beside rows that no model has seen, scored with one or several models."""

    thorough: bool
    """True for `msa-lite probe`; False for the short probe that each run makes of its prior."""
    against: str
    """The rows that the forget rows were compared with: "holdout" or "paraphrased"."""
    rows: Mapping[str, int]
    """The rows of each side."""
    models: tuple[ProbedModel, ...]
    """The models: candidates for the prior first, then the controls."""


def load_probe(folder: Path) -> ProbeFacts | None:
    """Load the probe in a run's `probe/`, the thorough one if there are both; None where there is none.

    Raise FormatError for broken files.
    """
    for place, thorough in ((folder, True), (folder / "cheap", False)):
        names = sorted(path.parent.name for path in place.glob(f"*/{REPORT_FILE}"))
        names.sort(key=lambda name: (name in _CONTROLS, name != "prior"))
        reports = {name: report for name in names if (report := stage_report(place / name))}
        if not reports:
            continue
        for name, report in reports.items():  # a fault is told with the file that has it
            with reading(place / name / REPORT_FILE):
                _probed(read_verdicts({name: report})[0])
                rows = {key: int(count) for key, count in report.settings["rows"].items()}
        models = tuple(_probed(finding) for finding in read_verdicts(reports))
        return ProbeFacts(thorough, next((key for key in rows if key != "forget"), "holdout"), rows, models)
    return None


def _probed(finding: Finding) -> ProbedModel:
    intervals = {name: (float(low), float(high)) for name, _, (low, high) in finding.measured()}
    return ProbedModel(finding.name, finding.report.metrics, intervals, finding.verdict, finding.explanation)
