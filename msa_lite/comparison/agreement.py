"""Check that reports can stand side by side, and say what a reader of their comparison has to know."""

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
from msa_lite.report.tables.reports import heading, notes

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
        faults.append(f"other rows of {', '.join(others)}; score both on the same data, with the same limit and seeds")
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


_RULE = (
    "in brackets: the ratio to the ideal's value, as in the MSA paper (↑ value / ideal, ↓ ideal / value); +100% means "
    "as good as the ideal, or better. If no method is as good as that, the ratio is to the best method's value. In "
    "bold: the best of the methods"
)
_OVER = "where ↓ is better, a value below the ideal's is over-unlearning"
_OVER_RULE = f"{_OVER}, though the rule calls it +100%"
_NO_IDEAL = "no ideal among the reports, so how low forget scores should go is not known"
_NO_IDEAL_RULE = (
    "no ideal among the reports: ratios are to the best method, and how low forget scores should go is not known"
)
_AS_PRINTED = "its ratios are those that the paper prints, of values with more decimals"


def caveats(
    own: Sequence[Entry], printed: Sequence[Entry], columns: Sequence[tuple[str, bool]], table: PublishedTable | None
) -> list[str]:
    """Return notes on a comparison, one line each.

    own, printed: entries of reports, and of a published table. columns: each metric, and True where it is shown.
    """
    names = [name for name, is_shown in columns if is_shown]
    parts = [sum(entry.role == "method" for entry in entries) for entries in (own, printed)]
    with_ratios = max(parts) > 1
    lines = [_RULE] if with_ratios else []
    if any(_over_unlearned(entries, name) for entries in (own, printed) for name in names):
        lines.append(_OVER_RULE if with_ratios else _OVER)
    lines += _about_rows(own)
    lines += [f"{heading(name, None)} left out: {_reason(own, name)}" for name, is_shown in columns if not is_shown]
    lines += _about_metrics(own, names)
    lines += _about_judges(own)
    if table:
        ratios = [_AS_PRINTED] if any(figure.ratio for row in table.rows.values() for figure in row.values()) else []
        lines += [
            f"published: {table.name}, of {'; '.join([table.source, *ratios])}",
            *(f"published: {note}" for note in table.notes),
        ]
    return [note.removesuffix(".") for note in lines]


def _over_unlearned(entries: Sequence[Entry], name: str) -> bool:
    """Check whether a method goes below the ideal in a metric of which less is better."""
    ideal = next((entry.report.metrics.get(name) for entry in entries if entry.role == "ideal"), None)
    if ideal is None or ideal.value is None or ideal.higher_is_better is not False:
        return False
    values = [entry.value(name) for entry in entries if entry.role == "method"]
    return any(value is not None and value < ideal.value for value in values)


def _about_rows(own: Sequence[Entry]) -> list[str]:
    if not own:
        return []
    split = own[0].report.split
    lines = []
    if split.endswith(TEST):
        rest = "rows by which a point or an epoch was chosen are left out"
        lines.append(f"scores are on the test part of {split.removesuffix(TEST)}; {rest}")
    if compat := own[0].report.settings.get("compat"):
        lines.append(f"scored with compat {', '.join(compat)}")
    if all(entry.role != "ideal" for entry in own):
        lines.append(_NO_IDEAL_RULE if sum(entry.role == "method" for entry in own) > 1 else _NO_IDEAL)
    return lines


def _reason(own: Sequence[Entry], name: str) -> str:
    """Return the reason why no report has a value of a metric, from the metric's own notes."""
    reasons = [entry.report.metrics[name].note for entry in own if name in entry.report.metrics]
    return "; ".join(dict.fromkeys(reason for reason in reasons if reason)) or "no report has a value"


def _about_metrics(own: Sequence[Entry], names: Sequence[str]) -> list[str]:
    """Return the notes on the shown metrics, each with its models unless it is about all of them."""
    labels_by_note: dict[str, list[str]] = {}
    for entry in own:
        metrics = {name: entry.report.metrics[name] for name in names if name in entry.report.metrics}
        for note in notes({entry.label: replace(entry.report, metrics=metrics, settings={})}):
            labels_by_note.setdefault(note, []).append(entry.label)
    items = labels_by_note.items()
    return [note if len(labels) == len(own) else f"{note} ({', '.join(labels)})" for note, labels in items]


def _about_judges(own: Sequence[Entry]) -> list[str]:
    labels_by_judge: dict[str, list[str]] = {}
    for entry in own:
        if judge := judge_of(entry.report):
            labels_by_judge.setdefault(_judge_words(*judge), []).append(entry.label)
    if len(labels_by_judge) < 2:
        return [f"judge {judge}" for judge in labels_by_judge]
    judges = "; ".join(f"{judge} ({', '.join(labels)})" for judge, labels in labels_by_judge.items())
    return [f"the judges differ, so judged values are not quite comparable: {judges}"]


def _judge_words(model: object, kind: object, prompts: object) -> str:
    return f"{model} ({kind}), prompts {prompts}"
