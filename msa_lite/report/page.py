"""Write report.html: the story of a run as one page, which needs no network and no script.

Texts are in `templates/report.html.jinja`, which escapes all that comes from the run; pictures are in `charts` and
`maps`. The same story gives the same bytes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from msa_lite.io.files.writing import write_text
from msa_lite.report.attack_tables import ATTACK_HEADINGS, GAIN_MEANING, TRIAL_HEADINGS, attack_rows, trial_rows
from msa_lite.report.charts import Bars, Chart, can_draw, cut, loss_chart, score_bars
from msa_lite.report.formats import Cell
from msa_lite.report.maps import forget_retain_chart, layer_chart, sweep_chart, value_label
from msa_lite.report.metrics import GROUPS, METRICS, MetricKind, metric_kind
from msa_lite.report.probing import ProbeFacts
from msa_lite.report.reports import Metric, metric_cell, notes, signed
from msa_lite.report.rows import percent_down
from msa_lite.report.story import Story
from msa_lite.report.update import FORECAST_MEANING, Update, forecast_table

logger = logging.getLogger(__name__)

PAGE_FILE = "report.html"
_TEMPLATE = "report.html.jinja"
_MODELS = ("target", "unlearned", "ideal")
_CHARTS = ("sweep", "forget_retain", "losses", "layers")
_MOST_BARS = 3  # metrics in the first picture, a side
_ROOM = 40  # signs above a picture of bars
_MOST_COLUMNS = 5  # metrics in the table of a sweep
_MOST_POINTS = 12  # of a sweep; a longer table is folded


def write_page(story: Story, path: Path) -> None:
    """Write a run's page, whole or not at all."""
    write_text(path, make_page(story))


def make_page(story: Story) -> str:
    """Return a run's page as HTML."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("msa_lite.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": signed,
        "percent": _percent,
        "count": "{:,}".format,
        "subscripts": _subscripts,
        "cut": cut,
        "tied": _tied,
        "percent_down": percent_down,
    }
    drawn = can_draw()
    if not drawn:
        logger.warning("no pictures on the page: pip install matplotlib, then write the report again")
    page = environment.get_template(_TEMPLATE).render(
        story=story,
        drawn=drawn,
        models=[name for name in _MODELS if name in story.reports],
        strengths=_strengths(story.strengths),
        earlier={run: _strengths(values) for run, values in story.earlier.items()},
        bars=_bars(story) if drawn else [],
        meanings=_meanings(story),
        scores=_score_groups(story),
        notes=notes(story.reports),
        points=_point_table(story),
        fold_points=bool(story.choice and len(story.choice.candidates) > _MOST_POINTS),
        charts=_charts(story) if drawn else dict.fromkeys(_CHARTS),
        change=_change(story.update) if story.update else [],
        forecast=forecast_table(story.update.forecast) if story.update else None,
        forecast_meaning=FORECAST_MEANING,
        probed=_probed(story.probe) if story.probe else [],
        attack_headings=ATTACK_HEADINGS,
        gain_meaning=GAIN_MEANING,
        attack_rows=attack_rows(story.attacks) if story.attacks else [],
        trial_headings=TRIAL_HEADINGS,
        trial_rows=trial_rows,
    )
    return page.rstrip() + "\n"


def _percent(share: float | None) -> str:
    """Return a share in percent with as many digits as matter: "25.6 %", "0.012 %"."""
    if share is None:
        return "–"
    percent = 100 * share
    if 0 < percent < 1e-3:
        return "below 0.001 %"
    return f"{percent:.1f} %" if percent >= 1 or percent == 0 else f"{percent:.2g} %"


def _strengths(values: Mapping[str, float | int | str]) -> str:
    return ", ".join(value_label(key, value) for key, value in values.items())


def _tied(text: str) -> str:
    """Return text whose percent signs stay on the line of their numbers."""
    return re.sub(r"(?<=\d) %", "\u00a0%", text)


def _subscripts(formula: str) -> Any:
    """Return a formula as HTML: θ_0 with a lowered 0."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"_(\w)", r"<sub>\1</sub>", str(escape(formula))))


