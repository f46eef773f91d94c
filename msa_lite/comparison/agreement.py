"""Check that reports can stand side by side: the same benchmark, rows, questions and references."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from msa_lite.comparison.entries import Entry
from msa_lite.comparison.published import PublishedTable
from msa_lite.errors import MismatchError, join_faults
from msa_lite.report import Report
from msa_lite.report.tables.metrics import metric_kind

TEST = " test"  # ends the name of a split whose other rows were used for a choice
_SETTINGS = ("prompt", "compat")  # that decide the questions
_HEADLINE = "these reports cannot stand side by side:"


def judge_of(report: Report) -> tuple[Any, ...]:
    """Return what decides a judge's verdicts; empty where there was no judge."""
    judge = report.settings.get("judge")
    if not isinstance(judge, Mapping):
        return ()
    return tuple(judge.get(key) for key in ("model", "kind", "prompts"))


def whole_split(split: str) -> str:
    """Return the whole split that a test part belongs to."""
    return "all" if split == TEST.strip() else split.removesuffix(TEST)


def check_agreement(entries: Sequence[Entry], table: PublishedTable | None = None) -> None:
    """Raise MismatchError where benchmark, rows, prompt or compat of two reports differ, with all faults.

    A published table must have the reports' benchmark and split. Different judges are allowed.
    """
    if not entries:
        return
    first, faults = entries[0], []
    for entry in entries[1:]:
        if differences := _differences(entry.report, first.report):
            faults.append(f"{_name(entry)}: {', '.join(differences)}")
    if faults:
        faults.insert(0, f"{_name(first)}, with which the others are compared")
    if table and (fault := _table_fault(first.report, table)):
        faults.append(f"{table.name}: {fault}")
    if faults:
        raise MismatchError(join_faults(_HEADLINE, faults, limit=30))


def _name(entry: Entry) -> str:
    return f"{entry.label} ({entry.source})"


def _differences(report: Report, reference: Report) -> list[str]:
    if report.benchmark != reference.benchmark:
        return [f"benchmark {report.benchmark}, not {reference.benchmark}"]
    faults = []
    if whole_split(report.split) != whole_split(reference.split):
        faults.append(f"split '{report.split}', not '{reference.split}'")
    elif report.split != reference.split:
        faults.append(
            f"rows '{report.split}', not '{reference.split}': one of the two chose strengths or epochs by the other "
            "rows. Let both choose; a list as forget.alpha makes a run choose"
        )
    elif others := _other_sets(report, reference):
        faults.append(f"other rows of {', '.join(others)}; score both on the same data, with the same limit and seed")
    return faults + [f"other {key}" for key in _SETTINGS if report.settings.get(key) != reference.settings.get(key)]


def _other_sets(report: Report, reference: Report) -> list[str]:
    """Return the sets of rows that both reports have, and that differ."""
    ours, theirs = (one.settings.get("sets") for one in (report, reference))
    if not isinstance(ours, Mapping) or not isinstance(theirs, Mapping):
        return []
    return [name for name in ours if name in theirs and ours[name] != theirs[name]]


def _table_fault(report: Report, table: PublishedTable) -> str | None:
    """Return how benchmark or split of a published table and a report differ, or None."""
    if table.benchmark != report.benchmark:
        return f"its benchmark is {table.benchmark}, that of the reports is {report.benchmark}"
    if table.split is not None and table.split != whole_split(report.split):
        return f"its split is {table.split}, that of the reports is {report.split}"
    return None


def merge_references(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries with at most one target and one ideal, each with the values of all its reports.

    Raise MismatchError where two reports of it disagree. Judged values of different judges may differ. Where the
    settings say that the model is the same, the first report's values are taken.
    """
    faults: list[str] = []
    merged: list[Entry] = []
    for entry in entries:
        at = next((i for i, other in enumerate(merged) if entry.role == other.role != "method"), None)
        if at is None:
            merged.append(entry)
        elif differences := _disagreements(merged[at], entry):
            faults.append(f"{_name(merged[at])} and {_name(entry)} differ in {', '.join(differences)}")
        else:
            metrics = merged[at].report.metrics
            known = {name: metric for name, metric in metrics.items() if metric.value is not None}
            report = replace(merged[at].report, metrics={**metrics, **entry.report.metrics, **known})
            merged[at] = replace(merged[at], report=report)
    if faults:
        faults.append("to leave one out, give the reports of unlearned models instead of run folders")
        raise MismatchError(join_faults(_HEADLINE, faults))
    return merged


def _disagreements(first: Entry, second: Entry) -> list[str]:
    """Return the metrics in which two reports of one model differ, with both values."""
    models = [entry.report.settings.get("model") for entry in (first, second)]
    if models[0] is not None and models[0] == models[1]:
        return []  # other devices and batch sizes sum floats in another order
    same_judge = judge_of(first.report) == judge_of(second.report)
    names = [name for name in first.report.metrics if same_judge or metric_kind(name).judge is None]
    pairs = {name: (first.value(name), second.value(name)) for name in names}
    return [
        f"{name} ({a:.6g}, {b:.6g})"
        for name, (a, b) in pairs.items()
        if a is not None and b is not None and not math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)
    ]
