"""The tables of a sweep: one row a candidate, its metrics and its score, below the target and the ideal."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msa_lite.choose.candidates import Values
from msa_lite.report.reports import Metric
from msa_lite.report.table import escape_markdown, heading, metric_cell, number

if TYPE_CHECKING:
    from rich.table import Table

# The main metrics of each benchmark, by a metric that only this one gives.
_SHOWN = {
    "verbmem_f": ("min_k", "min_k_pp", "verbmem_f", "extraction_strength", "exact_memorization", "knowmem_r"),
    "accuracy_corrupted": ("accuracy", "accuracy_corrupted", "accuracy_other"),
    "model_utility": (
        "rouge_l_f", "extraction_strength", "probability_f", "model_utility", "rouge_l_r",
        "acc_forget", "acc_recover", "acc_retain",
    ),
    "rouge_l_f": ("accuracy_f", "rouge_l_f", "extraction_strength", "accuracy_r", "rouge_l_r"),
    "extraction_strength": ("extraction_strength", "probability_f", "extraction_strength_r", "probability_r"),
}  # fmt: skip
_NOT_MET = "not met: does not meet the conditions that the choice is made under, so it has no score"
_MOST_NOTES = 8  # in the terminal; the other forms of the table have all
_FORGOTTEN = (
    "forgotten: of what the target knows of the forget set beyond what unseen rows show, the share that can no longer "
    "be drawn out"
)


@dataclass(frozen=True)
class Candidate:
    """One model to choose from. values: what tells it from the others: {"alpha": 0.5, "beta": 1.0}, {"epoch": 3}.

    metrics: empty where the candidate is broken. score: what the rule ranks by, higher is better; None where it is
    broken, so that it is never chosen. met: whether it meets the conditions of the rule; where it does not, its score
    only says how near it comes, and is not shown. note: why it is broken, or which condition it misses and by how much.
    """

    values: Values
    metrics: Mapping[str, Metric]
    score: float | None
    met: bool = True
    note: str | None = None


@dataclass(frozen=True)
class Sweep:
    """Candidates in the order they are shown in, the models they stand beside, and the values of the chosen one.

    score_name: the rule's name ("tofu", "extraction", "minimise rouge_l_f"). part: the rows that all of this is on
    ("forget10 validation").
    """

    candidates: Sequence[Candidate]
    target: Mapping[str, Metric]
    ideal: Mapping[str, Metric] | None
    chosen: Values
    score_name: str
    part: str

    def is_chosen(self, candidate: Candidate) -> bool:
        """Whether this is the candidate that was chosen."""
        return dict(candidate.values) == dict(self.chosen)

    @property
    def score_heading(self) -> str:
        """What stands above a column or beside an axis of scores."""
        return score_heading(self.score_name)

    @property
    def lower_is_better(self) -> bool:
        """Check whether the score that is shown is better when it is lower."""
        return self.score_name.startswith(_MINIMISE)

    def shown_score(self, candidate: Candidate) -> float | None:
        """The score as it is shown: a metric is shown as it is; none where it is broken or conditions are not met."""
        return shown_score(self.score_name, candidate.score, candidate.met)


_MAXIMISE, _MINIMISE = "maximise ", "minimise "


def score_heading(rule: str) -> str:
    """Return the name of a rule's score, with the arrow of its direction.

    The rule "extraction" ranks by the share that was forgotten. Rules that name a metric rank by it, or by its
    negative.
    """
    if rule.startswith(_MINIMISE):
        return f"{rule.removeprefix(_MINIMISE)} ↓"
    if rule.startswith(_MAXIMISE):
        return f"{rule.removeprefix(_MAXIMISE)} ↑"
    return "forgotten ↑" if rule == "extraction" else f"score ({rule}) ↑"


def shown_score(rule: str, score: float | None, met: bool = True) -> float | None:
    """Return the number to show under `score_heading`; None where there is none."""
    if score is None or not met:
        return None
    return -score + 0.0 if rule.startswith(_MINIMISE) else score


def shown_metrics(sweep: Sweep) -> list[str]:
    """The metrics that tables show: the main ones of the benchmark, and those that the score's name holds.

    Which benchmark it is, is known by its metrics; of one that is not known, all are shown. Metrics without any value
    are left out.
    """
    models = [sweep.target, *(candidate.metrics for candidate in sweep.candidates)]
    known = dict.fromkeys(name for metrics in models for name, metric in metrics.items() if metric.value is not None)
    main = next((names for name, names in _SHOWN.items() if name in known), tuple(known))
    named = re.findall(r"[\w/]+", sweep.score_name)
    return list(dict.fromkeys(name for name in (*main, *named) if name in known))


def values_text(values: Values) -> str:
    """What tells a candidate from the others, in words: `alpha 0.5, beta 1`."""
    return ", ".join(f"{key} {value_text(value)}" for key, value in values.items())


def value_text(value: float | int | str) -> str:
    """One of a candidate's values as tables show it."""
    return value if isinstance(value, str) else f"{value:g}"


