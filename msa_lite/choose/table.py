"""Write the tables of a sweep: one row a candidate, its metrics and its score, below the target and the ideal."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msa_lite.benchmarks import BENCHMARKS
from msa_lite.choose.candidates import Values
from msa_lite.choose.rules import LeastExtraction
from msa_lite.report.choosing import score_heading, shown_score, value_text
from msa_lite.report.formats import Cell, Section, TextTable, csv_lines, escape_markdown, markdown
from msa_lite.report.reports import Metric, heading, metric_cell, number

_NOT_MET = "not met: misses the conditions of the choice, so it has no score"
_MOST_NOTES = 8  # in the terminal; the other forms of the table have all
_KEPT = (
    "kept: of what the target knows of the retain set beyond unseen rows, for points that are inside the bounds of the "
    "control; distance: of the forget scores to the control's, and of the retain scores to the target's"
)


@dataclass(frozen=True)
class Candidate:
    """One model to choose from."""

    values: Values
    """The values that tell it from the others: {"alpha": 0.5, "beta": 1.0}, {"epoch": 3}."""
    metrics: Mapping[str, Metric]
    """Empty where the candidate is broken."""
    score: float | None
    """The value that the rule ranks by; higher is better. None for a broken candidate, which is never chosen."""
    met: bool = True
    """True if it meets the conditions of the rule. If it does not, tables leave out its score, which only says how near
    it comes."""
    note: str | None = None
    """The reason why it is broken, or the condition that it misses and by how much."""
    under: Mapping[str, Mapping[str, Metric]] = field(default_factory=dict)
    """Its metrics with rounded weights, by the name of the form of quantisation."""


@dataclass(frozen=True)
class Sweep:
    """The candidates of a choice with all that tables and pictures show of them."""

    candidates: Sequence[Candidate]
    """In the order in which they are shown."""
    target: Mapping[str, Metric]
    ideal: Mapping[str, Metric] | None
    chosen: Values
    """The values of the chosen candidate."""
    score_name: str
    """The name of the rule: "tofu", "extraction", "minimise rouge_l_f"."""
    part: str
    """The rows that all were scored on: "forget10 validation"."""
    benchmark: str
    """The name of the benchmark, which says what tables show."""
    under: Mapping[str, Mapping[str, Metric]] = field(default_factory=dict)
    """The target's metrics with rounded weights, by the name of the form of quantisation."""

    def is_chosen(self, candidate: Candidate) -> bool:
        """Check whether this is the candidate that was chosen."""
        return dict(candidate.values) == dict(self.chosen)

    @property
    def score_heading(self) -> str:
        """Return the heading of a column or an axis of scores."""
        return score_heading(self.score_name)

    def shown_score(self, candidate: Candidate) -> float | None:
        """Return the score to show; None where the candidate is broken or does not meet the conditions."""
        return shown_score(self.score_name, candidate.score, candidate.met)


def shown_metrics(sweep: Sweep) -> dict[str, int]:
    """Return the metrics that tables show, by name, with the largest number of items of each.

    These are the main ones of the benchmark, and those that the score's name holds. Metrics without any value are left
    out.
    """
    models = [sweep.target, *(one.metrics for one in sweep.candidates)]
    available = [name for metrics in models for name, metric in metrics.items() if metric.value is not None]
    entry = BENCHMARKS.get(sweep.benchmark)
    main = (entry and entry.main_columns(available)) or available
    named = re.findall(r"[\w/]+", sweep.score_name)
    names = dict.fromkeys(name for name in (*main, *named) if name in available)
    metrics = _metrics(sweep)
    return {name: max(metric.n for metric in metrics[name]) for name in names}


def values_text(values: Values) -> str:
    """Return the values of a candidate in words: `alpha 0.5, beta 1`."""
    return ", ".join(f"{key} {value_text(value)}" for key, value in values.items())


def points_table(sweep: Sweep) -> TextTable:
    """Return the table for a terminal: standard errors of the target, the ideal and the chosen one, and some notes."""
    headings, rows = _headings(sweep), _cells(sweep, brief=True)
    references = 1 + len(sweep.under) + (sweep.ideal is not None)
    metrics = shown_metrics(sweep)
    items = [Cell("")] * (len(headings) - len(metrics) - 1)
    first = [*rows[:references], [Cell("n"), *items, *(Cell(str(n)) for n in metrics.values())]]
    title = f"sweep, {sweep.part}; chosen by: {sweep.score_heading[:-2]}"
    notes = ["↑ higher, ↓ lower is better", *_few_notes(sweep)]
    return TextTable(headings, [Section(first), Section(rows[references:])], title, notes)


def points_markdown(sweep: Sweep) -> str:
    """Return the table as Markdown, with all standard errors and all notes."""
    title = escape_markdown(f"Sweep, {sweep.part}; chosen: {values_text(sweep.chosen)}.")
    table = TextTable(_headings(sweep, " (n = {})"), [Section(_cells(sweep))], notes=_notes(sweep))
    return f"{title}\n\n{markdown(table)}"


