"""Models side by side: one row a metric, one column a model, in the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from msa_lite.report.formats import Cell, Section, Table, markdown
from msa_lite.report.metrics import BEST_AT_ZERO, Metric, Report

_ARROWS = {True: " ↑", False: " ↓", None: ""}
_LEGEND = "mean ± standard error; ↑ higher, ↓ lower is better"
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
    for name in sorted(names, key=lambda name: _GROUPS.index(_group_and_label(name)[0])):
        group, label = _group_and_label(name)
        metrics = [report.metrics.get(name) for report in reports.values()]
        known = [metric for metric in metrics if metric is not None]
        n = max(metric.n for metric in known)
        arrow = _ARROWS[known[0].higher_is_better]
        rows.append((group, [Cell(label + arrow), Cell(str(n)), *(metric_cell(metric, n) for metric in metrics)]))
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


def reports_table(reports: Mapping[str, Report], title: str = "") -> Table:
    """Return one row a metric and one column a model, in a section for each group of metrics."""
    groups = groupby(_rows(reports), key=lambda row: row[0])
    sections = [Section([cells for _, cells in rows], group) for group, rows in groups]
    return Table(["metric", "n", *reports], sections, title, [_LEGEND, *notes(reports)])


def markdown_table(reports: Mapping[str, Report]) -> str:
    """Return the same table as Markdown, with a column for the group."""
    rows = [[Cell(group), *cells] for group, cells in _rows(reports)]
    return markdown(Table(["set", "metric", "n", *reports], [Section(rows)], notes=notes(reports), left=2))
