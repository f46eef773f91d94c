"""Run MSA: recipe → two vectors → the choice of (α, β) → merge → scores → report."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from msa_lite.baselines.methods import check_grids
from msa_lite.choose.candidates import Values
from msa_lite.choose.choice import load_choice
from msa_lite.errors import UsageError
from msa_lite.io.console.progress import Progress, announce, notices, silent
from msa_lite.io.files.writing import json_form
from msa_lite.io.finished.seal import load_manifest
from msa_lite.io.launch.crew import Crew
from msa_lite.io.launch.gathering import gathered
from msa_lite.merger import Merged, MergedAdapter, Term
from msa_lite.pipeline.attack.run import check_attacks, open_attacks, run_attacks
from msa_lite.pipeline.prepare.earlier import earlier_terms, open_earlier, rebuild_command
from msa_lite.pipeline.prepare.models import whole_target
from msa_lite.pipeline.prepare.run import Run, RunPlan
from msa_lite.pipeline.run.choice import (
    SweepResult,
    check_strengths,
    choose_strengths,
    merge_chosen,
    recorded_points,
    rescore,
    run_terms,
    sweep_plan,
)
from msa_lite.pipeline.run.folder import claimed
from msa_lite.pipeline.run.follow import follow_run
from msa_lite.pipeline.run.knowledge import cheap_probe, check_knowledge
from msa_lite.pipeline.run.report import (
    check_licence,
    check_publishing,
    drop_report,
    publish_model,
    write_record,
    write_run_report,
)
from msa_lite.pipeline.run.scores import evaluate_all, evaluate_before_fits, merge_precision
from msa_lite.pipeline.run.steps import fit_steps, run_steps
from msa_lite.pipeline.run.vectors import fit_vectors
from msa_lite.pipeline.run.verdict import Findings, complete_card, judge_run, learnt_rows
from msa_lite.pipeline.stages.check import check_memory
from msa_lite.publish.upload import Published
from msa_lite.recipe import Recipe, RecipeSource, load_recipe
from msa_lite.report import Report
from msa_lite.report.attacks import AttackFacts, attack_summary
from msa_lite.report.choice import SYMBOLS
from msa_lite.report.rows import SideBySide
from msa_lite.report.verdict import Verdict
from msa_lite.strengths import Strengths

logger = logging.getLogger(__name__)


@dataclass(frozen=True, repr=False)
class RunResult:
    """The result of a run."""

    folder: Path
    """The run's folder."""
    method: str
    """"msa", or the baseline's name."""
    chosen: Values
    """alpha and beta; of a baseline that trains, parameters, epoch, scale."""
    merged: Merged | MergedAdapter
    """The unlearned model, or the adapter."""
    reports: dict[str, Report]
    """A report for each model that was scored."""
    verdict: Verdict | None = None
    """PASS, PARTLY or FAIL, with the sentence that says what happened."""
    no_verdict: str | None = None
    """The reason why there is no verdict, where there is none."""
    examples: Sequence[SideBySide] = ()
    """Questions with what target, unlearned model and ideal say. They hold the data."""
    attacks: AttackFacts | None = None
    """What attacks brought back, if the recipe says to make some."""
    published: Published | None = None
    """Its place on the Hub, if the recipe says to send it."""

    def __repr__(self) -> str:
        chosen = ", ".join(f"{SYMBOLS.get(key, key)} = {value}" for key, value in self.chosen.items())
        outcome = self.verdict.outcome if self.verdict else "no verdict"
        return f"RunResult({self.folder}: {outcome}, {chosen})"

    @property
    def alpha(self) -> float:
        """Return the forget vector's strength, of MSA and the task vector."""
        return float(self.chosen["alpha"])

    @property
    def beta(self) -> float:
        """Return the retain vector's strength, of MSA and the task vector."""
        return float(self.chosen["beta"])

    def as_dict(self) -> dict[str, Any]:
        """Return the result for `--json`."""
        return {
            "verdict": json_form(self.verdict),
            **({"no_verdict": self.no_verdict} if self.no_verdict else {}),
            "output": str(self.folder),
            "method": self.method,
            **({"alpha": self.alpha, "beta": self.beta} if "alpha" in self.chosen else {}),
            "chosen": dict(self.chosen),
            "model": json_form(self.merged),
            "metrics": {name: report.values() for name, report in self.reports.items()},
            **({"attacks": attack_summary(self.attacks)} if self.attacks else {}),
            **({"published": json_form(self.published)} if self.published else {}),
        }


