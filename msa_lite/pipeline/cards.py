"""Complete the card of a run's model or adapter when the run has scored it: the outcome into manifest and README.md."""

from __future__ import annotations

import json
import logging
from typing import Any

from msa_lite.benchmarks import BENCHMARKS
from msa_lite.choose.candidates import Values
from msa_lite.errors import FormatError
from msa_lite.io.files import write_text
from msa_lite.io.reading import read_text
from msa_lite.io.seal import CARD_FILE, add_files, describe_file, load_manifest
from msa_lite.merger import Merged, MergedAdapter
from msa_lite.pipeline.prepare import Run
from msa_lite.report.card import model_card, side_of, terms_of
from msa_lite.report.front_matter import read_target_card
from msa_lite.report.sentence import basis_of
from msa_lite.report.story import Story, load_story

logger = logging.getLogger(__name__)

_FIGURES = ("value", "n", "stderr", "higher_is_better")


def complete_card(run: Run, merged: Merged | MergedAdapter, chosen: Values) -> None:
    """Put the outcome of a run into the manifest of its model or adapter, and write the card anew.

    A run that ends as before changes no byte. A card that somebody has edited stays as it is. The card is written
    before the manifest: after a kill in between, the next run completes the manifest.
    """
    folder, path = merged.folder, merged.folder / CARD_FILE
    manifest = load_manifest(folder)
    assert manifest is not None, "the merge has just been done, or found whole"
    theirs = manifest.get("target_card") or read_target_card(run.sources["target"].folder)
    outcome = json.loads(json.dumps(_outcome(run, manifest, chosen)))
    facts = {"target_card": theirs, "outcome": outcome}
    card, known = model_card({**manifest, **facts}), manifest["files"].get(CARD_FILE)
    present = _read(path) if path.exists() else None
    names = [CARD_FILE]
    if present not in (None, card) and (known is None or describe_file(path) != known):
        logger.warning("%s: somebody has edited it, so it stays as it is; without it, a rerun writes a new one", path)
        names = []
    elif present != card:
        write_text(path, card)
    if facts.items() <= manifest.items() and (not names or known == describe_file(path)):
        return
    add_files(folder, names, facts)


def _read(path: Any) -> str:
    """Return a card's text; nothing for what is no text, which cannot be ours."""
    try:
        return read_text(path)
    except FormatError:
        return ""


def _outcome(run: Run, manifest: dict[str, Any], chosen: Values) -> dict[str, Any]:
    """Return the outcome for the manifest: figures and sentences, no row and no path."""
    story = load_story(run.folder)
    verdict, terms = story.verdict or {}, terms_of(manifest)
    sides = ["forget", *(side_of(term) for term in terms)]
    return {
        "sentence": story.sentence,
        "basis": basis_of(story.verdict, story.reports),
        "verdict": story.outcome,
        "reasons": verdict.get("reasons", []),
        "method": run.plan.method,
        "chosen": dict(chosen),
        **(_scores(story) if story.reports else {}),
        "sweep": _sweep(story),
        "rows": {name: len(rows) for name, rows in run.rows.items() if name in sides},
        "fits": {name: _fit(story, name) for name in dict.fromkeys(sides) if name in story.fits},
    }


def _scores(story: Story) -> dict[str, Any]:
    """Return the scores of all models on the test rows, and the names of the metrics that matter most."""
    metrics: dict[str, dict[str, Any]] = {}
    for model, report in story.reports.items():
        for name, metric in report.metrics.items():
            metrics.setdefault(name, {})[model] = {key: getattr(metric, key) for key in _FIGURES}
    entry = BENCHMARKS.get(story.benchmark or "")
    main = dict.fromkeys([*story.main_metrics, *(entry.columns if entry else ())])
    return {
        "benchmark": story.benchmark,
        "split": story.split,
        "main": [name for name in main if name in metrics],
        "metrics": metrics,
    }


def _sweep(story: Story) -> dict[str, Any] | None:
    """Return how the choice was made."""
    choice = story.choosing
    if choice is None:
        return None
    points = [{"values": dict(p.values), "score": p.score, "met": p.met} for p in choice.points]
    return {"rule": choice.rule, "split": choice.part, "points": points}


def _fit(story: Story, name: str) -> dict[str, Any]:
    """Return how a vector was fitted."""
    fit = story.fits[name]
    figures = {key: fit.settings.get(key) for key in ("mode", "lora_rank", "learning_rate")}
    return {"rows": fit.rows, "epochs": fit.epochs, **figures}