def _charts(story: Story) -> dict[str, Chart | None]:
    """Return the pictures by name, None for those that there is nothing for."""
    charts = (
        sweep_chart(story.choice) if story.choice else None,
        forget_retain_chart(story.choice) if story.choice else None,
        loss_chart(story.fits),
        layer_chart(story.update.cells()) if story.update else None,
    )
    return dict(zip(_CHARTS, charts, strict=True))


def _bars(story: Story) -> list[tuple[str, Chart]]:
    """Return the pictures of the few metrics that matter: (heading, bars), first of forgetting, then of the rest."""
    sides: dict[str, list[Bars]] = {heading: [] for heading in _SIDES}
    for heading, kind in _shown(story):
        models = {name: story.reports[name].metrics.get(kind.name) for name in _MODELS if name in story.reports}
        present = {name: metric for name, metric in models.items() if metric is not None}
        sides[heading].append(Bars(_bars_heading(kind, next(iter(present.values()))), present))
    forget, keep = sides.values()
    if not forget:
        sides = {"The scores that matter": keep}
    return [(heading, score_bars(f"bars-{at}", bars)) for at, (heading, bars) in enumerate(sides.items()) if bars]


def _shown(story: Story) -> list[tuple[str, MetricKind]]:
    """Return the metrics of the first pictures, each with the heading of its side; those without any value are not."""
    sides: dict[str, list[MetricKind]] = {heading: [] for heading in _SIDES}
    for kind in map(metric_kind, story.main_metrics):
        side = sides[_SIDES[kind.group not in _FORGETTING]]
        values = [report.values().get(kind.name) for report in story.reports.values()]
        if len(side) < _MOST_BARS and any(value is not None for value in values):
            side.append(kind)
    return [(heading, kind) for heading, kinds in sides.items() for kind in kinds]


def _meanings(story: Story) -> dict[str, str]:
    """Return what the metrics of the first pictures mean, by label."""
    return {kind.label: kind.formula for _, kind in _shown(story) if kind.formula}


def _bars_heading(kind: MetricKind, metric: Metric) -> str:
    """Return a metric's name with the direction: in words, or where they have no room, as an arrow."""
    words = f"{kind.label}: {_way(kind, metric)}"
    arrow = " → 0" if kind.best_at_zero else {True: " ↑", False: " ↓", None: ""}[metric.higher_is_better]
    return words if len(words) <= _ROOM else cut(kind.label, _ROOM - 4) + arrow


_SIDES = ("What it was to forget", "What it was to keep")
_FORGETTING = [group for group in GROUPS if "forget" in group]


def _way(kind: MetricKind, metric: Metric) -> str:
    """Return which way is better, in words."""
    if kind.best_at_zero:
        return "0 is best"
    return {True: "higher is better", False: "lower is better", None: "for comparison"}[metric.higher_is_better]


@dataclass(frozen=True)
class ScoreRow:
    """One metric in the table of all scores."""

    kind: MetricKind
    """The metric's label and meaning."""
    way: str
    """Which way is better, in words."""
    n: int
    """Items in it."""
    cells: Sequence[Cell]
    """Its value for each model."""


def _score_groups(story: Story) -> list[tuple[str, list[ScoreRow]]]:
    """Return (group, its metrics) of all scores on the test rows."""
    reports = [story.reports[name] for name in _MODELS if name in story.reports]
    names = dict.fromkeys(name for report in reports for name in report.metrics)
    rows = []
    for kind in sorted(map(metric_kind, names), key=lambda kind: GROUPS.index(kind.group)):
        metrics = [report.metrics.get(kind.name) for report in reports]
        present = [metric for metric in metrics if metric is not None]
        n = max(metric.n for metric in present)
        rows.append(ScoreRow(kind, _way(kind, present[0]), n, [metric_cell(metric, n) for metric in metrics]))
    return [(group, list(members)) for group, members in groupby(rows, key=lambda row: row.kind.group)]


@dataclass(frozen=True)
class PointRow:
    """One line in the table of a sweep: a candidate, the target or the ideal."""

    name: str
    """The values that tell it from the others, or the model's name."""
    score: str
    """The score, or why there is none; empty for target and ideal."""
    cells: Sequence[Cell]
    """Its main metrics."""
    chosen: bool = False
    note: str | None = None
    """The reason why it is broken, or the condition that it misses."""


