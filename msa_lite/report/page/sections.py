"""List the sections of a run's report: each knows its title, what it shows and its values in report.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from msa_lite.io.files.writing import json_form
from msa_lite.report.page.blocks import Block, Entries, Fold, Grid, Pictures, Prose, ReportSection
from msa_lite.report.page.card import PAPER
from msa_lite.report.page.charts import Chart, Dots, can_draw, cut, score_dots, sweep_chart
from msa_lite.report.page.evidence_sections import (
    attack_section,
    beside_section,
    example_section,
    limit_section,
    probe_section,
    provenance_section,
    rows_section,
)
from msa_lite.report.page.work_sections import interference_section, training_section, update_section
from msa_lite.report.run.choice import EXTRACTION, WHOLE, Choice, in_symbols, points_table
from msa_lite.report.run.provenance import WITH_VECTORS
from msa_lite.report.run.story import Story
from msa_lite.report.tables.metrics import GROUPS, MetricKind, metric_kind
from msa_lite.report.tables.reports import Metric, Report, arrow, reports_table
from msa_lite.report.verdict.verdict import Verdict

MARKS = {"target": "■ target", "unlearned": "● unlearned", "ideal": "◆ ideal"}
_MOST_LINES = 3  # metrics in the first picture, a side
_MOST_POINTS = 6  # of a choice; a longer table is folded
_FORGETTING = [group for group in GROUPS if "forget" in group]
_ROLES = {
    "target": "the model as it was before, trained on everything",
    "unlearned": "the result: the target with the update applied",
    "ideal": "a model that never saw the data to forget: the best that can be hoped for",
}


def run_sections(story: Story) -> list[ReportSection]:
    """Return the sections of a run's report, in order; those without blocks have values alone."""
    makers = (
        _result, _verdict, _scores, _method, _choice, training_section, update_section, beside_section, attack_section,
        probe_section, interference_section, example_section, rows_section, provenance_section, limit_section,
    )  # fmt: skip
    return [make(story) for make in makers]


def _result(story: Story) -> ReportSection:
    keys = ("benchmark", "split", "rows", "main_metrics")
    values = {key: json_form(getattr(story, key)) for key in keys}
    reports = story.reports
    if not reports:
        return ReportSection("result", "Before and after", (), values)
    opening = (
        "Each line is a score, with a mark for each model; the numbers above it are in the order of this list. Where "
        "less is to be known, the unlearned model should be at the ideal; where knowledge is to be kept, at the "
        "target. Whiskers are 95 % intervals (± 1.96 standard errors). A mark without them had the same score on "
        "every question."
    )
    if not can_draw():
        opening = (
            "The pictures of this page are missing, since matplotlib was not installed. The table of all scores has "
            "their numbers."
        )
    counts = f"Scored rows: {', '.join(f'{name} {count:,}' for name, count in story.rows.items())}."
    ideal = "" if "ideal" in reports else " No ideal model was given, so nothing says how low the forget scores go."
    words = {
        "forget set": "the data to remove",
        "retain set": "data of the same kind that the model is to keep",
        "holdout set": "data of the same kind that no model was trained on: a yardstick",
        "prior": "an earlier state of the target, from before it saw the data to forget",
    }
    if not story.rows.get("holdout"):
        del words["holdout set"]
    meanings = {kind.label: kind.formula for kinds in _sides(story).values() for kind in kinds if kind.formula}
    blocks: list[Block] = [
        Prose(opening),
        Entries({MARKS[name]: _ROLES[name] for name in reports}, "words"),
        Pictures(_dots(story)),
        Prose(f"{counts if story.rows else ''}{ideal}".strip(), small=True),
        Entries(meanings, "facts brief"),
        Entries(words, "words"),
    ]
    return ReportSection("result", "Before and after", blocks, values)


def _sides(story: Story) -> dict[str, list[MetricKind]]:
    """Return the metrics of the first pictures: of forgetting, and of keeping; those without any value are left out."""
    sides: dict[str, list[MetricKind]] = {"What it was to forget": [], "What it was to keep": []}
    forget, keep = sides.values()
    for kind in map(metric_kind, story.main_metrics):
        side = forget if kind.group in _FORGETTING else keep
        if len(side) < _MOST_LINES and any(
            report.values().get(kind.name) is not None for report in story.reports.values()
        ):
            side.append(kind)
    return sides if forget else {"The scores that matter": keep}


def _dots(story: Story) -> dict[str, Any]:
    """Return the pictures of the metrics that matter, by heading, each drawn when it is called."""

    def draw(name: str, kinds: Sequence[MetricKind]) -> Chart:
        lines = []
        for kind in kinds:
            models = {
                model: report.metrics[kind.name]
                for model, report in story.reports.items()
                if kind.name in report.metrics
            }
            direction = next(iter(models.values())).higher_is_better
            lines.append(Dots(cut(kind.label, 30) + arrow(kind, direction), models))
        return score_dots(name, lines)

    sides = enumerate((title, kinds) for title, kinds in _sides(story).items() if kinds)
    return {title: lambda at=at, kinds=kinds: draw(f"dots-{at}", kinds) for at, (title, kinds) in sides}


