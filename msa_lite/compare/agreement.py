"""Whether reports can stand side by side: the same questions, asked in the same way, and one target and ideal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from msa_lite.compare.entries import Entry
from msa_lite.compare.published import PublishedTable
from msa_lite.errors import MismatchError, join_faults
from msa_lite.report.metrics import metric_kind
from msa_lite.report.reports import Report

TEST = " test"  # ends the split of what is left when some rows were used for a choice
# Settings that say what was asked and how, with what a message calls them; the last four are lm-eval's.
_ASKED = {"prompt": "prompt", "compat": "compat"} | {name: name for name in ("tasks", "few_shot", "limit", "seed")}
# What `evals.common` says in a report's settings of the evaluation that it was taken from.
TAKEN_FROM = "taken_from"
_HEADLINE = "these reports cannot stand side by side:"


def judge_of(report: Report) -> tuple[Any, ...]:
    """What of a judge decides its verdicts; empty where there was none."""
    judge = report.settings.get("judge")
    if not isinstance(judge, Mapping):
        return ()
    return tuple(judge.get(key) for key in ("model", "kind", "separate", "prompts"))


def whole_split(split: str) -> str:
    """The split that a test part is of."""
    return "all" if split == TEST.strip() else split.removesuffix(TEST)


def same_rows(entries: Sequence[Entry]) -> bool:
    """Whether all reports are on the same rows."""
    rows = [(entry.report.split, entry.report.settings.get("sets")) for entry in entries]
    return all(other == rows[0] for other in rows)


def check_agreement(entries: Sequence[Entry], table: PublishedTable | None = None) -> None:
    """Raise MismatchError where benchmark, split, questions, prompt or compat of two reports differ, with all faults.

    A published table has to be of the reports' benchmark and split. Different judges are no fault,
    nor are other rows of the same split.
    """
    if not entries:
        return
    first, faults = entries[0], []
    for entry in entries[1:]:
        if differences := _differences(entry.report, first.report):
            faults.append(f"{_name(entry)}: {', '.join(differences)}")
    if faults:
        faults.insert(0, f"{_name(first)}, with which the others are compared")
    if table and (other := _differs(first.report, table)):
        faults.append(f"{table.name}: {other}")
    if faults:
        raise MismatchError(join_faults(_HEADLINE, faults, limit=30))


def _name(entry: Entry) -> str:
    return f"{entry.label} ({entry.source})"


def _differences(one: Report, other: Report) -> list[str]:
    if one.benchmark != other.benchmark:
        return [f"benchmark {one.benchmark}, not {other.benchmark}"]
    splits = [whole_split(report.split) for report in (one, other)]
    found = [f"split '{one.split}', not '{other.split}'"] if splits[0] != splits[1] else []
    return found + [f"other {name}" for key, name in _ASKED.items() if one.settings.get(key) != other.settings.get(key)]


def _differs(report: Report, table: PublishedTable) -> str | None:
    """What a published table is of, where the report is of something else."""
    if table.benchmark != report.benchmark:
        return f"figures of benchmark {table.benchmark}, the reports are of {report.benchmark}"
    if table.split is not None and table.split != whole_split(report.split):
        return f"figures of split {table.split}, the reports are of {report.split}"
    return None


def merge_references(entries: Sequence[Entry]) -> list[Entry]:
    """The entries with one target and one ideal at most, each with the values of all reports of it.

    Raises MismatchError where two reports of it do not agree; judged values of different judges may differ. Where the
    model is known to be the same, the first one's values are taken.
    """
    faults: list[str] = []
    kept: list[Entry] = []
    for entry in entries:
        at = next((i for i, other in enumerate(kept) if entry.role == other.role != "method"), None)
        if at is None:
            kept.append(entry)
        elif other := _disagreements(kept[at], entry):
            faults.append(f"{_name(kept[at])} and {_name(entry)} differ in {', '.join(other)}")
        else:
            metrics = kept[at].report.metrics
            known = {name: metric for name, metric in metrics.items() if metric.value is not None}
            report = replace(kept[at].report, metrics={**metrics, **entry.report.metrics, **known})
            kept[at] = replace(kept[at], report=report)
    if faults:
        faults.append("to leave one out, name reports of unlearned models instead of runs")
        raise MismatchError(join_faults(_HEADLINE, faults))
    return kept


def _disagreements(one: Entry, other: Entry) -> list[str]:
    models = [entry.report.settings.get("model") for entry in (one, other)]
    if models[0] is not None and models[0] == models[1]:
        return []  # other devices and batches make other sums of floats
    same_judge = judge_of(one.report) == judge_of(other.report)
    names = [name for name in one.report.metrics if same_judge or metric_kind(name).judge is None]
    pairs = {name: (one.value(name), other.value(name)) for name in names}
    return [
        f"{name} ({a:.6g}, {b:.6g})"
        for name, (a, b) in pairs.items()
        if a is not None and b is not None and not math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)
    ]
