"""Stages that runs of MSA and of the baselines share: merge, scores, choice."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from msa_lite.choose.candidates import Candidates, Values
from msa_lite.choose.choice import Choice, choose
from msa_lite.choose.evidence import Metrics
from msa_lite.choose.rules import LeastExtraction, Rank
from msa_lite.choose.validation import Validation
from msa_lite.data import Row
from msa_lite.evals.benchmark import Benchmark, Record
from msa_lite.evals.evaluation import NO_JUDGE, Collect, Ideal, evaluate_benchmark, evaluation_inputs
from msa_lite.evals.models import load_model
from msa_lite.evals.qa import Qa
from msa_lite.evals.records import collect_records
from msa_lite.io.console.progress import Progress, silent
from msa_lite.io.weights.hub import Source, fetch
from msa_lite.merger import Merged, MergedAdapter, Precision, Term, hash_vector, merge_terms, merge_terms_to_adapter
from msa_lite.merger.inputs import find_inputs
from msa_lite.pipeline.prepare.earlier import earlier_terms
from msa_lite.pipeline.prepare.run import Run
from msa_lite.pipeline.run.folder import BASELINES, TRACKING
from msa_lite.report import Report
from msa_lite.train import Line, Tracking

logger = logging.getLogger(__name__)


def row_hashes(rows: Sequence[Row]) -> dict[str, str]:
    """Return a file with the hashes of the rows that were learnt. The rows themselves are not written down again."""
    return {"rows.jsonl": "".join(json.dumps({"index": r.index, "sha256": r.sha256}) + "\n" for r in rows)}


_Part = Literal["validation", "test"]
COLLECT = "collect"  # the order to run a share of the questions
CHECKED = "knowledge"  # the folder of the scores that the check before the fits makes, in `evaluation`

Terms = Sequence[Term[Path]]
"""The folders of vectors, with their weights."""


def merge_vectors(run: Run, terms: Terms, progress: Progress) -> Merged | MergedAdapter:
    """Write the unlearned model, or one adapter on the target where the recipe asks for that."""
    if run.recipe.merge.form == "adapter":
        target, folder = run.sources["target"], run.folder / "adapter"
        return merge_terms_to_adapter(
            target, folder, _open_terms(terms), run.sources["prior"], replace=True, progress=progress
        )
    return _merge_model(run, run.folder / "model", terms, progress, forecast=run.recipe.merge.forms)


def merge_candidate(run: Run, terms: Terms) -> Any:
    """Return the merged model, loaded from a folder that is removed again.

    Processes that share the run's folder take turns.
    """
    from filelock import FileLock

    folder = run.folder / "candidate"
    with FileLock(run.folder / ".candidate.lock"):
        shutil.rmtree(folder, ignore_errors=True)  # what a kill may have left
        _merge_model(run, folder, terms, silent, compare=False)
        try:
            return load_model(folder)
        finally:
            shutil.rmtree(folder)


def merge_inputs(run: Run, terms: Terms) -> dict[str, Any]:
    """Return all that decides the unlearned model, as its manifest records it."""
    form = run.recipe.merge.form
    options = {"max_rank": None} if form == "adapter" else merge_precision(run).record
    sources, opened = run.sources, _open_terms(terms)
    return find_inputs(run.folder / form, form, sources["target"], opened, sources["prior"], options, True).record


def merge_identity(run: Run) -> dict[str, Any]:
    """Return all that decides a merge besides its vectors and their weights, for a manifest."""
    models = {name: run.sources[name].identity() for name in ("target", "prior")}
    settings = run.recipe.merge.model_dump(exclude={"form", "forecast"})  # which decide no weight
    identity = models | {"merge": settings, "seed": run.recipe.seed}
    earlier = sorted([hash_vector(term.vector), term.weight] for term in earlier_terms(run.earlier))
    return identity | ({"earlier": earlier} if earlier else {})


def merge_precision(run: Run) -> Precision:
    """Return the recipe's dtype and rounding."""
    return Precision(run.recipe.merge.dtype, run.recipe.merge.rounding, run.recipe.seed)


def _merge_model(
    run: Run, folder: Path, terms: Terms, progress: Progress, compare: bool = True, forecast: Sequence[str] = ()
) -> Merged:
    return merge_terms(
        run.sources["target"],
        folder,
        _open_terms(terms),
        run.sources["prior"],
        merge_precision(run),
        forecast=forecast,
        replace=True,
        compare=compare,
        progress=progress,
    )


def _open_terms(terms: Terms) -> list[Term[Source]]:
    """Return the terms with their vectors as sources; those of weight 0, which need not exist, are left out."""
    return [term.with_vector(fetch(str(term.vector))) for term in terms if term.weight]