def run_recipe(
    recipe: RecipeSource,
    overrides: Iterable[str] = (),
    progress: Progress = silent,
    *,
    accept: bool = False,
    show_examples: bool = False,
    force: bool = False,
) -> RunResult | None:
    """Run a recipe: fit the vectors, choose α and β, merge, score, and write the report.

    accept: only warn if the target does not know the rows to forget, or the prior does. show_examples: put ten
    questions with the models' answers into the report. force: only warn if the device's memory is too small by
    prediction. Raise before anything is written if the recipe or its inputs are at fault. Later errors leave finished
    stages in place, and a rerun resumes. A verdict of FAIL raises nothing. Return None in the processes of a launcher
    other than the first: they fit, score and try points with it.
    """
    recipe = load_recipe(recipe, overrides)
    check_grids(recipe.baseline.methods)
    plan = replace(msa_plan(recipe), force=force)
    with gathered(recipe.model_dump(mode="json")) as crew:
        if crew.first:
            check_publishing(recipe)
            result = run_plan(recipe, plan, progress, accept, show_examples, crew=crew)
            published = publish_model(recipe, result.merged.folder, result.verdict, accept, progress)
            return replace(result, published=published)
        follow_run(crew, recipe, plan)
    return None


def sweep(
    recipe: RecipeSource, overrides: Iterable[str] = (), progress: Progress = silent, *, force: bool = False
) -> SweepResult | None:
    """Fit the vectors of a recipe, score its points on validation rows, merge the best and score that again.

    This is `run` without the scores on test rows. Under a launcher all processes work on it, and only the first returns
    a result; the others return None. force: only warn if the device's memory is too small by prediction. Raise
    UsageError for a recipe with a single point.
    """
    recipe = load_recipe(recipe, overrides)
    plan = replace(msa_plan(recipe), force=force)
    with gathered(recipe.model_dump(mode="json")) as crew:
        if crew.first:
            return sweep_plan(recipe, plan, progress, crew)
        follow_run(crew, recipe, plan)
    return None


def msa_plan(recipe: Recipe) -> RunPlan:
    """Return the plan of the recipe's own run."""
    vectors = ("forget", "retain") if recipe.retain else ("forget",)
    return RunPlan("msa", recipe.folder, "prior", choice=recipe.has_choice, vectors=vectors)


def run_plan(
    recipe: Recipe,
    plan: RunPlan,
    progress: Progress,
    accept: bool = False,
    show_examples: bool = False,
    *,
    crew: Crew,
) -> RunResult:
    """Run a plan: of MSA, or of the task vector, which starts from the target."""
    with claimed(recipe, plan, progress, check_run, crew=crew) as run:
        drop_report(run.folder)
        announce(progress, run_steps(run))
        check_knowledge(run, accept, progress)
        if plan.method == "msa" and (warning := cheap_probe(run, progress)):
            logger.warning("%s", warning)
        evaluate_before_fits(run, progress)
        fit_vectors(run, run.vector_names, progress)
        swept = choose_strengths(run, progress)
        merged = merge_chosen(run, swept, progress)
        rescore(run, swept, merged, progress)
        reports = evaluate_all(run, merged, plan.describe(recipe, swept.strengths.values), progress)
        findings = judge_run(run, learnt_rows(run, swept.strengths), progress)
        complete_card(run, merged, swept.strengths.values)
        write_record(run, swept.strengths.values, merged)
        examples = findings.examples if show_examples else ()
        write_run_report(run.folder, examples)
        attacks = attack_result(run, merged, progress, examples)
        if run.earlier:
            terms = run_terms(run, swept.strengths)
            precision = merge_precision(run) if recipe.merge.form == "model" else None
            command = rebuild_command(run.sources["target"], run.sources["prior"], terms, precision)
            notices.info("the same model from nothing (leave a request out to drop it): %s", command)
    return replace(make_result(run, swept.strengths.values, merged, reports, findings), attacks=attacks)


