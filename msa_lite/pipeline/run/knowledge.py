"""Checks before a run fits anything: the target knows the rows to forget, and the prior has not seen them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msa_lite.data import load_rows, sample_rows
from msa_lite.errors import MismatchError
from msa_lite.evals.benchmark import Benchmark, ItemSet, Record
from msa_lite.evals.evaluation import evaluate_benchmark, evaluation_inputs
from msa_lite.evals.knowledge import Fault, find_fault, known, weak_sets
from msa_lite.evals.probe import Probe, against_own, against_rows, probe_model
from msa_lite.evals.prompt_search import better_prompt
from msa_lite.evals.qa import Qa, load_qa
from msa_lite.evals.records import read_records
from msa_lite.io.console.progress import Progress, silent
from msa_lite.io.files.writing import canonical_json
from msa_lite.io.weights.hub import Source
from msa_lite.pipeline.prepare.run import Run
from msa_lite.pipeline.run.scores import CHECKED, checked_folders, evaluations_beside, validation_folder
from msa_lite.report.probing import read_verdicts
from msa_lite.report.rows import SideBySide, examples_text

logger = logging.getLogger(__name__)


ROWS = 64  # of each set
SHOWN = 2  # rows with the target's answers in a message
KNOWLEDGE_FOLDER = CHECKED
_CAUSES = "Wrong rows? Wrong model, or target and prior exchanged? Was it trained on them too little to recite any?"
GO_ON = "to go on all the same: `msa-lite run --accept`, or `verdict: off` in the recipe"


@dataclass(frozen=True)
class CheckPart:
    """A part of the check: a model that is scored on some rows."""

    label: str
    """Its label as a step."""
    folder: Path
    """The folder of its scores."""
    model: str
    """The model, "target" or "prior"."""
    source: Source
    """The model's folder."""
    questions: Benchmark
    """The rows."""

    @property
    def count(self) -> int:
        """Return the number of rows."""
        return sum(len(part.items) for part in self.questions.sets.values())

    def inputs(self) -> dict[str, Any]:
        """Return all that decides the scores, as their manifest records it."""
        return evaluation_inputs(self.source, self.questions)


def check_knowledge(run: Run, accept: bool = False, progress: Progress = silent) -> None:
    """Raise MismatchError if the target does not know the rows to forget, or the prior knows them already.

    accept: warn instead. Target and prior are asked the forget rows first, at most 64 of them. Only if these leave it
    open whether the run is refused, the target is asked as many retain and holdout rows. All scores stay: a rerun, and
    the later stages of the run, take them up. A set that can show nothing is warned of. Baselines on the target alone
    are not checked: they have no prior to compare with.
    """
    if run.plan.start != "prior":
        return
    target, prior, *others = check_parts(run)
    is_strict = not accept and run.recipe.verdict
    forget, before = (_score(run, part, progress)["forget"] for part in (target, prior))
    fault = find_fault(forget, before)
    rest: Mapping[str, Sequence[Record]] = {}
    if others and not (is_strict and fault and fault.kind == "unknown"):  # other rows can refute what is "seen"
        rest = _score(run, others[0], progress)
        fault = find_fault(forget, before, rest.get("retain", ()), rest.get("holdout", ()))
    if fault is None:
        for note in weak_sets(forget, before, rest.get("retain", ()), rest.get("holdout", ())):
            logger.warning("%s", note)
        return
    message = _message(run, fault, forget)
    if is_strict:
        kept = f"nothing was fitted; the scores stay in {run.folder / 'evaluation'}, and a rerun takes them up"
        raise MismatchError(f"{message}\n{GO_ON}\n{kept}")
    logger.warning("%s", message)


def check_parts(run: Run) -> list[CheckPart]:
    """Return the parts of the check: target and prior on forget rows, and where there are other rows, the target's."""
    asked = _asked(run)
    forget, others = asked.only({"forget"}), asked.only(asked.sets.keys() - {"forget"})
    wanted = [("target", "target", forget), ("prior", "prior", forget)]
    wanted += [("others", "target", others)] if others.sets else []
    home = run.folder / "evaluation" / KNOWLEDGE_FOLDER
    labels = {"others": "check: other rows"}
    return [
        CheckPart(labels.get(name, f"check: {name}"), home / name, model, run.sources[model], part)
        for name, model, part in wanted
    ]


def _score(run: Run, part: CheckPart, progress: Progress) -> dict[str, list[Record]]:
    """Score a part, as far as its rows were not scored before. Return the records by set."""
    folder = run.folder / "evaluation"
    earlier = [folder / part.model, validation_folder(run, part.model), *checked_folders(run, part.model)]
    earlier += evaluations_beside(run, part.model)
    earlier = [path for path in dict.fromkeys(earlier) if path != part.folder]
    evaluate_benchmark(part.source, part.questions, part.folder, earlier=earlier, label=part.label, progress=progress)
    return {name: read_records(part.folder / f"{name}.jsonl") for name in part.questions.sets}