def validation_of(run: Run) -> Validation:
    """Return the run's validation rows with the rule. `evaluate_references` scores ideal and prior."""
    assert run.validation is not None, "only runs with a choice have validation rows"
    ideal = validation_folder(run, "ideal") if "ideal" in run.sources else None
    prior = validation_folder(run, "prior") if _has_prior_level(run, run.validation) else None
    rule, judge = run.questions.rule, run.judge if run.questions.judged else NO_JUDGE
    return Validation(run.validation, rule, ideal, judge, prior if isinstance(rule, LeastExtraction) else None)


def evaluate_references(run: Run, progress: Progress) -> None:
    """Score the models that candidates are compared with on the validation rows, besides the target.

    The ideal, where there is one, serves rules that need it and the tables. The prior is scored on the forget rows, for
    the rule extraction.
    """
    if "ideal" in run.sources:
        _evaluate_validation(run, "ideal", run.sources["ideal"], progress)
    if isinstance(run.questions.rule, LeastExtraction):
        evaluate_prior(run, "validation", progress)


def chooses_by_rows(run: Run) -> bool:
    """Return True if the run chooses by the user's own forget rows, so that all of its models are scored on them."""
    return isinstance(run.validation, Qa) and "forget" in run.validation.sets


def evaluate_before_fits(run: Run, progress: Progress) -> None:
    """Score ideal, prior and target on the validation rows, if these are the user's own: each model is loaded once."""
    if run.plan.start == "prior" and chooses_by_rows(run):
        evaluate_references(run, progress)  # first, since the target's report needs the ideal's
        evaluate_prior(run, "validation", progress)
        evaluate_target(run, progress)


def evaluate_target(run: Run, progress: Progress) -> Path:
    """Score the target on the validation rows. Return the folder with its report."""
    return _evaluate_validation(run, "target", run.sources["target"], progress)


def evaluate_prior(run: Run, part: _Part, progress: Progress) -> Path | None:
    """Score the prior on the forget rows of one part: the level of a model that never saw them. Return its folder.

    Return None for a published benchmark, which has an ideal or holdout rows for that, and where the prior is the
    target.
    """
    benchmark = run.validation if part == "validation" else run.test
    if benchmark is None or not _has_prior_level(run, benchmark):
        return None
    name = "prior_validation" if part == "validation" else "prior"
    folder = run.folder / "evaluation" / name
    evaluate_benchmark(
        run.sources["prior"],
        benchmark.only({"forget"}),
        folder,
        collect=_collected(run, "prior", part, ("forget",)),
        earlier=[*checked_folders(run, "prior"), *evaluations_beside(run, name), validation_folder(run, "prior")],
        label=f"{part}: prior",
        progress=progress,
    )
    return folder


def _has_prior_level(run: Run, benchmark: Benchmark) -> bool:
    return isinstance(benchmark, Qa) and "forget" in benchmark.sets and run.plan.start == "prior"


def evaluate_merged(run: Run, merged: Merged | MergedAdapter, progress: Progress) -> Path:
    """Score the unlearned model, as it is written, on the validation rows. Return the folder with its report."""
    return _evaluate_validation(run, "unlearned", fetch(str(merged.folder)), progress)


def _evaluate_validation(run: Run, name: str, source: Source, progress: Progress) -> Path:
    validation, folder = validation_of(run), validation_folder(run, name)
    evaluate_benchmark(
        source,
        validation.benchmark,
        folder,
        collect=_collected(run, name, "validation"),
        **_yardsticks(run, name, "validation"),
        earlier=[*checked_folders(run, name), *evaluations_beside(run, folder.name)],
        label=f"validation: {name}",
        progress=progress,
    )
    return folder


def _collected(run: Run, name: str, part: _Part, sets: Sequence[str] | None = None) -> Collect:
    """Return what runs the model of this name on a part of the questions, with the help of the other processes."""

    def collect(
        source: Source, benchmark: Benchmark, folder: Path, label: str, progress: Progress
    ) -> dict[str, list[Record]]:
        written = None if name in run.sources else str(source.folder.resolve())
        order = {"name": name, "written": written, "part": part, "sets": sets, "folder": str(folder)}
        with run.crew.helped(COLLECT, order):
            return collect_records(source, benchmark, folder, run.crew.ranks, label, progress)

    return collect


