"""Read the choice of a run, of α and β or of a baseline's epoch, and write the table of its candidates."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msa_lite.catalogue import BENCHMARKS
from msa_lite.errors import FormatError, MsaError
from msa_lite.io.files.reading import read_object
from msa_lite.io.finished.seal import check_read
from msa_lite.report.tables.formats import Cell, Section, TextTable, escape_markdown, markdown
from msa_lite.report.tables.metrics import METRICS, metric_kind
from msa_lite.report.tables.reports import Metric, heading, is_finite_number, metric_cell, number, reading, stage_report

CHOICE_FILE = "choice.json"
CHOICE_TABLE = "table.md"
EXTRACTION = "extraction"  # the name of the default rule
WHOLE = "all"  # the name of a part that has all rows, where there are too few to divide
LEAVES_OUT = "the choice leaves out"  # the beginning of a doubt on terms of a score that do not count
SYMBOLS = {"alpha": "α", "beta": "β", "filter": "λ"}
_NO_VALUES = ("score", "met", "note")
_NOT_MET = "not met: misses the conditions of the choice, so it has no score"
_KEPT = (
    "kept: of what the target knows of the retain set beyond unseen rows, for points that are inside the bounds of the "
    "control; distance: of the forget scores to the control's, and of the retain scores to the target's"
)

Values = Mapping[str, float | int | str]
"""The values that tell a candidate from the others: {"alpha": 0.5, "beta": 1.0}, {"epoch": 3}."""
MetricsByName = Mapping[str, Metric]


def candidate_name(values: Values) -> str:
    """Return the name of a candidate's folder: `alpha-0.5_beta-1`; no two candidates share one."""
    return "_".join(f"{key}-{v if isinstance(v, str) else format(v, '.12g')}" for key, v in values.items())


def named_values(name: str) -> Values:
    """Return the numbers in a candidate's name, as `candidate_name` writes them."""
    return {key: float(value) for key, value in re.findall(r"(\w+?)-(-?[\d.]+(?:e[+-]?\d+)?)(?:_|$)", name)}


def value_text(value: object) -> str:
    """Return one of a candidate's values as tables and pictures show it."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def in_symbols(values: Mapping[str, object]) -> str:
    """Return a candidate's values in words: "α = 1, β = 0.5"."""
    return ", ".join(f"{SYMBOLS.get(key, key)} = {value_text(value)}" for key, value in values.items())


@dataclass(frozen=True)
class Candidate:
    """One scored candidate of a choice."""

    values: Values
    """The values that tell it from the others."""
    metrics: MetricsByName
    """Its metrics on the validation rows; empty where it is broken."""
    score: float | None
    """The number that the rule ranks by; higher is better. None for a broken candidate, which is never chosen."""
    met: bool = True
    """True if it meets the rule's conditions. If it does not, tables leave out its score, which only says how near it
    comes."""
    note: str | None = None
    """The reason why it is broken, or the condition that it misses and by how much."""

    @property
    def state(self) -> str:
        """Return "broken", "not met", or nothing where it has a score."""
        return "broken" if self.score is None else "" if self.met else "not met"

    @property
    def shown_score(self) -> float | None:
        """Return the score to show; None where the candidate is broken or does not meet the conditions."""
        return self.score if self.met else None


