"""Checks before a run fits anything: the target knows the rows to forget, and the prior has not seen them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from msa_lite.benchmarks import OWN
from msa_lite.budget.plan import StageCost
from msa_lite.budget.speed import Machine
from msa_lite.data import load_rows, sample_rows
from msa_lite.errors import MismatchError, allowed_by
from msa_lite.evals.benchmarks.benchmark import Benchmark, ItemSet, Record
from msa_lite.evals.benchmarks.qa import load_qa
from msa_lite.evals.engine.prompt_search import better_prompt
from msa_lite.evals.scores.evaluation import evaluate_benchmark, evaluation_inputs
from msa_lite.evals.scores.probe import against_own, against_rows, probe_inputs, probe_model, sample_probe, suffices
from msa_lite.evals.scores.records import collect_records, read_records
from msa_lite.evals.verdict.knowledge import Fault, find_fault, known, weak_sets
from msa_lite.io.console.progress import Progress
from msa_lite.io.files.writing import canonical_json
from msa_lite.io.weights.hub import Source
from msa_lite.pipeline.prepare.run import Context, Run
from msa_lite.pipeline.run.scores import CHECKED, answers_of, score_stage
from msa_lite.pipeline.stages.asking import CHECKED_ROWS, CHECKS, asking_costs, evidence_costs
from msa_lite.pipeline.stages.facts import Facts
from msa_lite.pipeline.stages.stage import Stage
from msa_lite.report.run.probing import read_verdicts
from msa_lite.report.run.rows import SideBySide, examples_text
from msa_lite.report.run.stages import ROWS

logger = logging.getLogger(__name__)


_SAYS = "before anything is fitted: the target must know the rows to forget, the prior must not"
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
    names = _models_by_name(context)
    ideal = ["validation: ideal"] if context.has_ideal else []
    needs = {"target": ideal}
    scored = [*(["ideal"] if context.has_ideal else []), "prior", "target"] if context.chooses_by_rows else []
    validation = [score_stage(context, name, "validation", needs.get(name, ())) for name in scored]
    home = context.scope.folder / "evaluation" / CHECKED
    if context.prepared is None:
        return [
            *(
                Stage(_label(name), "check", home / name, cost=_cost(context, name), says=_SAYS, holds=ROWS)
                for name in names
            ),
            *(cheap_probe(context) if probe else []),
            *validation,
        ]
    check = _Check(context.run, accept)
    stages = [
        Stage(
            _label(name),
            "check",
            home / name,
            partial(check.ask, name),
            inputs=partial(evaluation_inputs, context.run.sources[model], check.questions[name]),
            cost=_cost(context, name),
            says=_SAYS,
            holds=ROWS,
        )
        for name, model in names.items()
        if check.questions[name].sets
    ]
    return [*stages, *(cheap_probe(context) if probe else []), *validation]


def _models_by_name(context: Context) -> dict[str, str]:
    """Return the model that each part of the check asks, by its name, which is that of its folder."""
    evaluate = context.recipe.evaluate
    has_others = context.prepared or context.recipe.retain or (evaluate and (evaluate.retain or evaluate.holdout))
    return {"target": "target", "prior": "prior", **({"others": "target"} if has_others else {})}


def _cost(context: Context, name: str) -> Callable[[Facts, Machine], list[StageCost]]:
    """Return the cost of a part of the check."""
    model, part = ("target", "others") if name == "others" else (name, "check")
    return partial(asking_costs, context.recipe, CHECKS, model, part)  # type: ignore[arg-type]


def _label(name: str) -> str:
    return "check: other rows" if name == "others" else f"check: {name}"


class _Check:
    """The check of a run, as far as it has come: its questions by part, and the records of what was asked."""

    def __init__(self, run: Run, accept: bool) -> None:
        questions = _asked(run)
        forget, others = questions.only({"forget"}), questions.only(questions.sets.keys() - {"forget"})
        self.questions: dict[str, Benchmark] = {"target": forget, "prior": forget, "others": others}
        self._run, self._strict = run, not accept and run.recipe.verdict
        self._records: dict[str, dict[str, list[Record]]] = {}

    def ask(self, name: str, progress: Progress) -> None:
        """Ask one part; with the last that is needed, refuse the run or warn. Raise MismatchError where it refuses."""
        records, is_open = self._records, bool(self.questions["others"].sets)
        records[name] = _score(self._run, name, self.questions[name], progress)
        if name == "target":
            return
        forget, prior, rest = records["target"]["forget"], records["prior"]["forget"], records.get("others", {})
        fault = find_fault(forget, prior, rest.get("retain", ()), rest.get("holdout", ()))
        if name == "prior" and is_open and not (self._strict and fault and fault.kind == "unknown"):
            return  # other rows can refute what is "seen"
        if fault is None:
            for note in weak_sets(forget, prior, rest.get("retain", ()), rest.get("holdout", ())):
                logger.warning("%s", note)
            return
        message = _message(self._run, fault, forget)
        if self._strict:
            place = self._run.folder / "evaluation"
            kept = f"nothing was fitted; the scores stay in {place}, and a rerun takes them up"
            raise allowed_by(MismatchError(f"{message}\n{GO_ON}\n{kept}"), "--accept")
        logger.warning("%s", message)


def _score(run: Run, name: str, questions: Benchmark, progress: Progress) -> dict[str, list[Record]]:
    """Score a part. Return the records by set."""
    model, folder = "target" if name == "others" else name, run.folder / "evaluation" / CHECKED / name

    def collect(source: Source, benchmark: Benchmark, label: str, progress: Progress) -> dict[str, list[Record]]:
        return collect_records(source, benchmark, answers_of(run), label=label, progress=progress)

    evaluate_benchmark(run.sources[model], questions, folder, label=_label(name), progress=progress, collect=collect)
    return {key: read_records(folder / f"{key}.jsonl") for key in questions.sets}


def _asked(run: Run) -> Benchmark:
    """Return `CHECKED_ROWS` rows of each set at most: of those that are scored, or else of those that are learnt."""
    seed = run.recipe.seed
    benchmarks = [
        benchmark
        for benchmark in (run.validation, run.test)
        if benchmark is not None and benchmark.name == OWN and "forget" in benchmark.sets
    ]
    if not benchmarks:
        learnt = [name for name in ("forget", "retain") if name in run.rows]
        rows = {name: sample_rows(run.rows[name], CHECKED_ROWS, seed) for name in learnt}
        most = run.recipe.max_new_tokens
        return load_qa(rows, run.prompter, most, "check")
    names = dict.fromkeys(name for benchmark in benchmarks for name in benchmark.sets)
    sets = {
        name: _united([benchmark.sets[name] for benchmark in benchmarks if name in benchmark.sets], seed)
        for name in names
    }
    return replace(
        benchmarks[0], sets={name: benchmark for name, benchmark in sets.items() if benchmark.items}, split="check"
    )


def _united(item_sets: Sequence[ItemSet], seed: int) -> ItemSet:
    """Return a sample of the items of several parts of a set, each once."""
    items = {canonical_json(dict(item.fields)): item for item_set in reversed(item_sets) for item in item_set.items}
    in_order = sorted(items.values(), key=lambda item: item.index)
    return replace(item_sets[0], items=sample_rows(in_order, CHECKED_ROWS, seed))


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
PROBED = "probe: prior"
PROBE_SAYS = "do the losses show that a model has seen the rows to forget?"
CHEAP_ROWS = 64  # of each side, for a run's own probe: it takes seconds, and shows rows that were learnt


def probe_rows(run: Run) -> Benchmark | None:
    """Return the forget rows and the rows they are compared with; None if there are none.

    The comparison rows are the recipe's holdout rows, or else the benchmark's. A benchmark's validation part is used if
    it has enough rows. Otherwise its test part is: no candidate is scored on it here, and nothing is chosen by it.
    """
    forget, holdout = run.data.get("evaluate.forget", run.data["forget"]), run.data.get("evaluate.holdout")
    if holdout is None or holdout.format != forget.format:
        probes = [probe for benchmark in (run.validation, run.test) if benchmark and (probe := against_own(benchmark))]
        return next((probe for probe in probes if suffices(probe)), probes[-1] if probes else None)
    return against_rows(load_rows(forget), load_rows(holdout), run.prompter, run.recipe.vector.max_length)


def cheap_probe(context: Context) -> list[Stage]:
    """Return a run's own short probe: a warning where its prior shows signs of having seen the forget set.

    Nothing where there are no rows to compare with. The scores stay in OUTPUT/probe/cheap, so a rerun loads no model.
    """
    folder = context.scope.folder / PROBE_FOLDER / "cheap" / "prior"
    cost = partial(evidence_costs, CHECKS, 1, 2.0)  # forget rows, and about as many others
    if context.prepared is None:
        evaluate = context.recipe.evaluate
        return (
            [Stage(PROBED, "check", folder, cost=cost, says=PROBE_SAYS, holds=ROWS)]
            if evaluate and evaluate.holdout
            else []
        )
    if (rows := probe_rows(context.run)) is None:
        return []
    few = sample_probe(rows, CHEAP_ROWS, context.recipe.seed, with_z=False)
    return [
        Stage(
            PROBED,
            "check",
            folder,
            lambda progress: _warn_of_signs(context.run, few, progress),
            inputs=lambda: probe_inputs(context.run.sources["prior"], few),
            cost=cost,
            says=PROBE_SAYS,
            holds=ROWS,
        )
    ]


def _warn_of_signs(run: Run, few: Benchmark, progress: Progress) -> None:
    """Warn if the prior shows signs of having seen the forget set. Signs that the ideal shows as well mean nothing."""
    folder, reports = run.folder / PROBE_FOLDER / "cheap", {}
    for name in ("prior", "ideal"):  # the ideal only if the prior shows signs, to see whether they mean anything
        if name in run.sources:
            source, home = run.sources[name], run.recipe.folder
            reports[name] = probe_model(source, few, folder / name, home, f"probe: {name}", progress)
        finding = read_verdicts(reports)[0]
        if finding.verdict != "signs":
            return
    forget, compared = reports["prior"].settings["rows"].values()
    logger.warning(
        "the prior %s %s. %s forget rows were compared with %s holdout rows; `msa-lite probe` looks closer. MSA "
        "fails with a prior that has already seen the forget set: take an earlier checkpoint",
        run.sources["prior"].name,
        finding.explanation,
        forget,
        compared,
    )