def _asked(run: Run) -> Qa:
    """Return at most `ROWS` rows of each set: of those that are scored, or else of those that the vectors learn."""
    seed = run.recipe.seed
    parts = [part for part in (run.validation, run.test) if isinstance(part, Qa) and "forget" in part.sets]
    if not parts:
        rows = {name: sample_rows(run.rows[name], ROWS, seed) for name in ("forget", "retain") if name in run.rows}
        most = run.recipe.evaluate.max_new_tokens if run.recipe.evaluate else 200
        return load_qa(rows, run.prompter, most, "check")
    names = dict.fromkeys(name for part in parts for name in part.sets)
    sets = {name: _united([part.sets[name] for part in parts if name in part.sets], seed) for name in names}
    return replace(parts[0], sets={name: part for name, part in sets.items() if part.items}, split="check")


def _united(parts: Sequence[ItemSet], seed: int) -> ItemSet:
    """Return a sample of the items of several parts of a set, each once."""
    items = {canonical_json(dict(item.fields)): item for part in reversed(parts) for item in part.items}
    in_order = sorted(items.values(), key=lambda item: item.index)
    return replace(parts[0], items=sample_rows(in_order, ROWS, seed))


def _message(run: Run, fault: Fault, forget: Sequence[Record]) -> str:
    target, prior = run.sources["target"].name, run.sources["prior"].name
    headlines = {
        "unknown": f"the target {target} does not know the rows to forget: {fault.reason}",
        "other rows": f"the target {target} does not know the rows to forget: {fault.reason}",
        "seen": f"the prior {prior} has already seen the rows to forget, so their vector would miss them: "
        f"{fault.reason}",
    }
    advice = {
        "unknown": _prompt_advice(run) if fault.kind == "unknown" else "",
        "other rows": "are these the rows that it was trained on? If so, is the prompt that of the training?",
        "seen": "take an earlier checkpoint as the prior, from before they came in (`msa-lite probe` compares some)",
    }
    lines = [headlines[fault.kind], f"  ({fault.figures})", f"  {advice[fault.kind]}"]
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


PROBE_FOLDER = "probe"
COMPARED_WITH = {"holdout": "holdout rows", "paraphrased": "paraphrases of them"}
CHEAP_ROWS = 64  # of each side, for a run's own probe: it takes seconds, and shows rows that were learnt


def probe_rows(run: Run) -> Probe | None:
    """Return the forget rows and the rows they are compared with; None if there are none.

    The comparison rows are the first of these that exist: `probe.against`, the recipe's holdout rows, the benchmark's,
    the benchmark's paraphrases. A benchmark's validation part is used if it has enough rows. Otherwise its test part
    is: no candidate is scored on it here, and nothing is chosen by it.
    """
    forget, other = run.data["forget"], run.data.get("probe.against")
    if other is None:
        forget, other = run.data.get("evaluate.forget", forget), run.data.get("evaluate.holdout")
        if other is None or other.format != forget.format:
            parts = [probe for part in (run.validation, run.test) if part and (probe := against_own(part))]
            return next((probe for probe in parts if probe.suffices), parts[-1] if parts else None)
    rows = load_rows(forget), load_rows(other)
    return against_rows(*rows, run.prompter, run.recipe.probe.paired, run.recipe.vector.max_length)


def cheap_probe(run: Run, progress: Progress = silent) -> str | None:
    """Return a warning if the run's prior shows signs of having seen the forget set, by the loss of a few rows.

    None if it shows none, if that cannot be told, or if there is nothing to compare with. Signs that the ideal shows as
    well mean nothing. The scores stay in OUTPUT/probe/cheap, so a rerun loads no model for them.
    """
    rows = probe_rows(run)
    if rows is None:
        return None
    few = rows.sampled(CHEAP_ROWS, run.recipe.seed, with_z=False)
    folder, reports = run.folder / PROBE_FOLDER / "cheap", {}
    for name in ("prior", "ideal"):  # the ideal only if the prior shows signs, to see whether they mean anything
        if name in run.sources:
            reports[name] = probe_model(run.sources[name], few, folder / name, f"probe: {name}", progress)
        finding = read_verdicts(reports)[0]
        if finding.verdict != "signs":
            return None
    forget, other = reports["prior"].settings["rows"].values()
    return (
        f"the prior {run.sources['prior'].name} {finding.explanation}. {forget} forget rows were compared with {other} "
        f"{COMPARED_WITH[few.against]}; `msa-lite probe` looks closer. MSA fails with a prior that has already seen "
        "the forget set: take an earlier checkpoint"
    )
