"""Gather what the page shows of a run before any model is loaded: verdict, strengths, points, rows."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from msa_lite.catalogue import ANSWER_KINDS
from msa_lite.errors import MsaError
from msa_lite.io.files.reading import read_objects
from msa_lite.io.files.writing import json_form
from msa_lite.io.finished.seal import check_read
from msa_lite.pipeline.run.folder import RunFolder
from msa_lite.pipeline.run.report import forget_rows
from msa_lite.pipeline.verbs.ask import MergedPoints, Panel
from msa_lite.report.run.choice import Choice, MetricsByName, Values
from msa_lite.report.run.provenance import PAGE_FILE, RECIPE_FILE
from msa_lite.report.run.rows import ListedRow
from msa_lite.report.run.story import Story, load_story
from msa_lite.report.tables.metrics import METRICS
from msa_lite.report.tables.reports import heading, metric_kind

_MODELS = ("target", "unlearned", "ideal")
_LEAST_RANGE = 2.0  # of a slider: stronger than nearly all choices


def page_facts(panel: Panel) -> dict[str, Any]:
    """Return all that the page of a run shows, ready for JSON. Raise FormatError for broken files of the run."""
    run = panel.run
    story = load_story(run.folder)
    return {
        "name": run.folder.resolve().name,
        "outcome": story.outcome,
        "sentence": story.sentence,
        "models": [{"name": name, "missing": panel.missing.get(name)} for name in _model_names(panel)],
        "continues": panel.continues,
        "prompt": "" if panel.continues else panel.prompter.sentence,
        "tokens": run.recipe.max_new_tokens,
        "strengths": _strengths(panel.points, story.choice) | {"command": _command(run)} if panel.points else None,
        "fixed": panel.fixed,
        "chart": story.choice and _chart(story.choice),
        "has_report": (run.folder / PAGE_FILE).is_file(),
        "attacks": story.attacks.headline() if story.attacks else None,
        **_rows(run, story),
    }


def _model_names(panel: Panel) -> list[str]:
    return [name for name in _MODELS if name in panel.names or name in panel.missing]


def _strengths(points: MergedPoints, choice: Choice | None) -> dict[str, Any]:
    """Return the strengths of the run, and the ranges of the sliders: twice the run's, or all that the choice tried."""
    tried = [candidate.values for candidate in choice.candidates] if choice else []

    def highest(name: str, chosen: float) -> float:
        return max(_LEAST_RANGE, 2 * chosen, *(float(values.get(name, 0.0)) for values in tried))

    return {
        "chosen": points.chosen.values,
        "most": {"alpha": highest("alpha", points.chosen.alpha), "beta": highest("beta", points.chosen.beta)},
        "filters": list(points.filters),
        "has_retain": points.has_retain,
    }


def _command(run: RunFolder) -> dict[str, str]:
    """Return the command that writes a point, from the vectors that are there: its start, and the keys of strengths."""
    hold = f"vector.hold={run.recipe.hold}"  # auto changes with the strengths, and another hold needs another fit
    start = ["msa-lite", str(run.folder / RECIPE_FILE), f"output={run.folder}", hold]
    keys = {"alpha": "forget.alpha", **({"beta": "retain.beta"} if run.recipe.retain else {}), "filter": "merge.filter"}
    return {"start": shlex.join(start), **keys}


def _chart(choice: Choice) -> dict[str, Any] | None:
    """Return the places of target, ideal and candidates: what each shows of the forget set and of the retain set."""
    known = {name for c in choice.candidates for name, metric in c.metrics.items() if metric.value is not None}
    pairs = ((kind.name, kind.partner) for kind in METRICS.values() if kind.partner)
    pair = next((pair for pair in pairs if known >= {*pair}), None)
    if pair is None:
        return None
    marks: list[tuple[str, MetricsByName, Values | None]] = [("target", choice.target, None)]
    marks += [("ideal", choice.ideal or {}, None)]
    marks += [("chosen" if choice.is_chosen(c) else "candidate", c.metrics, c.values) for c in choice.candidates]
    spots = []
    for role, metrics, values in marks:
        x, y = (metrics[name].value if name in metrics else None for name in pair)
        if x is not None and y is not None:
            spots.append({"role": role, "x": x, "y": y, "values": values and dict(values)})
    return {"axes": [heading(name, metric_kind(name).higher_is_better) for name in pair], "spots": spots}


def _rows(run: RunFolder, story: Story) -> dict[str, Any]:
    """Return the rows to forget with the answers of all models, failures first; or the reason why there are none."""
    try:
        listed = forget_rows(run.folder)
    except MsaError as error:
        return {"rows": [], "no_rows": str(error)}
    kinds = _answer_kinds(run, story)
    return {
        "rows": [_row(row, kinds.get(row.index)) for row in listed.rows],
        "failed": listed.counted,
        "headline": listed.headline,
        "remarks": listed.remarks,
        "kinds": {name: entry.label for name, entry in ANSWER_KINDS.items()} if kinds else {},
    }


def _row(row: ListedRow, kind: str | None) -> dict[str, Any]:
    return {**json_form(row), "kind": kind}


def _answer_kinds(run: RunFolder, story: Story) -> Mapping[int, str]:
    """Return what the unlearned model says on each row, where the run has collected that."""
    if not any(finding.kind == "says" for finding in story.evidence):
        return {}
    path = run.folder / "evidence" / "says" / "unlearned.jsonl"
    if not path.is_file():
        return {}
    check_read(path)
    return {line["index"]: line["kind"] for line in read_objects(path, "index", "kind")}