@dataclass(frozen=True)
class PointTable:
    """The table of a sweep."""

    kinds: Sequence[tuple[MetricKind, int]]
    """The metrics that it shows, each with its number of items."""
    rows: Sequence[PointRow]


def _point_table(story: Story) -> PointTable | None:
    """Return the candidates of a sweep below target and ideal; None where nothing was chosen."""
    choice = story.choice
    if choice is None:
        return None
    every = [choice.target, *(point.metrics for point in choice.candidates)]
    counts = {name: max(m[name].n for m in every if name in m) for name in {name for m in every for name in m}}
    kinds = [(kind, counts[kind.name]) for kind in map(metric_kind, story.main_metrics) if kind.name in counts][
        :_MOST_COLUMNS
    ]

    def cells(metrics: Mapping[str, Metric]) -> list[Cell]:
        return [metric_cell(metrics.get(kind.name), n) for kind, n in kinds]

    rows = [PointRow("target", "", cells(choice.target))]
    rows += [PointRow("ideal", "", cells(choice.ideal))] if choice.ideal else []
    for point in choice.candidates:
        score = choice.shown_score(point)
        words = "broken" if point.score is None else "not met" if score is None else signed(score)
        name = _strengths(point.values)
        rows.append(PointRow(name, words, cells(point.metrics), choice.is_chosen(point), point.note))
    return PointTable(kinds, rows)


def _change(update: Update) -> list[tuple[str, str, str]]:
    """Return what the merge recorded of the update: (figure, its value, its meaning)."""
    figures = update.figures
    lines = [(label, _figure(figures, key, form), meaning) for key, label, form, meaning in _FIGURES if key in figures]
    return [line for line in lines if line[1]]


_FIGURES = (
    ("weights_changed", "Weights changed", "count", "The number of stored numbers that differ from the target's."),
    ("tensors_touched", "Tensors touched", "count", "The weight matrices that the update reaches."),
    ("modules", "Modules", "count", "The weight matrices that the adapter reaches."),
    ("rank", "Rank of the adapter", "count", "Higher ranks hold more detail and take more space."),
    (
        "relative_size", "Size of the update", "percent",
        "Its norm as a share of the norm of the weights that it changes.",
    ),
    (
        "rounding_loss", "Lost by rounding", "percent",
        "The share of the update that the stored number format could not hold. Above 10 % is a concern.",
    ),
    (
        "truncation_loss", "Lost by truncation", "percent",
        "The share of the update that the adapter's rank could not hold.",
    ),
    (
        "update_cosine", "Direction kept", "number",
        "The cosine between the wanted and the stored update. 1: exactly the wanted direction.",
    ),
    (
        "vector_cosine", "Forget against retain vector", "number",
        "The cosine between the two vectors. 0: they do not touch; near 1: forgetting and keeping pull the same way.",
    ),
)  # fmt: skip


def _figure(figures: Mapping[str, Any], key: str, form: str) -> str:
    """Return one figure for a reader; empty where it is not known."""
    value = figures[key]
    if not isinstance(value, int | float):
        return ""
    if form == "count":
        whole = figures.get("weights_touched") if key == "weights_changed" else None
        return f"{value:,} of {whole:,}" if whole else f"{value:,}"
    return _percent(value) if form == "percent" else signed(value)


@dataclass(frozen=True)
class ProbedRow:
    """One model's score in the probe."""

    model: str
    label: str
    meaning: str
    value: str
    interval: str
    reading: str
    """The score in words."""


def _probed(probe: ProbeFacts) -> list[ProbedRow]:
    """Return the scores of every model in the probe, each with what it says."""
    rows = []
    for model in probe.models:
        for name, metric in model.metrics.items():
            low, high = model.intervals.get(name, (None, None))
            ends = f"{signed(low)} to {signed(high)}" if low is not None else "–"
            kind = METRICS.get(name) or metric_kind(name)
            rows.append(ProbedRow(model.name, kind.label, kind.formula, signed(metric.value), ends, model.explanation))
    return rows
