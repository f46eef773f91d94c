"""Write a run's report.json, and report.html, which needs no network.

What the page says is in `templates/report.html.jinja`, which escapes all that comes from the run. The same story gives
the same bytes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from msa_lite.io.files.writing import json_form, write_text
from msa_lite.report.page import run_tables
from msa_lite.report.page.charts import Chart, Dots, can_draw, cut, loss_chart, score_dots, sweep_chart
from msa_lite.report.run.choice import EXTRACTION, WHOLE, in_symbols, points_table
from msa_lite.report.run.provenance import WITH_VECTORS
from msa_lite.report.run.story import Story
from msa_lite.report.tables.metrics import metric_kind
from msa_lite.report.tables.reports import RUN_REPORT, Metric, Report, arrow, reports_table

logger = logging.getLogger(__name__)

PAGE_FILE = "report.html"
_TEMPLATE = "report.html.jinja"


def run_json(story: Story) -> dict[str, Any]:
    """Return the JSON-able form of a story; docs/reference/report.md tells its keys."""
    head = ("sentence", "basis", "outcome", "verdict", "missing", "warnings")
    facts = ("benchmark", "split", "rows", "main_metrics")
    method = ("method", "formula", "strengths", "earlier", "names")
    findings = ("evidence", "attacks", "probe", "earlier_rows", "interference", "examples", "forget_rows")
    return {
        "kind": RUN_REPORT,
        **{key: json_form(getattr(story, key)) for key in (*head, *facts)},
        "metrics": _metric_values(story.reports),
        "validation": _metric_values(story.validation),
        **{key: json_form(getattr(story, key)) for key in method},
        "choice": _choice_values(story),
        "fits": {name: {**asdict(fit), "closed": fit.closed} for name, fit in story.fits.items()},
        "update": json_form(story.update),
        **{key: json_form(getattr(story, key)) for key in findings},
        "provenance": json_form(story.provenance),
        "limits": list(story.limits),
    }


def _metric_values(reports: Mapping[str, Report]) -> dict[str, Any]:
    """Return each metric with what it means, and its value for each model."""
    metrics: dict[str, Any] = {}
    for model, report in reports.items():
        for name, metric in report.metrics.items():
            kind = metric_kind(name)
            about = {"label": kind.label, "set": kind.group, "meaning": kind.formula or None}
            entry = metrics.setdefault(name, {**about, "higher_is_better": metric.higher_is_better, "models": {}})
            entry["models"][model] = _metric_value(metric)
    return metrics


def _metric_value(metric: Metric) -> dict[str, Any]:
    return {key: value for key, value in asdict(metric).items() if key != "higher_is_better"}


def _choice_values(story: Story) -> dict[str, Any] | None:
    """Return the choice with all its candidates."""
    choice = story.choice
    if choice is None:
        return None
    points = [
        {
            "values": dict(candidate.values),
            "score": candidate.score,
            "met": candidate.met,
            "note": candidate.note,
            "chosen": choice.is_chosen(candidate),
            "metrics": {name: _metric_value(metric) for name, metric in candidate.metrics.items()},
        }
        for candidate in choice.candidates
    ]
    facts = {"rule": choice.rule, "part": choice.split, "chosen": dict(choice.values), "doubts": list(choice.doubts)}
    return {**facts, "points": points, "written_gap": story.written_gap}


def write_page(story: Story, path: Path) -> None:
    """Write a run's page, whole or not at all."""
    write_text(path, make_page(story))


def make_page(story: Story, drawn: bool = True) -> str:
    """Return a run's page as HTML. drawn: False to leave out its pictures, which take seconds."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("msa_lite.report.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"prose": _prose, "capital": lambda text: f"{text[:1].upper()}{text[1:]}"}
    if drawn and not can_draw():
        logger.warning("no pictures on the page: pip install matplotlib, then write the report again")
    page = environment.get_template(_TEMPLATE).render(
        story=story,
        has_vectors=story.method in WITH_VECTORS,
        can_draw=can_draw(),
        pictures=_pictures(story) if drawn and can_draw() else {},
        tables=run_tables,
        reports_table=reports_table,
        points_table=points_table,
        in_symbols=in_symbols,
        EXTRACTION=EXTRACTION,
        WHOLE=WHOLE,
    )
    return page.rstrip() + "\n"


def _pictures(story: Story) -> dict[str, dict[str, Chart]]:
    """Draw the pictures of each section of the page, by heading."""
    result = {title: score_dots(f"dots-{at}", lines) for at, (title, lines) in enumerate(_dots(story).items())}
    choice = {"The score of each candidate": sweep_chart(story.choice) if story.choice else None}
    training = {"": loss_chart(story.fits)}
    drawn: dict[str, dict[str, Chart | None]] = {"result": {**result}, "choice": choice, "training": training}
    return {part: {title: chart for title, chart in charts.items() if chart} for part, charts in drawn.items()}


def _dots(story: Story) -> dict[str, list[Dots]]:
    """Return the lines of the pictures of the metrics that matter."""
    sides: dict[str, list[Dots]] = {}
    for title, kinds in run_tables.main_sides(story).items() if story.reports else ():
        for kind in kinds:
            models = {name: r.metrics[kind.name] for name, r in story.reports.items() if kind.name in r.metrics}
            direction = next(iter(models.values())).higher_is_better
            sides.setdefault(title, []).append(Dots(cut(kind.label, 30) + arrow(kind, direction), models))
    return sides


def _prose(text: str) -> Any:
    """Return text as HTML: θ_0 with a lowered 0, `code`, coloured marks; percent signs stay with their numbers."""
    from markupsafe import Markup, escape

    marked = str(escape(re.sub(r"(?<=\d) %", "\u00a0%", text)))
    marked = re.sub(r"θ_(\w)", r"θ<sub>\1</sub>", marked)
    marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", marked)
    for sign, role in {"■": "target", "●": "unlearned", "◆": "ideal"}.items():
        marked = marked.replace(sign, f'<span class="mark {role}" aria-hidden="true">{sign}</span>')
    return Markup(marked)