@dataclass(frozen=True)
class Choice:
    """A finished choice: all candidates, the rule, and the reasons for doubt."""

    rule: str
    """The rule's name: "extraction", "tofu"."""
    values: Values
    """The values of the candidate that was chosen: the strengths of a point, or an epoch."""
    candidates: Sequence[Candidate]
    """All candidates in the order in which they were tried."""
    doubts: Sequence[str]
    """Reasons to doubt the choice."""
    target: MetricsByName
    """The target's metrics on the same rows."""
    ideal: MetricsByName | None
    """The ideal's, where there is one."""
    split: str
    """The rows that all candidates were scored on: "validation"."""
    benchmark: str
    """The name of the benchmark, which says what tables show."""

    def is_chosen(self, candidate: Candidate) -> bool:
        """Check whether this is the candidate that was chosen."""
        return dict(candidate.values) == dict(self.values)

    @property
    def chosen(self) -> Candidate:
        """Return the candidate that was chosen."""
        return next(candidate for candidate in self.candidates if self.is_chosen(candidate))

    @property
    def score(self) -> float:
        """Return the value that the rule ranks the chosen candidate by; higher is better."""
        score = self.chosen.score
        assert score is not None, "a broken candidate is never chosen"
        return score

    @property
    def met(self) -> bool:
        """Return True if the chosen candidate meets the rule's conditions."""
        return self.chosen.met

    @property
    def scores(self) -> list[dict[str, Any]]:
        """Return an entry a candidate, as choice.json has them: its values, "score", "met" and, if any, "note"."""
        return [
            {**c.values, "score": c.score, "met": c.met, **({"note": c.note} if c.note else {})}
            for c in self.candidates
        ]

    @property
    def heading(self) -> str:
        """Return the name of the rule's score, with the arrow of its direction."""
        return score_heading(self.rule)

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the names of the values that candidates differ in: ("alpha", "beta")."""
        return tuple(dict.fromkeys(key for candidate in self.candidates for key in candidate.values))


def score_heading(rule: str) -> str:
    """Return the name of a rule's score, with the arrow of its direction.

    The rule "extraction" ranks by what is kept, among the points that have forgotten.
    """
    return "kept ↑" if rule == EXTRACTION else f"score ({rule}) ↑"


def load_choice(folder: Path) -> Choice:
    """Load the choice in a run's `sweep/`. Raise FormatError where there is none, and for broken files."""
    path = folder / CHOICE_FILE
    check_read(path)
    choice = read_object(path)
    with reading(path):
        rule, lines, doubts = choice["rule"], choice["scores"], list(map(str, choice["doubts"]))
        values = {k: v for k, v in choice.items() if k not in ("score", "met", "rule", "scores", "doubts")}
        candidates = tuple(_load_candidate(folder, line) for line in lines)
        if not isinstance(rule, str) or not any(candidate.values == values for candidate in candidates):
            raise ValueError("no rule, or no candidate that was chosen by it")
    target, ideal = stage_report(folder / "target"), stage_report(folder / "ideal")
    if target is None:
        raise FormatError(f"{folder / 'target'}: the choice has no report of the target")
    return Choice(
        rule=rule,
        values=values,
        candidates=candidates,
        doubts=doubts,
        target=target.metrics,
        ideal=ideal.metrics if ideal else None,
        split=target.split,
        benchmark=target.benchmark,
    )


def _load_candidate(folder: Path, line: Mapping[str, Any]) -> Candidate:
    values = {key: value for key, value in line.items() if key not in _NO_VALUES}
    if not all(is_finite_number(value) or isinstance(value, str) for value in values.values()):
        raise TypeError(f"values {values}")
    if line["score"] is not None and not is_finite_number(line["score"]):
        raise TypeError(f"score {line['score']}")
    name = candidate_name(values)
    report = stage_report(folder / name) if "/" not in name else None
    note = line.get("note")
    return Candidate(
        values,
        report.metrics if report else {},
        line["score"],
        bool(line["met"]),
        None if note is None else str(note),
    )


def load_tradeoff(folder: Path, chosen: Values | None = None) -> dict[str, Any] | None:
    """Return what target, ideal and each candidate show of the forget set and of the retain set, ready for JSON.

    folder: a run's `sweep`, which may still be under way; what is moved meanwhile is left out. None where no pair of
    metrics says it.
    """
    partial, models = folder.with_name(f"{folder.name}.partial"), dict[str, MetricsByName]()
    for place in sorted((partial if partial.is_dir() else folder).glob("*")):
        with suppress(MsaError):
            models |= {place.name: report.metrics} if (report := stage_report(place)) else {}
    points = {name: named_values(name) for name in models if name not in ("target", "ideal")}
    known = {name for point in points for name, metric in models[point].items() if metric.value is not None}
    pairs = [(k.name, k.partner) for k in METRICS.values() if k.partner and known >= {k.name, k.partner}]
    spots = []
    for name, metrics in models.items() if pairs else ():
        x, y = (metrics[axis].value if axis in metrics else None for axis in pairs[0])
        role = name if name not in points else "chosen" if points[name] == chosen else "candidate"
        if x is not None and y is not None:
            spots.append({"role": role, "x": x, "y": y, "values": points.get(name)})
    axes = [heading(name, metric_kind(name).higher_is_better) for name in pairs[0]] if pairs else []
    return {"axes": axes, "spots": spots} if spots else None


