"""Models side by side: one row a metric, one column a model, in the terminal and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msa_lite.report.metrics import BEST_AT_ZERO, Metric, Report

if TYPE_CHECKING:
    from rich.table import Table

_ARROWS = {True: " ↑", False: " ↓", None: ""}
_CAPTION = "mean ± standard error · ↑ higher, ↓ lower is better"
# Ending of a metric's name → what it is about; names without one of these are the forget set's, but for those below.
_ENDINGS = {
    "f": "forget set",
    "r": "retain set",
    "h": "holdout set",
    "ra": "real authors",
    "wf": "world facts",
}
_BETWEEN, _UTILITY, _QUESTIONS, _TASKS = "forget against holdout set", "utility", "questions", "tasks"
_GROUPS = (*_ENDINGS.values(), _BETWEEN, _UTILITY, _QUESTIONS, _TASKS)
# Metric → (group, label), where the name alone does not say it.
_NAMED = {
    "acc_forget": ("forget set", "Acc forget (judge)"),
    "acc_recover": ("forget set", "Acc recover (judge)"),
    "acc_retain": ("retain set", "Acc retain (judge)"),
    "min_k": (_BETWEEN, "Min-K% AUC"),
    "min_k_gap": (_BETWEEN, "Min-K% AUC (distance to ideal)"),
    "min_k_pp": (_BETWEEN, "Min-K%++ AUC"),
    "min_k_pp_gap": (_BETWEEN, "Min-K%++ AUC (distance to ideal)"),
    "privleak": (_BETWEEN, "PrivLeak in %"),
    "model_utility": (_UTILITY, "model utility"),
    "model_utility_ra_wf": (_UTILITY, "model utility (without retain)"),
    "accuracy": (_QUESTIONS, "accuracy"),
    "accuracy_corrupted": (_QUESTIONS, "accuracy (corrupted entities)"),
    "accuracy_other": (_QUESTIONS, "accuracy (other entities)"),
}


def _group_and_label(name: str) -> tuple[str, str]:
    if name in _NAMED:
        return _NAMED[name]
    if "/" in name:  # a task's own metric
        return _TASKS, name
    text, _, ending = name.rpartition("_")
    group = _ENDINGS.get(ending) if text else None
    return group or "forget set", (text if group else name).replace("rouge_l", "ROUGE-L recall").replace("_", " ")


def heading(name: str, higher_is_better: bool | None) -> str:
    """A metric's label where no group beside it says which set it is about, with the direction's arrow."""
    group, label = _group_and_label(name)
    if name not in _NAMED and name.rpartition("_")[2] in _ENDINGS:
        label = f"{label}, {group}"
    return label + (" → 0" if name in BEST_AT_ZERO else _ARROWS[higher_is_better])


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
    for name in sorted(names, key=lambda name: _GROUPS.index(_group_and_label(name)[0])):
        group, label = _group_and_label(name)
        found = [report.metrics.get(name) for report in reports.values()]
        known = [metric for metric in found if metric is not None]
        n = max(metric.n for metric in known)
        arrow = _ARROWS[known[0].higher_is_better]
        rows.append((group, [label + arrow, str(n), *(metric_cell(metric, n) for metric in found)]))
    return rows


def notes(reports: Mapping[str, Report]) -> list[str]:
    """What else there is to say of the numbers: reasons of those that are missing, items left out. One line each."""
    found: dict[str, dict[str, None]] = {}
    for report in reports.values():
        for name, metric in report.metrics.items():
            group, label = _group_and_label(name)
            if metric.note:
                found.setdefault(metric.note, {})[label] = None
            if metric.skipped:
                found.setdefault(f"items left out: {metric.skipped}", {})[f"{label}, {group}"] = None
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
