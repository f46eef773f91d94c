"""Write report.json and report.md: the story of a run for machines, and for people who read it in a repository."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from msa_lite.io.files.writing import json_form
from msa_lite.report.attack_tables import ATTACK_HEADINGS, GAIN_MEANING, TRIAL_HEADINGS, attack_rows, trial_rows
from msa_lite.report.attacks import AttackFacts
from msa_lite.report.choice import Choice, in_symbols, points_markdown, value_text
from msa_lite.report.formats import Cell, Section, TextTable, escape_markdown, markdown
from msa_lite.report.metrics import metric_kind
from msa_lite.report.probing import ProbeFacts
from msa_lite.report.provenance import Provenance
from msa_lite.report.reports import RUN_REPORT, Metric, Report, heading, markdown_table, metric_cell, number
from msa_lite.report.rows import examples_markdown, rows_markdown
from msa_lite.report.sentence import percent
from msa_lite.report.story import Story, VectorPair
from msa_lite.report.update import FORECAST_MEANING, Fit, GroupUpdate, Update, forecast_table
from msa_lite.report.verdict import verdict_lines


def run_json(story: Story) -> dict[str, Any]:
    """Return the JSON-able form of a story; docs/reference/report.md tells its keys."""
    return {
        "kind": RUN_REPORT,
        "sentence": story.sentence,
        "basis": story.basis,
        "outcome": story.outcome,
        "verdict": story.verdict,
        "method": story.method,
        "formula": story.formula,
        "strengths": dict(story.strengths),
        "earlier": {run: dict(strengths) for run, strengths in story.earlier.items()},
        "names": dict(story.names),
        "benchmark": story.benchmark,
        "split": story.split,
        "rows": dict(story.rows),
        "main_metrics": list(story.main_metrics),
        "metrics": _metrics(story.reports),
        "validation": _metrics(story.validation),
        "choice": _choice_values(story.choice, story.written_gap) if story.choice else None,
        "fits": {name: _fit(fit) for name, fit in story.fits.items()},
        "update": _update_values(story.update) if story.update else None,
        "probe": asdict(story.probe) if story.probe else None,
        "attacks": asdict(story.attacks) if story.attacks else None,
        "interference": [asdict(pair) for pair in story.interference],
        "examples": json_form(story.examples),
        "forget_rows": json_form(story.forget_rows),
        "provenance": _without(_without(asdict(story.provenance), "values"), "given"),
        "warnings": list(story.warnings),
        "limits": list(story.limits),
        "missing": list(story.missing),
    }


def _metrics(reports: Mapping[str, Report]) -> dict[str, Any]:
    """Return each metric with what it means, and its value for each model."""
    metrics: dict[str, Any] = {}
    for model, report in reports.items():
        for name, metric in report.metrics.items():
            kind = metric_kind(name)
            about = {"label": kind.label, "set": kind.group, "meaning": kind.formula or None}
            entry = metrics.setdefault(name, {**about, "higher_is_better": metric.higher_is_better, "models": {}})
            entry["models"][model] = _value(metric)
    return metrics


def _value(metric: Metric) -> dict[str, Any]:
    return _without(asdict(metric), "higher_is_better")


def _choice_values(choice: Choice, gap: float | None) -> dict[str, Any]:
    points = [
        {
            "values": dict(candidate.values),
            "score": candidate.score,
            "met": candidate.met,
            "note": candidate.note,
            "chosen": choice.is_chosen(candidate),
            "metrics": {name: _value(metric) for name, metric in candidate.metrics.items()},
        }
        for candidate in choice.candidates
    ]
    facts = {"rule": choice.rule, "part": choice.split, "chosen": dict(choice.values), "doubts": list(choice.doubts)}
    return {**facts, "points": points, "written_gap": gap}


def _fit(fit: Fit) -> dict[str, Any]:
    return {**asdict(fit), "closed": fit.closed}


def _update_values(update: Update) -> dict[str, Any]:
    return {
        "form": update.form,
        "figures": dict(update.figures),
        "notes": list(update.notes),
        "forecast": {form: dict(figures) for form, figures in update.forecast.items()},
        "layers": _groups(update.by_layer()),
        "kinds": _groups(update.by_kind()),
        "tensors": [asdict(tensor) for tensor in update.tensors],
    }


def _groups(groups: tuple[GroupUpdate, ...]) -> list[dict[str, Any]]:
    return [asdict(group) for group in groups]


def _without(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}


_MODELS = {"target": "before (target)", "unlearned": "unlearned", "ideal": "never met it (ideal)"}
_SETTINGS = ("mode", "lora_rank", "epochs", "learning_rate", "batch_size")


def run_markdown(story: Story) -> str:
    """Return report.md. Its first line is the story's sentence; after the table below it, everything else follows."""
    verdict = verdict_lines(story.verdict) if story.verdict else []
    parts = [
        f"{story.sentence}\n",
        *_missing(story),
        *verdict[:2],
        *([f"{story.attacks.headline()}\n"] if story.attacks else []),
        *_highlights(story),
        *_work(story),
        *verdict[2:],
        *_scores(story),
        *_choice(story),
        *_fits(story),
        *_update(story.update),
        *_attacks(story.attacks),
        *_probe(story.probe),
        *_interference(story.interference),
        *([examples_markdown(story.examples)] if story.examples else []),
        *([rows_markdown(story.forget_rows)] if story.forget_rows else []),
        "## Limits\n",
        "".join(f"- {limit}\n" for limit in story.limits),
        *_provenance(story.provenance),
    ]
    return "\n".join(part for part in parts if part)


