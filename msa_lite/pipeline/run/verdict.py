"""The verdict on a run, from the records of all rows that its models were scored on; the card tells it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msa_lite.catalogue import BENCHMARKS
from msa_lite.choose.choice import Values
from msa_lite.data import Row
from msa_lite.errors import FormatError
from msa_lite.evals.benchmarks.benchmark import Record, Records, data_home
from msa_lite.evals.scores.records import pick_examples, read_records
from msa_lite.evals.verdict.outcome import is_recited, weigh_recited, yardstick_of_rows
from msa_lite.io.files.reading import read_text
from msa_lite.io.files.writing import write_text
from msa_lite.io.finished.seal import CARD_FILE, add_files, describe_file, load_manifest
from msa_lite.merger import Merged, MergedAdapter
from msa_lite.pipeline.prepare.run import Context, Run
from msa_lite.pipeline.run.scores import merged_records, row_content, scored_records, scores_folder
from msa_lite.recipe import Recipe
from msa_lite.report.page.card import model_card, read_target_card, side_of
from msa_lite.report.run.rows import SideBySide
from msa_lite.report.run.story import Story
from msa_lite.report.run.update import load_fits
from msa_lite.report.verdict.figures import EARLIER_SET, EarlierFacts
from msa_lite.report.verdict.verdict import NoVerdict, Verdict, make_verdict, write_verdict

logger = logging.getLogger(__name__)


NOTHING_SCORED = "nothing was scored (evaluate: null)"
_NEAR = 0.8  # of the way from the prior's loss to the target's; a fit that ends before is doubted


@dataclass(frozen=True)
class Findings:
    """The outcome of a run's scores."""

    verdict: Verdict | NoVerdict
    """The verdict, or the reason why there is none."""
    examples: Sequence[SideBySide]
    """Some questions with the models' answers."""


def judge_run(run: Run, learnt: Iterable[Row]) -> Findings:
    """Return the verdict on a scored run and ten questions side by side; write verdict.json into its folder.

    learnt: the rows to keep that the model learnt. They are kept better than others, so others alone count where there
    are any.
    """
    findings = _judge(run, learnt, weigh_earlier(run))
    write_verdict(findings.verdict, run.folder)
    return findings


def _judge(run: Run, learnt: Iterable[Row], earlier: EarlierFacts | None) -> Findings:
    if run.test is None:
        reason = NOTHING_SCORED if run.recipe.evaluate is None else "there are no rows to score"
        return Findings(NoVerdict(reason, earlier), [])
    endings = _endings(run)
    scored = scored_records(run.folder, endings)
    prior = _prior(run, endings)
    models, fitted = _without_learnt(scored | ({"prior": prior} if prior else {}), learnt)
    weighed = run.test.weigh(models)
    examples = pick_examples(run.test, scored, run.recipe.seed)
    if isinstance(weighed, str):
        return Findings(NoVerdict(weighed, earlier), examples)
    forgotten, kept = weighed
    kept = replace(kept, fitted=True) if kept and fitted else kept
    verdict = make_verdict(forgotten, kept, _doubts_of_fits(run), run.recipe.margins, earlier)
    return Findings(verdict, examples)


def _without_learnt(
    models: Mapping[str, Records], learnt: Iterable[Row]
) -> tuple[dict[str, dict[str, Sequence[Record]]], bool]:
    """Return the records without the retain rows that were learnt, and whether all of them were; then all stay."""
    known = {row_content({"question": r.question, "text": r.text, "earlier": r.earlier}) for r in learnt}
    whole: dict[str, dict[str, Sequence[Record]]] = {name: {**records} for name, records in models.items()}
    others = {
        name: records | {"retain": [record for record in records["retain"] if row_content(record) not in known]}
        for name, records in whole.items()
        if "retain" in records
    }
    fitted = bool(whole["target"].get("retain")) and not others["target"]["retain"]
    return (whole if fitted else whole | others), fitted


def _endings(run: Run) -> list[str]:
    """Return the endings of the evaluation folders to read: of both parts if they are of the same benchmark."""
    folder = run.folder / "evaluation"
    both = run.validation is not None and run.test is not None and run.validation.name == run.test.name
    whole = all((folder / f"{name}_validation").is_dir() for name in ("target", "unlearned"))
    return ["_validation", ""] if both and whole else [""]


def _prior(run: Run, endings: Sequence[str]) -> dict[str, list[Record]]:
    """Return the prior's records: of these parts, or of the check before the fits."""
    folders = [run.folder / "evaluation" / f"prior{ending}" for ending in endings]
    return merged_records(folders) or merged_records([scores_folder(run, "prior", "check")])


def _doubts_of_fits(run: Run) -> list[str]:
    """Return a line for each fit whose loss did not come near the target's."""
    fits = load_fits(run.folder / "vectors", run.recipe.vector_names) if run.scope.start == "prior" else {}
    return [
        f"the fit of the {name} vector got {max(0.0, fit.closed):.0%} of the way to what the target knows: its loss "
        f"fell from {fit.loss['prior']:.3g} to {fit.loss['tuned']:.3g}, and the target's is {fit.loss['target']:.3g}"
        for name, fit in fits.items()
        if fit.closed is not None and fit.closed < _NEAR
    ]


