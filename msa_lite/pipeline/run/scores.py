"""Score the models of a run on its questions: those that a choice is made by (validation), and the others (test)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from msa_lite.budget.plan import CHECKS
from msa_lite.catalogue import OWN
from msa_lite.choose.rules import LeastExtraction
from msa_lite.choose.validation import Validation
from msa_lite.data import sample_rows
from msa_lite.evals.benchmarks.benchmark import Benchmark, ItemSet, Record
from msa_lite.evals.benchmarks.qa import load_qa
from msa_lite.evals.scores.evaluation import NO_JUDGE, Ideal, evaluate_benchmark, evaluation_inputs
from msa_lite.evals.scores.records import collect_records, open_answers, records_by_set
from msa_lite.io.console.progress import Progress
from msa_lite.io.files.cache import Cache
from msa_lite.io.files.writing import canonical_json
from msa_lite.io.weights.hub import Source, fetch
from msa_lite.pipeline.prepare.questions import why_unjudged
from msa_lite.pipeline.prepare.run import Context, Run
from msa_lite.pipeline.stages.costs import CHECKED_ROWS, QuestionPart, asking_costs
from msa_lite.pipeline.stages.stage import Stage
from msa_lite.report import Report
from msa_lite.report.verdict.figures import EARLIER_SET

Split = Literal["check", "validation", "test", "earlier"]
"""The rows of the check before the fits, those that a choice is made by, those that models are scored on, and those of
earlier requests. The check asks two models, and the target a second time ("others"): about rows to keep and holdout."""
_SAYS = {
    "check": "before anything is fitted: the target must know the rows to forget, the prior must not",
    "final": "scores on the test rows, for report and verdict",
    "validation": "scores on rows that are set apart for the choice of alpha and beta",
    "test": "scores on the test rows of a model that never saw the rows to forget",
    "earlier": "scores on the rows of earlier requests, which must stay forgotten",
}
COLLECT = "collect"  # the order to run a share of the questions
_APART = {"check": "knowledge", "earlier": EARLIER_SET}  # folders in `evaluation` of scores that no report compares


def validation_of(run: Run) -> Validation:
    """Return the run's validation rows with the rule. Stages before the choice score ideal and prior on them."""
    assert run.validation is not None, "only runs with a choice have validation rows"
    ideal = scores_folder(run, "ideal", "validation") if "ideal" in run.sources else None
    levelled = Context.of(run).chooses_by_rows and run.scope.start == "prior"
    rule, judge = run.questions.rule, run.judge if run.questions.judged else NO_JUDGE
    prior = scores_folder(run, "prior", "validation") if levelled and isinstance(rule, LeastExtraction) else None
    return Validation(run.validation, rule, ideal, judge, why_unjudged(run.recipe), prior)


def score_model(
    run: Run, name: str, split: Split, progress: Progress, method: Mapping[str, Any] | None = None
) -> Report:
    """Score a model of a run on the validation or the test rows into a folder of its own. Return the report.

    name: "target", "ideal", "unlearned", or "prior", which is asked the forget rows alone: it shows what a model knows
    that never saw them. method: describes the method in the unlearned model's report. Of the processes of a launcher,
    all score.
    """
    report = evaluate_benchmark(
        _source(run, name),
        asked(run, name, split),
        scores_folder(run, name, split),
        collect=partial(_collect, run, name, split),
        **_yardsticks(run, name, split),
        method=method,
        label=_label(name, split),
        progress=progress,
    )
    assert report is not None, "the first process has it"
    return report


def score_stage(
    context: Context,
    name: str,
    split: Split,
    needs: Sequence[str] = (),
    describe: Callable[[], Mapping[str, Any]] = dict,
) -> Stage:
    """Return the stage that scores a model on the validation or test rows.

    describe: returns the method as the unlearned model's report names it, once the model is there.
    """

    def method() -> Mapping[str, Any] | None:
        return describe() if (name, split) == ("unlearned", "test") else None

    def inputs() -> Mapping[str, Any]:
        run = context.run
        rows, yardsticks = asked(run, name, split), _yardsticks(run, name, split)
        return evaluation_inputs(_source(run, name), rows, **yardsticks, method=method())

    final = split == "test" and name != "prior"
    model = "target" if name == "others" else name
    part: QuestionPart = "others" if name == "others" else split
    return Stage(
        _label(name, split),
        "score" if final else "check",
        scores_folder(context, name, split),
        lambda progress: score_model(context.run, name, split, progress, method()),
        needs=needs,
        inputs=inputs,
        cost=partial(asking_costs, context.recipe, _plan_name(split, final), model, part, context.chooses),
        says=_SAYS["final" if final else split],
    )


def score_stages(context: Context, describe: Callable[[], Mapping[str, Any]]) -> list[Stage]:
    """Return the stages after the merge: the scores on the test rows, and the level of the prior."""
    ideal = ["scores: ideal"] if context.has_ideal else []
    stages = [
        score_stage(context, name, "test", (["merge"] * (name == "unlearned") + ideal * (name != "ideal")), describe)
        for name in context.scored
    ]
    if context.compares_with_prior:
        stages += [score_stage(context, "prior", "validation")] if context.chooses_by_rows else []
        stages.append(score_stage(context, "prior", "test"))
    return stages


