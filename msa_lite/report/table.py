"""Show models side by side: one row a metric, one column a model, in the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from msa_lite.report.formats import Cell, Section, TextTable, markdown
from msa_lite.report.metrics import GROUPS, metric_kind
from msa_lite.report.reports import Metric, Report

_ARROWS = {True: " ↑", False: " ↓", None: ""}
_LEGEND = "mean ± standard error; ↑ higher, ↓ lower is better"


def heading(name: str, higher_is_better: bool | None) -> str:
    """Return a metric's label for where no group stands beside it, with the direction's arrow."""
    kind = metric_kind(name)
    return kind.heading + (" → 0" if kind.best_at_zero else _ARROWS[higher_is_better])


def number(value: float | None) -> str:
    """Return a value as tables show it."""
    if value is None:
        return "–"
    small = 0 < abs(value) < 5e-4  # p-values
    return f"{value:{'.1e' if small else '.3f'}}"


def signed(value: float | None) -> str:
    """Return a value as pages and pictures show it, with a proper minus sign."""
    return number(value).replace("-", "−")


def metric_cell(metric: Metric | None, n: int, with_error: bool = True) -> Cell:
    """Return a metric as tables show it, with its number of items where it is not n."""
    if metric is None or metric.value is None:
        return Cell(number(None))
    error = metric.stderr if with_error else None
    return Cell(number(metric.value), stderr=error, remark="" if metric.n == n else f"n = {metric.n}")


def _rows(reports: Mapping[str, Report]) -> list[tuple[str, list[Cell]]]:
    """Return (group, [label, n, one cell a model]) by group; metrics in the order of the first report that has them."""
    names = dict.fromkeys(name for report in reports.values() for name in report.metrics)
    rows = []
    for kind in sorted(map(metric_kind, names), key=lambda kind: GROUPS.index(kind.group)):
        metrics = [report.metrics.get(kind.name) for report in reports.values()]
        present = [metric for metric in metrics if metric is not None]
        n = max(metric.n for metric in present)
        label = Cell(kind.label + _ARROWS[present[0].higher_is_better])
        rows.append((kind.group, [label, Cell(str(n)), *(metric_cell(metric, n) for metric in metrics)]))
    return rows


def notes(reports: Mapping[str, Report]) -> list[str]:
    """Return the reasons of numbers that are missing, the items left out and the judges' costs, one line each."""
    labels: dict[str, dict[str, None]] = {}
    for report in reports.values():
        for name, metric in report.metrics.items():
            kind = metric_kind(name)
            if metric.note:
                labels.setdefault(metric.note, {})[kind.label] = None
            if metric.skipped:
                labels.setdefault(f"items left out: {metric.skipped}", {})[f"{kind.label}, {kind.group}"] = None
    judges = dict.fromkeys(
        _judge_note(report.settings["judge"]) for report in reports.values() if "judge" in report.settings
    )
    return [*(f"{', '.join(names)}: {note}" for note, names in labels.items()), *judges]


def _judge_note(judge: Mapping[str, Any]) -> str:
    """Return what the judge of a report cost."""
    cost = "" if judge["cost"] is None else f", {judge['cost']:.2f} USD"
    tokens = f"{judge['prompt_tokens']} + {judge['completion_tokens']} tokens{cost}"
    return (
        f"judge {judge['model']}: {judge['calls']} calls ({tokens}), {judge['cached']} verdicts from earlier ones, "
        f"{judge['invalid']} invalid"
    )


def reports_table(reports: Mapping[str, Report], title: str = "") -> TextTable:
    """Return one row a metric and one column a model, in a section for each group of metrics."""
    groups = groupby(_rows(reports), key=lambda row: row[0])
    sections = [Section([cells for _, cells in rows], group) for group, rows in groups]
    return TextTable(["metric", "n", *reports], sections, title, [_LEGEND, *notes(reports)])


def markdown_table(reports: Mapping[str, Report]) -> str:
    """Return the same table as Markdown, with a column for the group."""
    rows = [[Cell(group), *cells] for group, cells in _rows(reports)]
    return markdown(TextTable(["set", "metric", "n", *reports], [Section(rows)], notes=notes(reports), left=2))