def points_table(sweep: Sweep) -> Table:
    """A table for the terminal; standard errors of target, ideal and the chosen one on a second line."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    names, keys = shown_metrics(sweep), _keys(sweep)
    title = escape(f"sweep, {sweep.part}; chosen by: {sweep.score_heading[:-2]}")
    table = Table(title=title, title_justify="left", box=box.HORIZONTALS)
    table.padding, table.pad_edge = 0, False  # five metrics have room in 80 columns
    table.caption, table.caption_justify = (
        escape("\n".join(["↑ higher, ↓ lower is better", *_few_notes(sweep)])),
        "left",
    )
    table.add_column("model", no_wrap=True)
    for key in keys:
        table.add_column(escape(key), justify="right", no_wrap=True)
    table.add_column(escape(_short_heading(sweep)), justify="right", overflow="fold", min_width=5, max_width=16)
    for name in names:
        table.add_column(escape(_heading(sweep, name)), justify="right", overflow="fold", min_width=5, max_width=16)
    for row in _rows(sweep):
        full = row.mark in ("target", "ideal") or row.chosen
        cells = [_rich_cell(row.metrics.get(name), full) for name in names]
        style = "bold" if row.chosen else "dim" if row.mark in ("broken", "not met") else None
        score = number(_shown(sweep, row))
        table.add_row(row.mark, *map(escape, row.values(keys)), score, *cells, style=style)
        if row.last_reference:
            table.add_row("n", "", *[""] * len(keys), *(str(_most_items(sweep, name)) for name in names), style="dim")
            table.add_section()
    return table


def _rich_cell(metric: Metric | None, with_error: bool) -> str:
    if metric is None:
        return number(None)
    error = f"\n[dim]± {metric.stderr:.3f}[/dim]" if with_error and metric.stderr is not None else ""
    return number(metric.value) + error


def points_markdown(sweep: Sweep) -> str:
    """The same table as Markdown, with all standard errors and with its notes."""
    names, keys = shown_metrics(sweep), _keys(sweep)
    ns = {name: _most_items(sweep, name) for name in names}

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    titles = ["model", *keys, sweep.score_heading, *(f"{_heading(sweep, name)} (n = {ns[name]})" for name in names)]
    lines = [f"Sweep, {escape_markdown(sweep.part)}; chosen: {escape_markdown(values_text(sweep.chosen))}.", ""]
    lines += [line([escape_markdown(title) for title in titles]), "|---|" + "---:|" * (len(titles) - 1)]
    for row in _rows(sweep):
        mark = f"**{row.mark}**" if row.chosen else row.mark
        cells = [metric_cell(row.metrics.get(name), ns[name]) for name in names]
        lines.append(line([mark, *map(escape_markdown, row.values(keys)), number(_shown(sweep, row)), *cells]))
    lines += ["", *(f"- {escape_markdown(note)}." for note in _notes(sweep))]
    return "\n".join(lines).rstrip("\n") + "\n"


def points_csv(sweep: Sweep) -> str:
    """Everything, one line a model: model (target, ideal or candidate), the candidate's values, score, met, chosen,
    note, and for each metric METRIC, METRIC_stderr and METRIC_n.

    Numbers have all their digits; what is missing is empty, as is the score where conditions are not met; met and
    chosen are true or false.
    """
    keys = _keys(sweep)
    names = dict.fromkeys(name for row in _rows(sweep) for name in row.metrics)
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    ends = ("", "_stderr", "_n")
    writer.writerow(
        ["model", *keys, "score", "met", "chosen", "note", *(f"{name}{end}" for name in names for end in ends)]
    )
    for row in _rows(sweep):
        one = row.candidate
        own = [str(one.met).lower(), str(row.chosen).lower(), one.note] if one else [None] * 3
        values = [one.values.get(key) if one else None for key in keys]
        metrics = [row.metrics.get(name) for name in names]
        cells = [cell for m in metrics for cell in ((m.value, m.stderr, m.n) if m else (None, None, None))]
        writer.writerow(["candidate" if one else row.mark, *values, _shown(sweep, row), *own, *cells])
    return stream.getvalue()


@dataclass(frozen=True)
class _Row:
    """A model of the table; mark: what its first cell says. candidate: None for target and ideal."""

    mark: str
    metrics: Mapping[str, Metric]
    candidate: Candidate | None = None
    chosen: bool = False
    last_reference: bool = False

    def values(self, keys: Sequence[str]) -> list[str]:
        own = self.candidate.values if self.candidate else {}
        return [value_text(own[key]) if key in own else "" for key in keys]


def _rows(sweep: Sweep) -> Iterator[_Row]:
    yield _Row("target", sweep.target, last_reference=sweep.ideal is None)
    if sweep.ideal is not None:
        yield _Row("ideal", sweep.ideal, last_reference=True)
    for candidate in sweep.candidates:
        chosen = sweep.is_chosen(candidate)
        state = "broken" if candidate.score is None else "" if candidate.met else "not met"
        mark = ", ".join(word for word in ("chosen" if chosen else "", state) if word)
        yield _Row(mark, candidate.metrics, candidate, chosen)


def _shown(sweep: Sweep, row: _Row) -> float | None:
    return sweep.shown_score(row.candidate) if row.candidate else None


def _short_heading(sweep: Sweep) -> str:
    """The score's heading where the title has its name."""
    return "score ↑" if sweep.score_heading.startswith("score (") else sweep.score_heading


def _keys(sweep: Sweep) -> list[str]:
    """What candidates differ in: the names of their values."""
    return list(dict.fromkeys(key for candidate in sweep.candidates for key in candidate.values))


def _known(sweep: Sweep, name: str) -> list[Metric]:
    return [row.metrics[name] for row in _rows(sweep) if name in row.metrics]


def _most_items(sweep: Sweep, name: str) -> int:
    return max(metric.n for metric in _known(sweep, name))


def _heading(sweep: Sweep, name: str) -> str:
    return heading(name, _known(sweep, name)[0].higher_is_better)


def _few_notes(sweep: Sweep) -> list[str]:
    """As many notes as a terminal has room for."""
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
    score = [_FORGOTTEN] if sweep.score_name == "extraction" else []
    return [*score, *([] if met else [_NOT_MET]), *(f"{'; '.join(who)}: {why}" for why, who in reasons.items())]
