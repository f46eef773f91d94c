"""Write report.json of a run: its story for machines. Evaluations have a report.json of another kind (`reports`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from msa_lite.report.choosing import Choosing
from msa_lite.report.fits import Fit
from msa_lite.report.metrics import metric_kind
from msa_lite.report.reports import RUN_REPORT, Metric, Report
from msa_lite.report.story import Story
from msa_lite.report.update import GroupUpdate, Update


def run_json(story: Story) -> dict[str, Any]:
    """Return the JSON-able form of a story; docs/reference/report.md tells its keys."""
    return {
        "kind": RUN_REPORT,
        "sentence": story.sentence,
        "basis": story.basis,
        "outcome": story.outcome,
        "verdict": story.verdict,
        "method": story.method,
        "formula": story.formula,
        "strengths": dict(story.strengths),
        "earlier": {run: dict(strengths) for run, strengths in story.earlier.items()},
        "names": dict(story.names),
        "benchmark": story.benchmark,
        "split": story.split,
        "rows": dict(story.rows),
        "main_metrics": list(story.main_metrics),
        "metrics": _metrics(story.reports),
        "validation": _metrics(story.validation),
        "choice": _choice(story.choosing, story.written_gap) if story.choosing else None,
        "fits": {name: _fit(fit) for name, fit in story.fits.items()},
        "update": _update(story.update) if story.update else None,
        "probe": asdict(story.probe) if story.probe else None,
        "attacks": asdict(story.attacks) if story.attacks else None,
        "interference": [asdict(pair) for pair in story.interference],
        "examples": [example.as_dict() for example in story.examples],
        "forget_rows": story.forget_rows.as_dict() if story.forget_rows else None,
        "provenance": _without(_without(asdict(story.provenance), "values"), "given"),
        "warnings": list(story.warnings),
        "limits": list(story.limits),
        "missing": list(story.missing),
    }


def _metrics(reports: Mapping[str, Report]) -> dict[str, Any]:
    """Return each metric with what it means, and its value for each model."""
    metrics: dict[str, Any] = {}
    for model, report in reports.items():
        for name, metric in report.metrics.items():
            kind = metric_kind(name)
            about = {"label": kind.label, "set": kind.group, "meaning": kind.formula or None}
            entry = metrics.setdefault(name, {**about, "higher_is_better": metric.higher_is_better, "models": {}})
            entry["models"][model] = _value(metric)
    return metrics


def _value(metric: Metric) -> dict[str, Any]:
    return _without(asdict(metric), "higher_is_better")


def _choice(choosing: Choosing, gap: float | None) -> dict[str, Any]:
    points = [
        {**_without(vars(point), "metrics"), "metrics": {name: _value(one) for name, one in point.metrics.items()}}
        for point in choosing.points
    ]
    facts = {key: getattr(choosing, key) for key in ("rule", "part", "chosen", "doubts")}
    return {**facts, "points": points, "written_gap": gap}


def _fit(fit: Fit) -> dict[str, Any]:
    return {**asdict(fit), "closed": fit.closed}


def _update(update: Update) -> dict[str, Any]:
    return {
        "form": update.form,
        "figures": dict(update.figures),
        "notes": list(update.notes),
        "forecast": {form: dict(figures) for form, figures in update.forecast.items()},
        "layers": _groups(update.by_layer()),
        "kinds": _groups(update.by_kind()),
        "tensors": [asdict(tensor) for tensor in update.tensors],
    }


def _groups(groups: tuple[GroupUpdate, ...]) -> list[dict[str, Any]]:
    return [asdict(group) for group in groups]


def _without(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}