def _missing(story: Story) -> list[str]:
    if not story.missing:
        return []
    return ["This run is not complete:\n", "".join(f"- {line}\n" for line in story.missing)]


def _highlights(story: Story) -> list[str]:
    """Return the table of the few metrics that matter."""
    if not story.reports:
        return []
    reports = {_MODELS[name]: report for name, report in story.reports.items()}
    rows = []
    for name in story.main_metrics:
        metrics = [report.metrics.get(name) for report in reports.values()]
        present = [metric for metric in metrics if metric is not None]
        label = heading(name, present[0].higher_is_better)
        n = max(metric.n for metric in present)
        rows.append([Cell(label), Cell(str(n)), *(metric_cell(metric, n) for metric in metrics)])
    return [f"The scores that matter, on {story.split} rows:\n", _table(["score", "n", *reports], rows)]


def _work(story: Story) -> list[str]:
    """Return what was done, under the title."""
    target, values = story.names.get("target", "–"), in_symbols(story.strengths)
    title = f"Unlearned model of {target}" if story.method == "msa" else f"Baseline {story.method} on {target}"
    prior = f", prior {story.names['prior']}" if "prior" in story.names else ""
    lines = [
        f"# {title}\n",
        f"{story.formula}{prior}. {values}.\n" if values else f"{story.formula}{prior}.\n",
    ]
    if story.earlier:
        runs = [f"{run} ({in_symbols(strengths)})" for run, strengths in story.earlier.items()]
        shared = "A vector that several requests share counts once, with the sum of its strengths."
        lines.append(f"One merge with the vectors of earlier requests: {'; '.join(runs)}. {shared}\n")
    if story.provenance.reason:
        lines.append(f"{story.provenance.reason}\n")
    method = story.reports["unlearned"].settings.get("method") if "unlearned" in story.reports else None
    if isinstance(method, Mapping) and method.get("compat"):
        lines.append(f"It repeats known deviations of: {', '.join(map(str, method['compat']))}.\n")
    if story.basis:
        lines.append(f"{story.basis}\n")
    return [*lines, *(f"Warning: {note}.\n" for note in (story.update.notes if story.update else ()))]


