"""Make the content of a run's report.json, and of report.html, which needs no network.

What the page says is in `templates/report.html.jinja`, which escapes all that comes from the run. The same story gives
the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from msa_lite.catalogue import evidence_metric
from msa_lite.io.files.writing import json_form
from msa_lite.report.page.card import PAPER
from msa_lite.report.page.charts import ByModel, Chart, cut, loss_chart, score_dots, sweep_chart
from msa_lite.report.run.attacks import OUTCOMES, AttackedModel, AttackFacts, AttackResult, TrialResult
from msa_lite.report.run.choice import EXTRACTION, WHOLE, in_symbols, points_table, value_text
from msa_lite.report.run.provenance import WITH_VECTORS
from msa_lite.report.run.rows import row_lines
from msa_lite.report.run.story import Story
from msa_lite.report.tables.formats import Cell, Section, TextTable
from msa_lite.report.tables.metrics import GROUPS, MetricKind, metric_kind
from msa_lite.report.tables.reports import RUN_REPORT, Metric, Report, arrow, number, reports_table, signed
from msa_lite.report.verdict.figures import percent

_TEMPLATE = "report.html.jinja"
GAIN_MEANING = "gain: what comes back, minus what is left of the same rows without the attack"
_MOST_LINES = 3  # metrics in the first picture, a side
_FORGETTING = [group for group in GROUPS if "forget" in group]


def run_json(story: Story) -> dict[str, Any]:
    """Return the JSON-able form of a story; docs/reference/report.md tells its keys."""
    head = ("sentence", "basis", "outcome", "verdict", "missing", "warnings")
    facts = ("benchmark", "split", "rows", "main_metrics")
    method = ("method", "formula", "strengths", "earlier", "names")
    findings = ("evidence", "attacks", "probe", "earlier_rows", "interference", "examples", "forget_rows", "salt")
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


def make_page(story: Story, drawn: bool = True) -> str:
    """Return a run's page as HTML. drawn: False to leave out its pictures, which take seconds."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("msa_lite.report.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    environment.filters |= {"prose": _prose, "capital": lambda text: f"{text[:1].upper()}{text[1:]}"}
    environment.filters |= {"value": value_text, "cut": cut, "signed": signed}
    functions = (
        Cell, attack_table, evidence_metric, in_symbols, method_facts, metric_kind, number, percent, points_table,
        reports_table, row_lines, share_text, signed, table_of, trial_table,
    )  # fmt: skip
    environment.globals |= {function.__name__: function for function in functions}
    environment.globals |= {"EXTRACTION": EXTRACTION, "WHOLE": WHOLE, "GAIN_MEANING": GAIN_MEANING}
    environment.globals |= {"OUTCOMES": OUTCOMES}
    page = environment.get_template(_TEMPLATE).render(
        story=story,
        has_vectors=story.method in WITH_VECTORS,
        main_kinds=[kind for kinds in main_sides(story).values() for kind in kinds],
        pictures=_pictures(story) if drawn else {},
    )
    return page.rstrip() + "\n"


def _pictures(story: Story) -> dict[str, dict[str, Chart]]:
    """Draw the pictures of each section of the page, by heading."""
    result = {title: score_dots(f"dots-{at}", lines) for at, (title, lines) in enumerate(_dots(story).items())}
    choice = {"The score of each candidate": sweep_chart(story.choice) if story.choice else None}
    training = {"": loss_chart(story.fits)}
    drawn: dict[str, dict[str, Chart | None]] = {"result": {**result}, "choice": choice, "training": training}
    return {part: {title: chart for title, chart in charts.items() if chart} for part, charts in drawn.items()}


def _dots(story: Story) -> dict[str, dict[str, ByModel]]:
    """Return the lines of the pictures of the metrics that matter."""
    sides: dict[str, dict[str, ByModel]] = {}
    for title, kinds in main_sides(story).items():
        for kind in kinds:
            models = {name: r.metrics[kind.name] for name, r in story.reports.items() if kind.name in r.metrics}
            direction = next(iter(models.values())).higher_is_better
            sides.setdefault(title, {})[cut(kind.label, 30) + arrow(kind, direction)] = models
    return sides


