"""Read what a run's probes of its models said: has a model seen the forget set before?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from msa_lite.report.faults import is_finite_number, reading, stage_report
from msa_lite.report.reports import Metric

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
        names = sorted(path.parent.name for path in place.glob("*/report.json"))
        names.sort(key=lambda name: (name in _CONTROLS, name != "prior"))
        models, rows = [], {}
        for name in names:
            report = stage_report(place / name)
            if report is None:
                continue
            with reading(place / name / "report.json"):
                bounds = report.settings["intervals"].items()
                intervals = {key: (float(low), float(high)) for key, (low, high) in bounds}
                rows = {key: int(count) for key, count in report.settings["rows"].items() if is_finite_number(count)}
            models.append(ProbedModel(name, report.metrics, intervals))
        if models:
            return ProbeFacts(thorough, next((key for key in rows if key != "forget"), "holdout"), rows, tuple(models))
    return None
