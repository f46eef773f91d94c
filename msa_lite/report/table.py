"""Models side by side: one row a metric, one column a model, in the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from msa_lite.report.metrics import Metric, Report

if TYPE_CHECKING:
    from rich.table import Table

_SETS = {"f": "forget set", "r": "retain set", "h": "holdout set"}


def _set_of(name: str) -> str:
    return _SETS.get(name.rpartition("_")[2], "forget set")


def _label(name: str, metric: Metric) -> str:
    text = name[:-2] if name.endswith(("_f", "_r", "_h")) else name
    arrow = {True: " ↑", False: " ↓", None: ""}[metric.higher_is_better]
    return text.replace("rouge_l", "ROUGE-L recall").replace("_", " ") + arrow


def _cell(metric: Metric | None) -> str:
    if metric is None or metric.value is None:
        return "–"
    error = f" ± {metric.stderr:.3f}" if metric.stderr is not None else ""
    return f"{metric.value:.3f}{error}"


def _rows(reports: Mapping[str, Report]) -> list[tuple[str, list[str]]]:
    """(set name, [label, n, one cell a model]) by set; metrics in the order of the first report that has them."""
    names: dict[str, Metric] = {}
    for report in reports.values():
        for name, metric in report.metrics.items():
            names.setdefault(name, metric)
    rows = []
    for name, metric in sorted(names.items(), key=lambda item: list(_SETS.values()).index(_set_of(item[0]))):
        cells = [_cell(report.metrics.get(name)) for report in reports.values()]
        rows.append((_set_of(name), [_label(name, metric), str(metric.n), *cells]))
    return rows


def rich_table(reports: Mapping[str, Report], title: str) -> Table:
    """A terminal table of reports by model name."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", caption="mean ± standard error · ↑ higher, ↓ lower is better")
    table.add_column("metric")
    for name in ("n", *reports):
        table.add_column(name, justify="right")
    last = None
    for group, cells in _rows(reports):
        if group != last:
            table.add_section()
            table.add_row(f"[bold]{group}[/bold]")
            last = group
        table.add_row(*cells)
    return table


def markdown_table(reports: Mapping[str, Report]) -> str:
    """The same table as Markdown."""
    header = ["set", "metric", "n", *reports]
    lines = ["| " + " | ".join(header) + " |", "|---|---|" + "---:|" * (len(header) - 2)]
    lines += ["| " + " | ".join([group, *cells]) + " |" for group, cells in _rows(reports)]
    return "\n".join(lines) + "\n"