def help_collect(
    run: Run, name: str, written: str | None, part: _Part, sets: Sequence[str] | None, folder: str
) -> None:
    """Run this process's share of the items, as the first process has ordered.

    written: the folder of the model, where it is none of the run's sources. sets: the sets of questions; None for all.
    """
    benchmark = run.validation if part == "validation" else run.test
    assert benchmark is not None, "the first process has it"
    source = fetch(written) if written else run.sources[name]
    collect_records(source, benchmark.only(set(sets)) if sets else benchmark, Path(folder), run.crew.ranks)


def validation_folder(run: Run, name: str) -> Path:
    """Return the folder of a model's scores on the validation rows."""
    return run.folder / "evaluation" / f"{name}_validation"


def choose_candidate(run: Run, candidates: Candidates, what: str, progress: Progress) -> Choice:
    """Return the best candidate on the run's validation rows. Warn of reasons to doubt it."""
    evaluate_references(run, progress)
    with tracking_of(run).lines("sweep") as report:
        if run.recipe.trackers:
            candidates = replace(candidates, tell=lambda *scored: report(_tracked_line(*scored)))
        choice = choose(candidates, validation_of(run), run.folder / "sweep", f"choosing {what}", progress)
    for doubt in choice.doubts:
        logger.warning("the choice of %s: %s", what, doubt)
    return choice


def tracking_of(run: Run) -> Tracking:
    """Return the run's trackers."""
    return Tracking(run.recipe.trackers, run.folder / TRACKING, run.folder.resolve().name)


def _tracked_line(values: Values, rank: Rank | str, metrics: Metrics) -> Line:
    """Return the numbers of a candidate: its values, its score unless it is broken, its metrics."""
    scored = {} if isinstance(rank, str) else {"score": rank.value, "conditions_met": float(rank.met)}
    line = {**values, **scored, **metrics}
    return {name: float(value) for name, value in line.items() if isinstance(value, int | float)}


def evaluate_all(
    run: Run, merged: Merged | MergedAdapter, method: Mapping[str, Any], progress: Progress
) -> dict[str, Report]:
    """Return the reports of target, ideal and unlearned model, in this order. The ideal is scored first, as yardstick.

    method: describes the method in the unlearned model's report. Scores of target and ideal from another run of the
    recipe are used again.
    """
    if run.test is None:
        return {}
    models = {name: run.sources[name] for name in ("ideal", "target") if name in run.sources}
    models["unlearned"] = fetch(str(merged.folder))
    folder = run.folder / "evaluation"
    reports = {}
    for name, source in models.items():
        report = evaluate_benchmark(
            source,
            run.test,
            folder / name,
            collect=_collected(run, name, "test"),
            **_yardsticks(run, name, "test"),
            method=method if name == "unlearned" else None,
            earlier=[*checked_folders(run, name), *evaluations_beside(run, name), validation_folder(run, name)],
            label=f"scores: {name}",
            progress=progress,
        )
        assert report is not None, "a recipe runs in one process"
        reports[name] = report
    return {name: reports[name] for name in ("target", "ideal", "unlearned") if name in reports}


def _yardsticks(run: Run, name: str, part: _Part) -> dict[str, Any]:
    """Return the ideal and the judge of a model's scores on one part of the questions."""
    if part == "validation":
        validation = validation_of(run)
        return {"ideal": "itself" if name == "ideal" else validation.ideal, "judge": validation.judge}
    ideal: Ideal = run.folder / "evaluation" / "ideal" if "ideal" in run.sources else None
    return {"ideal": "itself" if name == "ideal" else ideal, "judge": run.judge}


def scoring_inputs(
    run: Run, name: str, part: _Part, source: Source, method: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return all that decides the scores of a model on one part of the questions, as their manifest records it."""
    benchmark = run.validation if part == "validation" else run.test
    assert benchmark is not None, "there are questions"
    if name == "prior":
        return evaluation_inputs(source, benchmark.only({"forget"}))
    return evaluation_inputs(source, benchmark, **_yardsticks(run, name, part), method=method)


def checked_folders(run: Run, name: str) -> list[Path]:
    """Return the folders with what the check before the fits has scored of a model, in this run and those beside it."""
    folders = [f"{CHECKED}/{name}", *([f"{CHECKED}/others"] if name == "target" else [])]
    own = [path for folder in folders if (path := run.folder / "evaluation" / folder).is_dir()]
    return [*own, *(path for folder in folders for path in evaluations_beside(run, folder))]


def evaluations_beside(run: Run, name: str) -> list[Path]:
    """Return the folders of this name in the evaluations of the recipe's other runs, of MSA and of baselines."""
    home = run.recipe.folder
    others = [folder for folder in (home, *sorted((home / BASELINES).glob("*"))) if folder != run.folder]
    return [folder for other in others if (folder := other / "evaluation" / name).is_dir()]
