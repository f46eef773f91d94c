"""Models side by side: one row a metric, one column a model, in the terminal and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msa_lite.report.metrics import GROUPS, metric_kind
from msa_lite.report.reports import Metric, Report

if TYPE_CHECKING:
    from rich.table import Table

_ARROWS = {True: " ↑", False: " ↓", None: ""}
_CAPTION = "mean ± standard error · ↑ higher, ↓ lower is better"


def heading(name: str, higher_is_better: bool | None) -> str:
    """Return a metric's label for where no group stands beside it, with the direction's arrow."""
    kind = metric_kind(name)
    return kind.heading + (" → 0" if kind.best_at_zero else _ARROWS[higher_is_better])


def number(value: float | None) -> str:
    """A value as tables show it."""
    if value is None:
        return "–"
    small = 0 < abs(value) < 5e-4  # p-values
    return f"{value:{'.1e' if small else '.3f'}}"


def metric_cell(metric: Metric | None, n: int) -> str:
    """A metric as tables show it, with its standard error, and its items where they are not n."""
    if metric is None or metric.value is None:
        return number(None)
    error = f" ± {metric.stderr:.3f}" if metric.stderr is not None else ""
    other = f" (n = {metric.n})" if metric.n != n else ""
    return f"{number(metric.value)}{error}{other}"


def _rows(reports: Mapping[str, Report]) -> list[tuple[str, list[str]]]:
    """(group, [label, n, one cell a model]) by group; metrics in the order of the first report that has them."""
    names = dict.fromkeys(name for report in reports.values() for name in report.metrics)
    rows = []
    for kind in sorted(map(metric_kind, names), key=lambda kind: GROUPS.index(kind.group)):
        found = [report.metrics.get(kind.name) for report in reports.values()]
        known = [metric for metric in found if metric is not None]
        n = max(metric.n for metric in known)
        arrow = _ARROWS[known[0].higher_is_better]
        rows.append((kind.group, [kind.label + arrow, str(n), *(metric_cell(metric, n) for metric in found)]))
    return rows


def notes(reports: Mapping[str, Report]) -> list[str]:
    """What else there is to say of the numbers: reasons of those that are missing, items left out. One line each."""
    found: dict[str, dict[str, None]] = {}
    for report in reports.values():
        for name, metric in report.metrics.items():
            kind = metric_kind(name)
            if metric.note:
                found.setdefault(metric.note, {})[kind.label] = None
            if metric.skipped:
                found.setdefault(f"items left out: {metric.skipped}", {})[f"{kind.label}, {kind.group}"] = None
    judges = dict.fromkeys(
        _judge_note(report.settings["judge"]) for report in reports.values() if "judge" in report.settings
    )
    return [*(f"{', '.join(labels)}: {note}" for note, labels in found.items()), *judges]


def _judge_note(judge: Mapping[str, Any]) -> str:
    """What the judge took, of the settings of a report."""
    cost = "" if judge["cost"] is None else f", {judge['cost']:.2f} USD"
    tokens = f"{judge['prompt_tokens']} + {judge['completion_tokens']} tokens{cost}"
    return (
        f"judge {judge['model']}: {judge['calls']} calls ({tokens}), {judge['cached']} verdicts from earlier ones, "
        f"{judge['invalid']} invalid"
    )


def rich_table(reports: Mapping[str, Report], title: str) -> Table:
    """A terminal table of reports by model name."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", caption=_CAPTION)
    table.add_column("metric")
    for name in ("n", *reports):
        table.add_column(name, justify="right", no_wrap=True)
    last = None
    for group, cells in _rows(reports):
        if group != last:
            table.add_section()
            table.add_row(f"[bold]{group}[/bold]")
            last = group
        table.add_row(*cells)
    return table


def markdown_table(reports: Mapping[str, Report]) -> str:
    """The same table as Markdown, with its notes."""
    header = ["set", "metric", "n", *reports]
    lines = ["| " + " | ".join(header) + " |", "|---|---|" + "---:|" * (len(header) - 2)]
    lines += ["| " + " | ".join([group, *cells]) + " |" for group, cells in _rows(reports)]
    lines += [f"\n{note}." for note in notes(reports)]
    return "\n".join(lines) + "\n"


def escape_markdown(text: str) -> str:
    """Text whose signs mean nothing to Markdown."""
    return re.sub(r"([\\|*`<\[\]])", r"\\\1", text)
