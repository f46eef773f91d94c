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
from msa_lite.report.run.choice import load_tradeoff
from msa_lite.report.run.provenance import PAGE_FILE, RECIPE_FILE
from msa_lite.report.run.story import Story, load_story


def page_facts(panel: Panel) -> dict[str, Any]:
    """Return all that the page of a run shows, ready for JSON. Raise FormatError for broken files of the run."""
    run = panel.run
    story, models = load_story(run.folder), ("target", "unlearned", "ideal")
    return {
        "view": "ask",
        "name": run.folder.resolve().name,
        "names": story.names,
        "day": story.provenance.day,
        "outcome": story.outcome,
        "sentence": story.sentence,
        "models": [{"name": n, "missing": panel.missing.get(n)} for n in models if n in {*panel.names, *panel.missing}],
        "continues": panel.continues,
        "prompt": "" if panel.continues else panel.prompter.sentence,
        "tokens": run.recipe.max_new_tokens,
        "takes_system": not panel.continues and panel.prompter.takes_system,
        "strengths": panel.points and _strengths(panel.points),
        "fixed": panel.fixed,
        "chart": load_tradeoff(run.folder / "sweep", story.choice.values) if story.choice else None,
        "has_report": (run.folder / PAGE_FILE).is_file(),
        "attacks": story.attacks.headline() if story.attacks else None,
        **_rows(run, story),
    }


def _strengths(points: MergedPoints) -> dict[str, Any]:
    """Return the strengths of the run, and which others there can be."""
    others = {"filters": list(points.filters), "has_retain": points.has_retain}
    return {"chosen": points.chosen.values, "command": _command(points.run), **others}


def _command(run: RunFolder) -> dict[str, str]:
    """Return the command that writes a point, from the vectors that are there: its start, and the keys of strengths."""
    hold = f"vector.hold={run.recipe.hold}"  # auto changes with the strengths, and another hold needs another fit
    start = ["msa-lite", str(run.folder / RECIPE_FILE), f"output={run.folder}", hold]
    keys = {"alpha": "forget.alpha", **({"beta": "retain.beta"} if run.recipe.retain else {}), "filter": "merge.filter"}
    return {"start": shlex.join(start), **keys}


def _rows(run: RunFolder, story: Story) -> dict[str, Any]:
    """Return the rows to forget with the answers of all models, failures first; or the reason why there are none."""
    try:
        listed, kinds = forget_rows(run.folder), _answer_kinds(run, story)
    except MsaError as error:
        return {"rows": [], "no_rows": str(error)}
    return {
        "rows": [
            *({**json_form(row), "set": "forget", "kind": kinds.get(row.index)} for row in listed.rows),
            *({**json_form(row), "set": name} for name in ("retain", "holdout") for row in getattr(listed, name)),
        ],
        "failed": listed.counted,
        "headline": " ".join([listed.headline, *listed.remarks]),
        "kinds": {name: entry.label for name, entry in ANSWER_KINDS.items()} if kinds else {},
    }


def _answer_kinds(run: RunFolder, story: Story) -> Mapping[int, str]:
    """Return what the unlearned model says on each row, where the run has collected that."""
    if not any(finding.kind == "says" for finding in story.evidence):
        return {}
    check_read(path := run.folder / "evidence" / "says" / "unlearned.jsonl")
    return {line["index"]: line["kind"] for line in read_objects(path, "index", "kind")}