def points_csv(sweep: Sweep) -> str:
    """Return everything, one line a model: model (target, ideal or candidate), the candidate's values, score, met,
    chosen, note, and for each metric METRIC, METRIC_stderr and METRIC_n. Lines of models with rounded weights follow,
    as "candidate, NF4".

    Numbers have all their digits. What is missing is empty, as is the score where the conditions are not met; met and
    chosen are true or false.
    """
    keys, metrics = _keys(sweep), _metrics(sweep)
    ends = (f"{name}{end}" for name in metrics for end in ("", "_stderr", "_n"))
    lines: list[list[object]] = [["model", *keys, "score", "met", "chosen", "note", *ends]]
    for mark, one in _models(sweep):
        state = [str(one.met).lower(), str(sweep.is_chosen(one)).lower(), one.note] if one.values else [None] * 3
        parts = [getattr(one.metrics.get(name), key, None) for name in metrics for key in ("value", "stderr", "n")]
        model = "candidate" if one.values else mark
        lines.append([model, *map(one.values.get, keys), sweep.shown_score(one), *state, *parts])
        for form, its in one.under.items():
            parts = [getattr(its.get(name), key, None) for name in metrics for key in ("value", "stderr", "n")]
            lines.append([f"{model}, {form}", *map(one.values.get, keys), *[None] * 4, *parts])
    return csv_lines(lines)


def _models(sweep: Sweep) -> list[tuple[str, Candidate]]:
    """Return the models of a table, each with what its first cell says."""
    models = [("target", Candidate({}, sweep.target, None, under=sweep.under))]
    models += [("ideal", Candidate({}, sweep.ideal, None))] if sweep.ideal is not None else []
    for one in sweep.candidates:
        state = "broken" if one.score is None else "" if one.met else "not met"
        models.append((", ".join(word for word in ("chosen" * sweep.is_chosen(one), state) if word), one))
    return models


def _metrics(sweep: Sweep) -> dict[str, list[Metric]]:
    """Return every metric that some model has, by name."""
    metrics: dict[str, list[Metric]] = {}
    for _, one in _models(sweep):
        for its in (one.metrics, *one.under.values()):
            for name, metric in its.items():
                metrics.setdefault(name, []).append(metric)
    return metrics


def _keys(sweep: Sweep) -> list[str]:
    """Return the names of the values that candidates differ in."""
    return list(dict.fromkeys(key for candidate in sweep.candidates for key in candidate.values))


def _headings(sweep: Sweep, items: str = "") -> list[str]:
    """Return what stands above the columns; items: the pattern of the number of items of a metric."""
    metrics = _metrics(sweep)
    shown = shown_metrics(sweep).items()
    names = [heading(name, metrics[name][0].higher_is_better) + items.format(n) for name, n in shown]
    return ["model", *_keys(sweep), sweep.score_heading, *names]


def _cells(sweep: Sweep, brief: bool = False) -> list[list[Cell]]:
    """Return one row a model; brief: standard errors of the target, the ideal and the chosen one alone."""
    keys, metrics = _keys(sweep), shown_metrics(sweep)
    rows = []
    for mark, one in _models(sweep):
        values = (Cell(value_text(one.values[key]) if key in one.values else "") for key in keys)
        with_error = not brief or not one.values or sweep.is_chosen(one)
        cells = (metric_cell(one.metrics.get(name), n, with_error) for name, n in metrics.items())
        rows.append([Cell(mark, sweep.is_chosen(one)), *values, Cell(number(sweep.shown_score(one))), *cells])
        for form, its in one.under.items():
            cells = (metric_cell(its.get(name), n, with_error) for name, n in metrics.items())
            rows.append([Cell(f"… rounded to {form}"), *(Cell("") for _ in keys), Cell(""), *cells])
    return rows


def _few_notes(sweep: Sweep) -> list[str]:
    """Return as many notes as a terminal has room for."""
    notes = _notes(sweep)
    rest = len(notes) - _MOST_NOTES
    return notes if rest <= 1 else [*notes[:_MOST_NOTES], f"… and {rest} more notes, which table.md has"]


def _notes(sweep: Sweep) -> list[str]:
    """Return notes on the score and the marks, and the reasons of broken and unmet candidates."""
    reasons: dict[str, list[str]] = {}
    for candidate in sorted(sweep.candidates, key=lambda one: not sweep.is_chosen(one)):
        if candidate.note:
            state = "broken" if candidate.score is None else "not met"
            why = f"{state}: {' '.join(candidate.note.split())}"
            reasons.setdefault(why, []).append(values_text(candidate.values))
    met = all(candidate.met or candidate.score is None for candidate in sweep.candidates)
    score = [_KEPT] if sweep.score_name == LeastExtraction.name else []
    if sweep.under:
        score.append(
            f"score: the lower one of the model as it is, and with its weights rounded to {' or '.join(sweep.under)}, "
            "each beside the target in the same form"
        )
    return [*score, *([] if met else [_NOT_MET]), *(f"{'; '.join(who)}: {why}" for why, who in reasons.items())]