def shown_metrics(choice: Choice) -> dict[str, int]:
    """Return the metrics that tables show, by name, with the largest number of items of each.

    These are the main ones of the benchmark. Metrics without any value are left out.
    """
    models = [choice.target, *(candidate.metrics for candidate in choice.candidates)]
    available = [name for metrics in models for name, metric in metrics.items() if metric.value is not None]
    entry = BENCHMARKS.get(choice.benchmark)
    main = (entry and entry.main_columns(available)) or available
    names = dict.fromkeys(name for name in main if name in available)
    metrics = _metrics(choice)
    return {name: max(metric.n for metric in metrics[name]) for name in names}


def points_table(choice: Choice) -> TextTable:
    """Return a row for target, ideal and each candidate, with all standard errors and notes."""
    metrics, shown = _metrics(choice), shown_metrics(choice)
    labels = [f"{heading(name, metrics[name][0].higher_is_better)} (n = {n})" for name, n in shown.items()]
    rows = []
    for label, model in _models(choice):
        values = [Cell(value_text(model.values[key]) if key in model.values else "") for key in choice.keys]
        cells = [metric_cell(model.metrics.get(name), n) for name, n in shown.items()]
        rows.append([Cell(label, choice.is_chosen(model)), *values, Cell(number(model.shown_score)), *cells])
    title = f"Sweep, {choice.split}; chosen: {in_symbols(choice.values)}."
    return TextTable(["model", *choice.keys, choice.heading, *labels], [Section(rows)], title, _notes(choice))


def points_markdown(choice: Choice) -> str:
    """Return the table as Markdown."""
    table = points_table(choice)
    return f"{escape_markdown(table.title)}\n\n{markdown(table)}"


def _models(choice: Choice) -> list[tuple[str, Candidate]]:
    """Return the models of a table, each with the text of its first cell; target and ideal have no values."""
    models = [("target", Candidate({}, choice.target, None))]
    models += [("ideal", Candidate({}, choice.ideal, None))] if choice.ideal is not None else []
    for candidate in choice.candidates:
        words = ("chosen" * choice.is_chosen(candidate), candidate.state)
        models.append((", ".join(filter(None, words)), candidate))
    return models


def _metrics(choice: Choice) -> dict[str, list[Metric]]:
    """Return every metric that some model has, by name."""
    every: dict[str, list[Metric]] = {}
    for _, model in _models(choice):
        for name, metric in model.metrics.items():
            every.setdefault(name, []).append(metric)
    return every


def _notes(choice: Choice) -> list[str]:
    """Return notes on the score and the marks, and the reasons of broken and unmet candidates."""
    reasons: dict[str, list[str]] = {}
    for candidate in sorted(choice.candidates, key=lambda candidate: not choice.is_chosen(candidate)):
        if candidate.note:
            reason = f"{candidate.state}: {' '.join(candidate.note.split())}"
            reasons.setdefault(reason, []).append(in_symbols(candidate.values))
    notes = [_KEPT] if choice.rule == EXTRACTION else []
    if any(candidate.state == "not met" for candidate in choice.candidates):
        notes.append(_NOT_MET)
    notes += [doubt for doubt in choice.doubts if doubt.startswith(LEAVES_OUT)]
    return [*notes, *(f"{'; '.join(names)}: {reason}" for reason, names in reasons.items())]
