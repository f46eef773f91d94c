"""Score the models of a run on its questions: those that a choice is made by (validation), and the others (test)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from msa_lite.choose.rules import LeastExtraction
from msa_lite.choose.validation import Validation
from msa_lite.evals.benchmark import Benchmark, Record
from msa_lite.evals.evaluation import NO_JUDGE, Collect, Ideal, evaluate_benchmark, evaluation_inputs
from msa_lite.evals.records import collect_records, read_records
from msa_lite.io.console.progress import Progress
from msa_lite.io.weights.hub import Source, fetch
from msa_lite.pipeline.prepare.questions import why_unjudged
from msa_lite.pipeline.prepare.run import Context, Run
from msa_lite.pipeline.run.folder import BASELINES
from msa_lite.pipeline.stages.asking import CHECKS, QuestionPart, asking_costs
from msa_lite.pipeline.stages.stage import Stage
from msa_lite.report import Report
from msa_lite.report.comeback import EARLIER_SET

Split = Literal["validation", "test", "earlier"]
"""The rows that a choice is made by, those that models are scored on, and those of earlier requests."""
COLLECT = "collect"  # the order to run a share of the questions
CHECKED = "knowledge"  # the folder of the scores that the check before the fits makes, in `evaluation`


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
    that never saw them. method: describes the method in the unlearned model's report. Scores of the same rows from
    other stages, or from another run of the recipe, are used again. Of the processes of a launcher, all score.
    """
    folder = scores_folder(run, name, split)
    known = [*checked_folders(run, name), *evaluations_beside(run, folder.name)]
    known += [scores_folder(run, name, "validation")] if split == "test" else []
    if split == "earlier":
        known = [former.folder / "evaluation" / EARLIER_SET / name for former in run.earlier[-1:]]
    report = evaluate_benchmark(
        _source(run, name),
        asked(run, name, split),
        folder,
        collect=_collected(run, name, split),
        **_yardsticks(run, name, split),
        method=method,
        earlier=known,
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
    return Stage(
        _label(name, split),
        "score" if final else "check",
        scores_folder(context, name, split),
        lambda progress: score_model(context.run, name, split, progress, method()),
        needs=needs,
        inputs=inputs,
        cost=partial(asking_costs, context.recipe, _plan_name(split, final), name, split, _asked_before(context, name)),
        asks=(name, asked(context.prepared, name, split)) if context.prepared else None,
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


def _plan_name(split: Split, final: bool) -> str:
    """Return the name that such stages have together in a plan."""
    if split == "earlier":
        return "the earlier rows"
    return "the scores" if final else CHECKS


def _asked_before(context: Context, name: str) -> list[QuestionPart]:
    """Return the parts of the questions that a model is asked before this one or after it: each row is asked once."""
    is_chosen = context.chooses and (context.chooses_by_rows or name != "target")
    parts: list[QuestionPart] = ["validation"] if is_chosen else []
    if context.scope.start == "prior" and name in ("target", "prior"):
        parts += ["check", "others"] if name == "target" else ["check"]
    return parts


def _label(name: str, split: Split) -> str:
    """Return the name of the stage that scores a model."""
    if split == "earlier":
        return f"earlier rows: {name}"
    return f"scores: {name}" if split == "test" and name != "prior" else f"{split}: {name}"


def asked(run: Run, name: str, split: Split) -> Benchmark:
    """Return the questions that a model is asked; the prior, of the forget rows alone."""
    if split == "earlier":
        assert run.removed_rows is not None, "there are rows of earlier requests"
        return run.removed_rows
    benchmark = run.validation if split == "validation" else run.test
    assert benchmark is not None, "there are questions"
    return benchmark.only({"forget"}) if name == "prior" else benchmark


def scores_folder(run: Run | Context, name: str, split: Split) -> Path:
    """Return the folder of a model's scores."""
    if split == "earlier":
        return run.scope.folder / "evaluation" / EARLIER_SET / name
    ending = "_validation" if split == "validation" else ""
    return run.scope.folder / "evaluation" / f"{name}{ending}"


def _source(run: Run, name: str) -> Source:
    """Return a model of the run; the unlearned one as it was written."""
    return run.sources[name] if name in run.sources else fetch(str(run.folder / run.recipe.merge.form))


def _collected(run: Run, name: str, split: Split) -> Collect:
    """Return what runs a model on its questions, with the help of the other processes."""

    def collect(
        source: Source, benchmark: Benchmark, folder: Path, label: str, progress: Progress
    ) -> dict[str, list[Record]]:
        with run.crew.helped(COLLECT, {"name": name, "split": split, "folder": str(folder)}):
            return collect_records(source, benchmark, folder, run.crew.ranks, label, progress)

    return collect


def help_collect(run: Run, name: str, split: Split, folder: str) -> None:
    """Run this process's share of a model's questions, as the first process has ordered."""
    collect_records(_source(run, name), asked(run, name, split), Path(folder), run.crew.ranks)


def _yardsticks(run: Run, name: str, split: Split) -> dict[str, Any]:
    """Return the ideal and the judge of a model's scores; none where records alone count: the prior, earlier rows."""
    if name == "prior" or split == "earlier":
        return {}
    if split == "validation":
        validation = validation_of(run)
        return {"ideal": "itself" if name == "ideal" else validation.ideal, "judge": validation.judge}
    ideal: Ideal = run.folder / "evaluation" / "ideal" if "ideal" in run.sources else None
    return {"ideal": "itself" if name == "ideal" else ideal, "judge": run.judge}


def checked_folders(run: Run, name: str) -> list[Path]:
    """Return the folders with what the check before the fits has scored of a model, in this run and those beside it."""
    folders = [f"{CHECKED}/{name}", *([f"{CHECKED}/others"] if name == "target" else [])]
    checked = [path for folder in folders if (path := run.folder / "evaluation" / folder).is_dir()]
    return [*checked, *(path for folder in folders for path in evaluations_beside(run, folder))]


def evaluations_beside(run: Run, name: str) -> list[Path]:
    """Return the folders of this name in the evaluations of the recipe's other runs, of MSA and of baselines."""
    home = run.recipe.folder
    runs = [folder for folder in (home, *sorted((home / BASELINES).glob("*"))) if folder != run.folder]
    return [folder for run_folder in runs if (folder := run_folder / "evaluation" / name).is_dir()]


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
        for path in sorted(folder.glob("*.jsonl")):
            sets.setdefault(path.stem, {}).update({record["index"]: record for record in read_records(path)})
    return {name: [records[index] for index in sorted(records)] for name, records in sets.items()}


def row_content(fields: Mapping[str, Any]) -> str:
    """Return what tells rows apart, by the fields of a record: the text, or the question with the turns before it."""
    return fields.get("text") or json.dumps([fields.get("question"), *map(list, fields.get("earlier") or ())])