def _verdict(story: Story) -> ReportSection:
    blocks: list[Block] = []
    verdict = story.verdict
    if isinstance(verdict, Verdict):
        blocks = [
            Prose(
                "The verdict asks three things. Does the model recite more of the rows to forget than a model that "
                "never saw them? Is it nearer to the target than to such a model? And what has it kept? A PASS says "
                "that all three are shown, not only measured."
            ),
            Prose(f"{verdict.changes} {verdict.criteria}."),
            Prose(story.basis or "", small=True),
        ]
    return ReportSection("verdict", "The verdict", blocks)


def _scores(story: Story) -> ReportSection:
    values = {"metrics": _metric_values(story.reports), "validation": _metric_values(story.validation)}
    if not story.reports:
        return ReportSection("scores", "All scores", (), values)
    benchmark = f" of the benchmark {story.benchmark}" if story.benchmark != "qa" else ""
    opening = f"Scores on {story.split} rows{benchmark}, with the number of items (n)."
    blocks = [Prose(opening), Grid(reports_table(story.reports), "All scores")]
    return ReportSection("scores", "All scores", blocks, values)


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


_VECTOR = (
    "briefly on the data to forget and takes the change of its weights as a direction. That direction is subtracted "
    "from the target; a second one, from data to keep, may be added."
)
_HOW = {
    "msa": f"Model State Arithmetic trains the prior {_VECTOR}",
    "task_vector": f"Task Vector trains the target itself {_VECTOR}",
}


def _method(story: Story) -> ReportSection:
    is_msa = story.method == "msa"
    how = _HOW.get(story.method) or f"The method is {story.method}, a baseline."
    settings = "strengths" if story.method in WITH_VECTORS else "settings"
    facts = {"formula": story.formula, settings: in_symbols(story.strengths), **story.names}
    settings_of = story.reports["unlearned"].settings.get("method") if "unlearned" in story.reports else None
    method: Mapping[str, Any] = settings_of if isinstance(settings_of, Mapping) else {}
    hold = method.get("hold")
    facts |= {"hold of the forget vector's fit": f"h = {hold:g}" if isinstance(hold, float) else ""}
    facts |= {"choice of the prior": story.provenance.reason or "", "paper": PAPER if is_msa else ""}
    blocks: list[Block] = [Prose(how), Entries({name: text for name, text in facts.items() if text})]
    if is_msa:
        later = " · θ_12 the same, then trained on the forget set" if "θ_12" in story.formula else ""
        blocks.append(
            Prose(
                "θ_u unlearned model · θ_D target · θ_0 prior · θ_1 prior trained on the forget set · θ_2 prior "
                f"trained on rows of the retain set{later} · α strength of forgetting · β strength of keeping",
                small=True,
            )
        )
    values = {key: json_form(getattr(story, key)) for key in ("method", "formula", "strengths", "earlier", "names")}
    return ReportSection("method", "How it was done", blocks, values)


def _choice(story: Story) -> ReportSection:
    choice, settings = story.choice, "strengths" if story.method in WITH_VECTORS else "settings"
    title = f"How the {settings} were chosen"
    if choice is None:
        return ReportSection("choice", title, (), {"choice": None})
    points = points_table(choice)
    table: Block = Grid(points, "Candidates", "many")
    count = len(choice.candidates)
    written = []
    if (gap := story.written_gap) is not None:
        same = f"within {gap:.2g} of it on every metric" if gap else "the same"
        written = [Prose(f"The chosen point was tried in memory; the model as it is written scores {same}.")]
    blocks: list[Block] = [
        Prose(_how_chosen(choice)),
        Pictures({"The score of each candidate": lambda: sweep_chart(choice)}),
        Prose(points.title),
        Fold(f"All {count} candidates", [table]) if count > _MOST_POINTS else table,
        *written,
        *(Prose(f"Doubt: {doubt}.") for doubt in choice.doubts),
    ]
    entries = [
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
    return ReportSection("choice", title, blocks, {"choice": {**facts, "points": entries, "written_gap": gap}})


def _how_chosen(choice: Choice) -> str:
    """Return how the candidates were compared."""
    count = len(choice.candidates)
    text = f"{count} candidate{'s were' if count != 1 else ' was'} scored on {choice.split} rows"
    apart = "" if choice.split == WHOLE else " that the scores above do not contain"
    if choice.rule == EXTRACTION:
        text += (
            f": on all rows to forget, and on rows to keep{apart}. Of the candidates that know no more of the rows to "
            "forget than a model that never saw them, and that keep enough, the one that keeps most was taken; if "
            "there is none, the nearest. Its score, “kept”, is what is left of the target's knowledge of the rows to "
            "keep, beyond unseen rows."
        )
    else:
        text += f"{apart}. The one with the best score by the rule “{choice.rule}” was taken."
    return text