def attack_result(
    run: Run, merged: Merged | MergedAdapter, progress: Progress, examples: Sequence[SideBySide] = ()
) -> AttackFacts | None:
    """Attack the result of a run as its recipe says; return what comes back, None where it names no attack.

    examples: those of the run's report, which is written anew.
    """
    if not run.recipe.attack.attacks:
        return None
    return run_attacks(open_attacks(run, merged.folder), progress, examples=examples).facts


def check_run(run: Run) -> None:
    """Raise what forbids a run, before any work."""
    check_strengths(run)
    check_attacks(run)
    check_licence(run)
    check_memory(run)


def check_vectors(run: Run) -> None:
    """Raise what forbids the fits of a run's vectors, before any work."""
    check_strengths(run)
    check_memory(run, fits_only=True)


def make_result(
    run: Run, chosen: Values, merged: Merged | MergedAdapter, reports: dict[str, Report], findings: Findings
) -> RunResult:
    """Return the result of a run of MSA, or of a baseline."""
    verdict, reason = (None, findings.verdict) if isinstance(findings.verdict, str) else (findings.verdict, None)
    return RunResult(run.folder, run.plan.method, chosen, merged, reports, verdict, reason, findings.examples)


def run_vectors(
    recipe: RecipeSource,
    which: Literal["forget", "retain", "all"] = "all",
    overrides: Iterable[str] = (),
    progress: Progress = silent,
    *,
    force: bool = False,
) -> list[Path] | None:
    """Fit only the vectors of a recipe. Return their folders; None in the processes of a launcher but the first.

    force: only warn if the device's memory is too small by prediction. Raise UsageError for `retain` without a retain
    set.
    """
    recipe = load_recipe(recipe, overrides)
    plan = replace(msa_plan(recipe), force=force)
    with gathered(recipe.model_dump(mode="json")) as crew:
        if not crew.first:
            follow_run(crew, recipe, plan)
            return None
        with claimed(recipe, plan, progress, check_vectors, crew=crew) as run:
            names = wanted_vectors(run, which)
            announce(progress, fit_steps(run, names))
            fit_vectors(run, names, progress)
            return [run.vector_folder(name) for name in names]
    return None


def wanted_vectors(run: Run, which: str) -> list[str]:
    """Return the vectors to fit: all that the recipe uses, or one. Raise UsageError for `retain` without its rows."""
    names = run.vector_names if which == "all" else [which]
    if "retain" in names and "retain" not in run.rows:
        raise UsageError("the recipe has no retain set, so there is no retain vector to fit")
    return names


def merge_arguments(recipe: Recipe) -> dict[str, Any]:
    """Return the arguments of `mergekit_recipe`, for the merge of a recipe's run.

    Raise UsageError while its vectors are not fitted, or alpha and beta not chosen.
    """
    folder = recipe.folder
    if recipe.has_choice:
        inputs = (load_manifest(folder / "sweep") or {"inputs": {}})["inputs"]
        points = recorded_points(recipe), recipe.select.refine
        if (inputs.get("candidates"), inputs.get("refine")) != points:
            raise UsageError(f"{folder}: alpha and beta are not chosen yet; run the recipe, or give one value of each")
        strengths = Strengths.of(load_choice(folder / "sweep").values)
    else:
        strengths = recipe.points[0]
    vectors = {name: folder / "vectors" / name for name, weight in strengths.weights.items() if weight}
    missing = [str(path) for path in vectors.values() if load_manifest(path) is None]
    if missing:
        raise UsageError(f"{' and '.join(missing)}: not fitted yet; `msa-lite vector` on the recipe does it")
    models = {"target": whole_target(recipe), "prior": recipe.prior_checkpoint, "dtype": recipe.merge.dtype}
    if not recipe.earlier:
        return {**models, **{name: str(path) for name, path in vectors.items()}, **strengths.values}
    own = [Term(name, path, strengths.weights[name]) for name, path in vectors.items()]
    terms = [*own, *earlier_terms(open_earlier(recipe))]
    folders = {side: [str(term.vector) for term in terms if term.side == side] for side in strengths.weights}
    weights = {side: [abs(term.weight) for term in terms if term.side == side] for side in strengths.weights}
    return {**models, **folders, "alpha": weights["forget"] or 0.0, "beta": weights["retain"]}
