"""Write notes for readers of a comparison: on its rule, its rows, its judges, and missing numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msa_lite.comparison.agreement import TEST, judge_of
from msa_lite.comparison.entries import Entry
from msa_lite.comparison.published import PublishedTable
from msa_lite.report.tables.reports import heading, notes

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