def weigh_earlier(run: Run) -> EarlierFacts | None:
    """Return what became of the rows of earlier requests, with a warning for those that come back; None without any."""
    removed = run.removed
    if removed is None:
        return None
    if removed.questions is None:
        return removed.facts
    asked = {name: _earlier_records(run, name) for name in Context.of(run).earlier_models}
    models: dict[str, dict[str, Sequence[Record]]] = {name: {"forget": records} for name, records in asked.items()}
    if "ideal" not in asked and (holdout := _holdout(run)):
        models["target"]["holdout"] = holdout
    weighed = weigh_recited(models, yardstick_of_rows(models))
    assert not isinstance(weighed, str), "there are rows"
    facts = replace(removed.facts, scored=weighed[0], back=_count_back(removed.owners, asked))
    if facts.warning:
        logger.warning("%s", facts.warning)
    return facts


def _earlier_records(run: Run, name: str) -> list[Record]:
    return read_records(scores_folder(run, name, "earlier") / f"{EARLIER_SET}.jsonl")


def _holdout(run: Run) -> Sequence[Record]:
    """Return the target's records of holdout rows, of the user's own sets."""
    target = scored_records(run.folder, [""]).get("target", {})
    return target.get("holdout", [])


def _count_back(owners: Sequence[Path], asked: Mapping[str, Sequence[Record]]) -> dict[str, int]:
    """Count the rows that come back, by the folder of the run that removed them.

    owners: that folder of each row. asked: the records of each model, in the same order.
    """
    control = asked.get("ideal") or asked.get("prior") or ()
    seen: dict[Path, set[str]] = {}
    back: dict[str, int] = {}
    for place, (owner, record) in enumerate(zip(owners, asked["unlearned"], strict=True)):
        if not is_recited(record) or (control and is_recited(control[place])):
            continue
        if owner not in seen:
            seen[owner] = _forgotten(owner)
        if row_content(record) in seen[owner]:
            name = os.path.abspath(owner)
            back[name] = back.get(name, 0) + 1
    return back


def _forgotten(folder: Path) -> set[str]:
    """Return the rows that the model of an earlier request did not recite, by its records, as far as they are left."""
    asked, recited = set[str](), set[str]()
    for ending in ("", "_validation"):
        records: Records = scored_records(folder, [ending]).get("unlearned", {})
        asked |= {row_content(record) for record in records.get("forget", ())}
        recited |= {row_content(record) for record in records.get("forget", ()) if is_recited(record)}
    return asked - recited


_FIGURES = ("value", "n", "stderr", "higher_is_better")


def complete_card(run: Run, story: Story, merged: Merged | MergedAdapter, chosen: Values) -> None:
    """Put the outcome of a run into the manifest of its model or adapter, and write the card anew.

    A run that ends as before changes no byte. A card that somebody has edited stays as it is. The card is written
    before the manifest: after a kill in between, the next run completes the manifest.
    """
    folder, path = merged.folder, merged.folder / CARD_FILE
    manifest = load_manifest(folder)
    assert manifest is not None, "the merge has just been done, or found whole"
    target_card = manifest.get("target_card") or read_target_card(run.sources["target"].folder)
    outcome = json.loads(json.dumps(_outcome(run, story, manifest, chosen)))
    facts = {"target_card": target_card, "outcome": outcome}
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


def _outcome(run: Run, story: Story, manifest: dict[str, Any], chosen: Values) -> dict[str, Any]:
    """Return the outcome for the manifest: figures and sentences, no row and no path."""
    terms = manifest["terms"]
    sides = ["forget", *(side_of(term) for term in terms)]
    return {
        "sentence": story.sentence,
        "basis": story.basis,
        **({"earlier": story.earlier_rows.headline} if story.earlier_rows else {}),
        "verdict": story.outcome,
        "reasons": list(story.verdict.reasons) if story.verdict else [],
        "method": run.scope.method,
        "chosen": dict(chosen),
        **(_scores(story) | _dataset(run.recipe) if story.reports else {}),
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


def _dataset(recipe: Recipe) -> dict[str, str]:
    """Return the published data set that the scores are of, with its commit; nothing for data from elsewhere."""
    evaluate = recipe.evaluate
    data, home = (evaluate.data, data_home(evaluate.benchmark, evaluate.split)) if evaluate else (None, None)
    return {"dataset": data} if data and data.partition("@")[0] == home else {}


def _sweep(story: Story) -> dict[str, Any] | None:
    """Return how the choice was made."""
    choice = story.choice
    if choice is None:
        return None
    points = [{"values": dict(p.values), "score": p.score, "met": p.met} for p in choice.candidates]
    return {"rule": choice.rule, "split": choice.split, "points": points}


def _fit(story: Story, name: str) -> dict[str, Any]:
    """Return how a vector was fitted."""
    fit = story.fits[name]
    figures = {key: fit.settings.get(key) for key in ("mode", "lora_rank", "learning_rate")}
    return {"rows": fit.rows, "epochs": fit.epochs, **figures}