def _scores(story: Story) -> list[str]:
    """Return all metrics with their meanings."""
    if not story.reports:
        return []
    lines = [
        f"## All scores\n\nScores on {story.split} rows, mean ± standard error; ↑ higher, ↓ lower is better.\n",
        markdown_table(story.reports),
    ]
    meanings: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for report in story.reports.values() for name in report.metrics):
        kind = metric_kind(name)
        if kind.formula:
            meanings.setdefault(kind.formula, []).append(kind.label)
    text = "".join(f"- {', '.join(dict.fromkeys(who))}: {escape_markdown(what)}.\n" for what, who in meanings.items())
    return [*lines, f"What they mean:\n\n{text}"] if text else lines


def _choice(story: Story) -> list[str]:
    choice = story.choice
    if choice is None:
        return []
    lines = [f"## The choice\n\nHow the choice was made, on {choice.split} rows:\n", points_markdown(choice)]
    if (gap := story.written_gap) is not None:
        same = f"within {gap:.2g} of it on every metric" if gap else "the same"
        lines.append(f"The chosen point was tried in memory; the model as it is written scores {same}.\n")
    return [*lines, *(f"Doubt: {doubt}.\n" for doubt in choice.doubts)]


def _fits(story: Story) -> list[str]:
    rows = []
    for name, fit in story.fits.items():
        settings = [f"{key} {value_text(fit.settings[key])}" for key in _SETTINGS if key in fit.settings]
        ends = f"{fit.curve[0][1]:.3g} → {fit.curve[-1][1]:.3g}" if fit.curve else "–"
        texts = (name, "–" if fit.rows is None else str(fit.rows), str(fit.steps), f"{fit.epochs:g}", ends)
        rows.append([*map(Cell, texts), Cell(", ".join(settings))])
    if not rows:
        return []
    lines = ["## What was trained\n", _table(["vector", "rows", "steps", "epochs", "loss", "settings"], rows)]
    for name, fit in story.fits.items():
        if fit.closed is not None:
            start, goal, tuned = (fit.loss[key] for key in ("prior", "target", "tuned"))
            lines.append(
                f"{name}: the loss on its rows went from {start:.3g} to {tuned:.3g}; the target's is {goal:.3g}, so "
                f"the fit went {percent(max(0.0, fit.closed))} of the way.\n"
            )
    return lines


def _update(update: Update | None) -> list[str]:
    """Return how the weights changed, and how much of the change the stored numbers hold."""
    if update is None:
        return []
    lines = ["## The change of the weights\n", "".join(f"- {line}\n" for line in _figures(update.form, update.figures))]
    if update.tensors:
        groups = [*update.by_layer(), *update.by_kind()]
        rows = [[Cell(f"layer {one.name}" if one.name.isdigit() else one.name), *_sizes(one)] for one in groups]
        if any(one.relative_size is not None for one in groups):
            lines.append(_table(["part", "tensors", "‖Δ‖", "‖Δ‖ / ‖weights‖"], rows))
    return [*lines, *_forecast(update)]


def _forecast(update: Update) -> list[str]:
    """Return the share of weights that would have another code in a quantised model, in total and by layer."""
    table = forecast_table(update.forecast)
    if table is None:
        return []
    rows = [
        [Cell(f"layer {layer}"), *(Cell("–" if share is None else f"{share:.2%}") for share in shares)]
        for layer, shares in table.layers
    ]
    return [
        "".join(f"- {line}\n" for line in table.lines),
        f"{FORECAST_MEANING}\n",
        _table(["codes that change", *table.forms], rows),
    ]


