"""Checks before a run fits anything: the target knows the rows to forget, and the prior does not."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msa_lite.data import sample_rows
from msa_lite.errors import MismatchError
from msa_lite.evals.benchmark import ItemSet, Record
from msa_lite.evals.evaluation import evaluate_benchmark, evaluation_inputs
from msa_lite.evals.knowledge import Fault, find_fault, known
from msa_lite.evals.prompt_search import better_prompt
from msa_lite.evals.qa import Qa, load_qa
from msa_lite.evals.records import read_records
from msa_lite.io.progress import Progress, silent
from msa_lite.pipeline.prepare import Run
from msa_lite.pipeline.stages import evaluate_prior, evaluate_references, evaluate_target
from msa_lite.record.keyed import KEY_FILE
from msa_lite.report.examples import SideBySide, examples_text
from msa_lite.report.provenance import RECIPE_FILE

logger = logging.getLogger(__name__)

ROWS = 32  # of each set, if there are no validation rows to use
SHOWN = 2  # rows with the target's answers in a message
KNOWLEDGE_FOLDER = "knowledge"
_TRACES = {RECIPE_FILE, KEY_FILE, ".lock", "evaluation", "probe"}
_CAUSES = "Wrong rows? Wrong model, or target and prior exchanged? Was it trained on them too little to recite any?"
GO_ON = "to go on all the same: `msa-lite run --accept`, or `verdict: off` in the recipe"


def check_knowledge(run: Run, accept: bool = False, progress: Progress = silent) -> None:
    """Raise MismatchError if the target does not know the rows to forget, or the prior knows them already.

    accept: warn instead. If the choice is made on the user's own questions, the check uses their scores, which the run
    needs anyway; otherwise it scores at most 32 rows of each set. Baselines on the target alone are not checked: they
    have no prior to compare with.
    """
    if run.plan.start != "prior":
        return
    target, prior = _score(run, progress)
    records = {name: _read(target, name) for name in ("forget", "retain", "holdout")}
    fault = find_fault(records["forget"], _read(prior, "forget"), records["retain"], records["holdout"])
    if fault is None:
        return
    message = _message(run, fault, records["forget"])
    if not (accept or not run.recipe.verdict):
        _remove_traces(run.folder)
        raise MismatchError(f"{message}\n{GO_ON}")
    logger.warning("%s", message)


def _remove_traces(folder: Path) -> None:
    """Remove a run's folder if it holds nothing but what these checks have left."""
    if {path.name for path in folder.iterdir()} <= _TRACES:
        shutil.rmtree(folder)


def checks_validation(run: Run) -> bool:
    """Return True if the check uses the validation rows: they are the user's own questions or texts."""
    return isinstance(run.validation, Qa) and "forget" in run.validation.sets


def _score(run: Run, progress: Progress) -> tuple[Path, Path]:
    """Score target and prior, and return the folders with their records."""
    if checks_validation(run):
        evaluate_references(run, progress)  # first, since the target's report needs the ideal's
        target, prior = evaluate_target(run, progress), evaluate_prior(run, "validation", progress)
        assert prior is not None, "the run starts from the prior"
        return target, prior
    questions = _sampled(run)
    folders = []
    for name in ("target", "prior"):
        folder = run.folder / "evaluation" / KNOWLEDGE_FOLDER / name
        part = questions if name == "target" else questions.only({"forget"})
        evaluate_benchmark(run.sources[name], part, folder, label=f"check: {name}", progress=progress)
        folders.append(folder)
    return folders[0], folders[1]


def check_inputs(run: Run, name: str) -> dict[str, Any]:
    """Return all that decides the scores of target or prior in this check, as their manifest records it."""
    questions = _sampled(run)
    return evaluation_inputs(run.sources[name], questions if name == "target" else questions.only({"forget"}))


def _sampled(run: Run) -> Qa:
    """Return a few rows of each set: of the rows that are scored, or else of those that the vectors learn."""
    seed = run.recipe.seed
    if isinstance(run.test, Qa) and "forget" in run.test.sets:
        sets = {name: _few(part, seed) for name, part in run.test.sets.items()}
        return replace(run.test, sets=sets, split="check")
    rows = {name: sample_rows(run.rows[name], ROWS, seed) for name in ("forget", "retain") if name in run.rows}
    most = run.recipe.evaluate.max_new_tokens if run.recipe.evaluate else 200
    return load_qa(rows, run.prompter, most, "check")


def _few(part: ItemSet, seed: int) -> ItemSet:
    return replace(part, items=sample_rows(part.items, ROWS, seed))


def _read(folder: Path, name: str) -> list[Record]:
    path = folder / f"{name}.jsonl"
    return read_records(path) if path.is_file() else []


def _message(run: Run, fault: Fault, forget: Sequence[Record]) -> str:
    target, prior = run.sources["target"].name, run.sources["prior"].name
    headlines = {
        "unknown": f"the target {target} does not know the rows to forget: it does no better on them than the prior",
        "other rows": f"the target {target} does not know the rows to forget: it scores as on rows never trained on",
        "seen": f"the prior {prior} has already seen the rows to forget, so their vector would miss them",
    }
    advice = {
        "unknown": _prompt_advice(run) if fault.kind == "unknown" else "",
        "other rows": "are these the rows that it was trained on? If so, is the prompt that of the training?",
        "seen": "take an earlier checkpoint as the prior, from before they came in (`msa-lite probe` compares some)",
    }
    lines = [f"{headlines[fault.kind]} ({fault.figures})", f"  {advice[fault.kind]}"]
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