def main_sides(story: Story) -> dict[str, list[MetricKind]]:
    """Return the metrics of the first pictures: of forgetting, and of keeping; those without any value are left out."""
    sides: dict[str, list[MetricKind]] = {"What it was to forget": [], "What it was to keep": []}
    forget, keep = sides.values()
    for kind in map(metric_kind, story.main_metrics):
        side = forget if kind.group in _FORGETTING else keep
        if len(side) < _MOST_LINES and any(
            report.values().get(kind.name) is not None for report in story.reports.values()
        ):
            side.append(kind)
    return {title: kinds for title, kinds in (sides if forget else {"The scores that matter": keep}).items() if kinds}


def method_facts(story: Story) -> dict[str, str]:
    """Return the formula, its values and the names of the models."""
    settings_of = story.reports["unlearned"].settings.get("method") if "unlearned" in story.reports else None
    method: Mapping[str, Any] = settings_of if isinstance(settings_of, Mapping) else {}
    hold = method.get("hold")
    facts = {
        "formula": story.formula,
        "strengths" if story.method in WITH_VECTORS else "settings": in_symbols(story.strengths),
        **story.names,
        "hold of the forget vector's fit": f"h = {hold:g}" if isinstance(hold, float) else "",
        "choice of the prior": story.provenance.reason or "",
        "paper": PAPER if story.method == "msa" else "",
    }
    return {name: text for name, text in facts.items() if text}


def table_of(headings: Sequence[str], rows: Sequence[Sequence[str | Cell]], left: int = 1) -> TextTable:
    """Return a table of one section."""
    cells = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    return TextTable(headings, [Section(cells)], left=left)


def attack_table(facts: AttackFacts, title: str = "", notes: tuple[str, ...] = ()) -> TextTable:
    """Return a line for each attack and model, with its strongest trial."""
    rows = []
    for attack in facts.attacks:
        for name, attacked in attack.models.items():
            trial = attacked.strongest
            texts = (attack.name, name, trial.label, trial.words, _gain(trial), str(trial.rows), trial.outcome)
            rows.append([*map(Cell, texts)])
    headings = ["attack", "model", "strongest trial", "comes back", "gain", "rows", "outcome"]
    return TextTable(headings, [Section(rows)], title, notes, left=3)


def trial_table(attack: AttackResult) -> TextTable:
    """Return a line for each trial of an attack on each model."""
    rows = []
    for name, attacked in attack.models.items():
        for trial in attacked.trials:
            outcome = "" if trial.is_control else _outcome_words(attacked, trial)
            rows.append([name, trial.label, trial.words, _gain(trial), str(trial.rows), outcome])
    return table_of(["model", "trial", "comes back", "gain", "rows", "outcome"], rows, left=2)


def _gain(trial: TrialResult) -> str:
    return trial.gain.words if trial.gain else "–"


def _outcome_words(attacked: AttackedModel, trial: TrialResult) -> str:
    """Return the outcome of a trial, and whether its rows are too few for it to count."""
    is_left_out = trial.has_too_few_rows and not attacked.strongest.has_too_few_rows
    return "unclear, too few rows to count" if is_left_out else trial.outcome


def share_text(share: float) -> str:
    """Return a share in percent with as many digits as matter: "25.6 %", "0.012 %"."""
    hundredths = 100 * share
    if 0 < hundredths < 1e-3:
        return "below 0.001 %"
    return f"{hundredths:.1f} %" if hundredths >= 1 or hundredths == 0 else f"{hundredths:.2g} %"


def _prose(text: str) -> Any:
    """Return text as HTML: θ_0 with a lowered 0, `code`, coloured marks; percent signs stay with their numbers."""
    from markupsafe import Markup, escape

    marked = str(escape(re.sub(r"(?<=\d) %", "\u00a0%", text)))
    marked = re.sub(r"θ_(\w)", r"θ<sub>\1</sub>", marked)
    marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", marked)
    for sign, role in {"■": "target", "●": "unlearned", "◆": "ideal"}.items():
        marked = marked.replace(sign, f'<span class="mark {role}" aria-hidden="true">{sign}</span>')
    return Markup(marked)
