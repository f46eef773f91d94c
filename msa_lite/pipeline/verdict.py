"""The verdict on a run, from the records of all rows that its models were scored on: validation and test part."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from msa_lite.data import Row
from msa_lite.evals.benchmark import Record, Records
from msa_lite.evals.examples import pick_examples
from msa_lite.evals.records import read_records
from msa_lite.io.progress import Progress
from msa_lite.io.seal import load_manifest
from msa_lite.pipeline.knowledge import KNOWLEDGE_FOLDER
from msa_lite.pipeline.prepare import Run
from msa_lite.pipeline.stages import evaluate_prior, evaluations_beside
from msa_lite.recipe import Recipe
from msa_lite.report.examples import SideBySide
from msa_lite.report.verdict import Margins, Verdict, make_verdict, write_verdict
from msa_lite.strengths import Strengths

NOTHING_SCORED = "nothing was scored (evaluate: null)"
_NEAR = 0.8  # of the way from the prior's loss to the target's; a fit that ends before is doubted


@dataclass(frozen=True)
class Findings:
    """The outcome of a run's scores."""

    verdict: Verdict | str
    """The verdict, or the reason why there is none."""
    examples: Sequence[SideBySide]
    """Some questions with the models' answers."""


def judge_run(run: Run, learnt: Iterable[Row], progress: Progress) -> Findings:
    """Return the verdict on a scored run and ten questions side by side; write verdict.json into its folder.

    learnt: the rows to keep that the model learnt. They are kept better than others, so others alone count where there
    are any. Without an ideal, the prior is scored on the forget rows, too: it shows what a model knows that never saw
    them.
    """
    findings = _judge(run, learnt, progress)
    write_verdict(findings.verdict, run.folder)
    return findings


def _judge(run: Run, learnt: Iterable[Row], progress: Progress) -> Findings:
    if run.test is None:
        return Findings(NOTHING_SCORED if run.recipe.evaluate is None else "there are no rows to score", [])
    if "ideal" not in run.sources:
        evaluate_prior(run, "validation", progress)
        evaluate_prior(run, "test", progress)
    parts = _parts(run)
    scored = scored_records(run.folder, parts)
    prior = _prior(run, parts)
    models, fitted = _without_learnt(scored | ({"prior": prior} if prior else {}), learnt)
    weighed = run.test.weigh(models)
    examples = pick_examples(type(run.test), scored, run.recipe.seed)
    if isinstance(weighed, str):
        return Findings(weighed, examples)
    forgotten, kept = weighed
    kept = replace(kept, fitted=True) if kept and fitted else kept
    return Findings(make_verdict(forgotten, kept, _doubts_of_fits(run), margins_of(run.recipe)), examples)


def margins_of(recipe: Recipe) -> Margins:
    """Return the margins of a recipe's verdict."""
    return Margins(**recipe.margins.model_dump())


def learnt_rows(run: Run, strengths: Strengths) -> Sequence[Row]:
    """Return the rows to keep that the merged model learnt; none where the retain vector has no part in it."""
    return run.rows.get("retain", ()) if strengths.beta else ()


def _without_learnt(
    models: Mapping[str, Records], learnt: Iterable[Row]
) -> tuple[dict[str, dict[str, Sequence[Record]]], bool]:
    """Return the records without the retain rows that were learnt, and whether all of them were; then all stay."""
    known = {_content(row.question, row.text, row.earlier) for row in learnt}
    kept = {name: {**records, "retain": _unlearnt(records["retain"], known)} if "retain" in records else {**records}
            for name, records in models.items()}  # fmt: skip
    fitted = bool(models["target"].get("retain")) and not kept["target"]["retain"]
    return ({name: {**records} for name, records in models.items()} if fitted else kept), fitted


def _unlearnt(records: Sequence[Record], known: set[str]) -> list[Record]:
    return [r for r in records if _content(r.get("question"), r.get("text"), r.get("earlier") or ()) not in known]


def _content(question: str | None, text: str | None, earlier: Iterable[Sequence[str]]) -> str:
    """Return what tells rows apart: the text, or the question with the turns before it."""
    return text or json.dumps([question, *map(list, earlier)])


def _parts(run: Run) -> list[str]:
    """Return the endings of the evaluation folders to read: of both parts if they are of the same benchmark."""
    folder = run.folder / "evaluation"
    both = run.validation is not None and run.test is not None and run.validation.name == run.test.name
    whole = all((folder / f"{name}_validation").is_dir() for name in ("target", "unlearned"))
    return ["_validation", ""] if both and whole else [""]


def scored_records(run: Path, parts: Sequence[str]) -> dict[str, dict[str, list[Record]]]:
    """Return the records by set of target, unlearned model and ideal, each row once.

    run: a run's folder. parts: the endings of the evaluation folders to read. Models that were not scored on all parts
    are left out.
    """
    scored = {}
    for name in ("target", "unlearned", "ideal"):
        folders = [run / "evaluation" / f"{name}{part}" for part in parts]
        if all(folder.is_dir() for folder in folders) and (records := _merged(folders)):
            scored[name] = records
    return scored


def _prior(run: Run, parts: Sequence[str]) -> dict[str, list[Record]]:
    """Return the prior's records: of these parts, of the recipe's other runs, or of the check before the fits."""
    names = [f"prior{part}" for part in parts]
    own = [run.folder / "evaluation" / name for name in names]
    beside = [folder for name in names for folder in evaluations_beside(run, name)]
    checked = [run.folder / "evaluation" / KNOWLEDGE_FOLDER / "prior"]
    return next((records for folders in (own, beside, checked) if (records := _merged(folders))), {})


def _merged(folders: Sequence[Path]) -> dict[str, list[Record]]:
    sets: dict[str, dict[int, Record]] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.jsonl")):
            sets.setdefault(path.stem, {}).update({record["index"]: record for record in read_records(path)})
    return {name: [records[index] for index in sorted(records)] for name, records in sets.items()}


def _doubts_of_fits(run: Run) -> list[str]:
    """Return a line for each fit whose loss did not come near the target's, by the vectors' manifests."""
    doubts = []
    for name in run.vector_names if run.plan.start == "prior" else ():
        loss = (load_manifest(run.vector_folder(name)) or {}).get("fit", {}).get("loss", {})
        start, goal, tuned = (loss.get(key) for key in ("prior", "target", "tuned"))
        if start is None or goal is None or tuned is None or start <= goal:
            continue
        if (closed := (start - tuned) / (start - goal)) < _NEAR:
            doubts.append(
                f"the fit of the {name} vector got {max(0.0, closed):.0%} of the way to what the target knows: its "
                f"loss fell from {start:.3g} to {tuned:.3g}, and the target's is {goal:.3g}"
            )
    return doubts