def _figures(form: str, figures: Mapping[str, Any]) -> Iterable[str]:
    if form == "adapter":
        yield f"one adapter on {figures.get('modules')} modules, rank {figures.get('rank')}"
        if loss := figures.get("truncation_loss"):
            yield f"truncation to that rank lost {loss:.2%} of the update"
        return
    touched = figures.get("weights_touched")
    if not touched:
        yield "the target as it is, no weight changed"
        return
    share = figures["weights_changed"] / touched
    yield f"{share:.2%} of {touched:,} weights in {figures['tensors_touched']} tensors changed"
    if figures.get("relative_size") is not None:
        yield f"the update is {figures['relative_size']:.3g} of the weights' norm"
    cosine = figures.get("update_cosine")
    angle = "" if cosine is None else f" (cosine of stored and wanted update {cosine:.4f})"
    yield f"rounding lost {figures['rounding_loss']:.2%} of it{angle}"
    if figures.get("vector_cosine") is not None:
        yield f"cosine of forget and retain vector: {figures['vector_cosine']:.3f}"


def _sizes(one: GroupUpdate) -> list[Cell]:
    sizes = ("–" if value is None else f"{value:.3g}" for value in (one.norm, one.relative_size))
    return [Cell(str(one.tensors)), *map(Cell, sizes)]


def _attacks(facts: AttackFacts | None) -> list[str]:
    """Return what attacks brought back, attack by attack, with the trials of each."""
    if facts is None:
        return []
    lines = ["## Does it stay forgotten?\n"]
    lines += [f"{facts.headline(name)}\n" for name in facts.models]
    lines.append(f"Comes back: {facts.meaning}. {GAIN_MEANING.capitalize()}.\n")
    lines.append(_table([*ATTACK_HEADINGS], [[*map(Cell, row)] for row in attack_rows(facts)], 3))
    for attack in facts.attacks:
        lines.append(f"{attack.name}: {attack.summary}. Source: {attack.source}.\n")
        lines.append(_table([*TRIAL_HEADINGS], [[*map(Cell, row)] for row in trial_rows(attack)], 2))
        for name, attacked in attack.models.items():
            if attacked.figures:
                figures = ", ".join(f"{key} {value:.3g}" for key, value in attacked.figures.items())
                lines.append(f"{name}: {figures}.\n")
    return [*lines, *(f"Not made: {name}: {reason}.\n" for name, reason in facts.left_out.items())]


def _probe(probe: ProbeFacts | None) -> list[str]:
    if probe is None:
        return []
    counts = " and ".join(f"{count} {name} rows" for name, count in probe.rows.items())
    rows = []
    for model in probe.models:
        for name, metric in model.metrics.items():
            low, high = model.intervals.get(name, (None, None))
            texts = (model.name, metric_kind(name).label, number(metric.value), f"{number(low)} to {number(high)}")
            rows.append([*map(Cell, texts)])
    return [
        "## Has the prior seen the data?\n",
        f"{counts} were compared. ½: forget rows look no better known than the others; 1: all of them do.\n",
        _table(["model", "score", "value", "95 % interval"], rows),
        "".join(f"- {model.name}: {model.explanation}.\n" for model in probe.models),
    ]


def _interference(pairs: Iterable[VectorPair]) -> list[str]:
    rows = [[Cell(f"{p.one}, {p.other}"), Cell(number(p.cosine)), Cell(number(p.overlap))] for p in pairs]
    if not rows:
        return []
    return [
        "## Other requests\n",
        "How alike two vectors are; 0: they do not touch.\n",
        _table(["vectors", "cosine", "overlap"], rows),
    ]


def _provenance(provenance: Provenance) -> list[str]:
    items = {f"{name}": f"{value} ({provenance.revisions.get(name, '–')})" for name, value in provenance.models.items()}
    items |= {f"rows learnt, {name}": value for name, value in provenance.rows.items()}
    items |= {name: f"sha256:{value}" for name, value in provenance.files.items() if name.endswith(".safetensors")}
    items |= {"seed": str(provenance.seed), **provenance.versions}
    lines = "".join(f"- {name}: {escape_markdown(value)}\n" for name, value in items.items())
    return ["## Where it comes from\n", lines, f"```yaml\n{provenance.recipe.replace('```', chr(39) * 3)}```\n"]


def _table(headings: list[str], rows: list[list[Cell]], left: int = 1) -> str:
    return markdown(TextTable(headings, [Section(rows)], left=left))
