"""Checks before a run fits anything: the target knows the rows to forget, and the prior has not seen them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from msa_lite.errors import MismatchError, allowed_by
from msa_lite.evals.benchmarks.benchmark import Record
from msa_lite.evals.engine.prompt_search import better_prompt
from msa_lite.evals.scores.records import read_records
from msa_lite.evals.verdict.knowledge import Fault, find_fault, known, weak_sets
from msa_lite.io.console.progress import Progress
from msa_lite.pipeline.prepare.run import Context, Run
from msa_lite.pipeline.run.probe import cheap_probe
from msa_lite.pipeline.run.scores import asked, score_model, score_stage, scores_folder
from msa_lite.pipeline.stages.stage import Stage
from msa_lite.report.run.rows import SideBySide, examples_text

logger = logging.getLogger(__name__)


SHOWN = 2  # rows with the target's answers in a message
_CAUSES = "Wrong rows? Wrong model, or target and prior exchanged? Was it trained on them too little to recite any?"
GO_ON = "`verdict: off` in the recipe makes this a warning, and so does --accept for a whole run"


def check_stages(context: Context, accept: bool = False, probe: bool = False) -> list[Stage]:
    """Return what is looked at before anything is fitted; nothing where the target itself is tuned.

    First the check: target and prior are asked the forget rows, at most 64 of them. Only if these leave it open whether
    the run is refused, the target is asked as many retain and holdout rows. Then, where the user's own rows decide the
    choice, all models are scored on the validation rows, so that each is loaded once. All scores stay: a rerun, and the
    later stages of the run, take them up.

    probe: with the run's own short probe of its prior. accept: warn where the stages would raise MismatchError: if the
    target does not know the rows to forget, or the prior knows them already.
    """
    if context.scope.start != "prior":
        return []
    checks = []
    for name in ("target", "prior", *(["others"] if _has_others(context) else [])):
        stage = score_stage(context, name, "check")
        checks.append(replace(stage, run=partial(_check, context, name, accept)))
    ideal = ["ideal"] if context.has_ideal else []
    needs = {"target": [f"validation: {name}" for name in ideal]}
    scored = [*ideal, "prior", "target"] if context.chooses_by_rows else []
    validation = [score_stage(context, name, "validation", needs.get(name, ())) for name in scored]
    return [*checks, *(cheap_probe(context) if probe else []), *validation]


def _has_others(context: Context) -> bool:
    """Check whether there are retain or holdout rows to ask the target about."""
    if context.prepared:
        return bool(asked(context.run, "others", "check").sets)
    evaluate = context.recipe.evaluate
    return bool(context.recipe.retain or (evaluate and (evaluate.retain or evaluate.holdout)))


def _check(context: Context, name: str, accept: bool, progress: Progress) -> None:
    """Ask one part; with the last that is needed, refuse the run or warn. Raise MismatchError where it refuses."""
    run = context.run
    score_model(run, name, "check", progress)
    if name == "target":
        return
    target, prior = (_records(run, model)["forget"] for model in ("target", "prior"))
    rest = _records(run, "others") if name == "others" else {}
    is_strict = not accept and run.recipe.verdict
    others = rest.get("retain", ()), rest.get("holdout", ())
    fault = find_fault(target, prior, *others)
    if name == "prior" and _has_others(context) and not (is_strict and fault and fault.kind == "unknown"):
        return  # other rows can refute what is "seen"
    if fault is None:
        for note in weak_sets(target, prior, *others):
            logger.warning("%s", note)
        return
    message = _message(run, fault, target)
    if is_strict:
        kept = f"nothing was fitted; the scores stay in {run.folder / 'evaluation'}, and a rerun takes them up"
        raise allowed_by(MismatchError(f"{message}\n{GO_ON}\n{kept}"), "--accept")
    logger.warning("%s", message)


def _records(run: Run, name: str) -> dict[str, list[Record]]:
    """Return the records of a part by set."""
    return {path.stem: read_records(path) for path in scores_folder(run, name, "check").glob("*.jsonl")}


def _message(run: Run, fault: Fault, forget: Sequence[Record]) -> str:
    target, prior = run.sources["target"].name, run.sources["prior"].name
    advice = "are these the rows that it was trained on? If so, is the prompt that of the training?"
    headline = f"the target {target} does not know the rows to forget"
    if fault.kind == "unknown":
        advice = _prompt_advice(run)
    elif fault.kind == "seen":
        headline = f"the prior {prior} has already seen the rows to forget, so their vector would miss them"
        advice = "take an earlier checkpoint as the prior, from before they came in (`msa-lite probe` compares some)"
    lines = [f"{headline}: {fault.reason}", f"  ({fault.figures})", f"  {advice}"]
    if fault.kind != "seen" and (examples := _worst(forget)):
        lines += ["", *(f"  {line}".rstrip() for line in examples_text(examples).splitlines()), ""]
    return "\n".join(lines)


def _prompt_advice(run: Run) -> str:
    """Name the one of a few plausible prompts that lets the target answer, or else the possible causes."""
    questions = [row for row in run.rows["forget"] if not row.text]
    if not questions:  # texts have no prompt
        return _CAUSES
    if better := better_prompt(run.sources["target"], questions, run.prompter, run.recipe.seed):
        return f"wrong prompt: {better}"
    return f"Wrong prompt? Ask as the rows were asked in training (`prompt:` in the recipe). {_CAUSES}"


def _worst(forget: Sequence[Record]) -> list[SideBySide]:
    """Return the questions that the target knows least about."""
    answered = [record for record in forget if record.get("generated") is not None]
    worst = sorted(answered, key=known)[:SHOWN]
    return [SideBySide("question", r["question"], r["answer"], {"target": r["generated"]}) for r in worst]