def earlier_stages(context: Context) -> list[Stage]:
    """Return the stages that ask the models the rows of earlier requests; none without such rows.

    Without an ideal the prior is asked, too: it is the control then, where there are no holdout rows.
    """
    if not context.asks_earlier:
        return []
    return [score_stage(context, name, "earlier", ["merge"] * (name == "unlearned")) for name in context.earlier_models]


def _plan_name(split: Split, final: bool) -> str:
    """Return the name that such stages have together in a plan."""
    if split == "earlier":
        return "the earlier rows"
    return "the scores" if final else CHECKS


def _label(name: str, split: Split) -> str:
    """Return the name of the stage that scores a model."""
    if split == "earlier":
        return f"earlier rows: {name}"
    if name == "others":
        return "check: other rows"
    return f"scores: {name}" if split == "test" and name != "prior" else f"{split}: {name}"


def asked(run: Run, name: str, split: Split) -> Benchmark:
    """Return the questions that a model is asked; the prior, and the check of a model, of the forget rows alone."""
    if split == "earlier":
        assert run.removed_rows is not None, "there are rows of earlier requests"
        return run.removed_rows
    if split == "check":
        questions = _questions_to_check(run)
        return questions.only(questions.sets.keys() - {"forget"} if name == "others" else {"forget"})
    benchmark = run.validation if split == "validation" else run.test
    assert benchmark is not None, "there are questions"
    return benchmark.only({"forget"}) if name == "prior" else benchmark


def _questions_to_check(run: Run) -> Benchmark:
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


def scores_folder(run: Run | Context, name: str, split: Split) -> Path:
    """Return the folder of a model's scores."""
    if split in _APART:
        return run.scope.folder / "evaluation" / _APART[split] / name
    ending = "_validation" if split == "validation" else ""
    return run.scope.folder / "evaluation" / f"{name}{ending}"


def _source(run: Run, name: str) -> Source:
    """Return a model of the run; the unlearned one as it was written."""
    if name == "others":
        return run.sources["target"]
    return run.sources[name] if name in run.sources else fetch(str(run.folder / run.recipe.merge.form))


def answers_of(run: Run) -> Cache:
    """Open what models were asked in any run of the recipe, of MSA and of baselines, and in the earlier request."""
    return open_answers(run.recipe.folder, [former.folder for former in run.earlier[-1:]])


def _collect(
    run: Run, name: str, split: Split, source: Source, benchmark: Benchmark, label: str, progress: Progress
) -> dict[str, list[Record]]:
    """Ask a model its questions with the help of the other processes."""
    with run.crew.helped(COLLECT, {"name": name, "split": split}):
        return collect_records(source, benchmark, answers_of(run), run.crew.ranks, label, progress)


def help_collect(run: Run, name: str, split: Split) -> None:
    """Ask this process's share of a model's questions, as the first process has ordered."""
    collect_records(_source(run, name), asked(run, name, split), answers_of(run), run.crew.ranks)


def _yardsticks(run: Run, name: str, split: Split) -> dict[str, Any]:
    """Return the ideal and the judge of a model's scores; none where records alone count (prior, check, earlier)."""
    if name == "prior" or split in _APART:
        return {}
    if split == "validation":
        validation = validation_of(run)
        return {"ideal": "itself" if name == "ideal" else validation.ideal, "judge": validation.judge}
    ideal: Ideal = run.folder / "evaluation" / "ideal" if "ideal" in run.sources else None
    return {"ideal": "itself" if name == "ideal" else ideal, "judge": run.judge}


def scored_records(run: Path, endings: Sequence[str]) -> dict[str, dict[str, list[Record]]]:
    """Return the records by set of target, unlearned model and ideal, each row once.

    run: a run's folder. endings: those of the evaluation folders to read. Models that were not scored on all parts
    are left out.
    """
    scored = {}
    for name in ("target", "unlearned", "ideal"):
        folders = [run / "evaluation" / f"{name}{ending}" for ending in endings]
        if all(folder.is_dir() for folder in folders) and (records := merged_records(folders)):
            scored[name] = records
    return scored


def merged_records(folders: Sequence[Path]) -> dict[str, list[Record]]:
    """Return the records by set of several folders together, each row once; later folders count first."""
    sets: dict[str, dict[int, Record]] = {}
    for folder in folders:
        for name, records in records_by_set(folder).items():
            sets.setdefault(name, {}).update({record["index"]: record for record in records})
    return {name: [indexed[index] for index in sorted(indexed)] for name, indexed in sets.items()}


def row_content(fields: Mapping[str, Any]) -> str:
    """Return what tells rows apart, by the fields of a record: the text, or the question with the turns before it."""
    return fields.get("text") or json.dumps([fields.get("question"), *map(list, fields.get("earlier") or ())])
