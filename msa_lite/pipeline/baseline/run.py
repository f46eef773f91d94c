"""Run a baseline: recipe → training, epoch by epoch → the choice of an epoch → merge → scores.

A baseline trains a vector as MSA does, an adapter or a checkpoint. The same merge adds it to the target: once where
training started from the target, `scale` times where it started from the prior (MSA paper, App. "Augmenting Baselines
with Intermediate Checkpoints").
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from msa_lite.baselines.losses import check_layer
from msa_lite.baselines.methods import TASK_VECTOR, Value, check_grids, check_method, settings_grid
from msa_lite.errors import UsageError
from msa_lite.io.console.progress import Progress, announce, notices, silent
from msa_lite.io.launch.crew import Crew
from msa_lite.io.launch.gathering import gathered
from msa_lite.pipeline.attack.run import check_attacks
from msa_lite.pipeline.baseline.trials import Setting, epochs_of, resolve_trials, scales_of
from msa_lite.pipeline.plan.dry_stages import scores_ahead
from msa_lite.pipeline.prepare.models import demo_config
from msa_lite.pipeline.prepare.run import Run, RunPlan
from msa_lite.pipeline.run.folder import BASELINES, claimed
from msa_lite.pipeline.run.follow import follow_run
from msa_lite.pipeline.run.msa import RunResult, attack_result, make_result, msa_plan, run_plan
from msa_lite.pipeline.run.report import drop_report, write_record, write_run_report
from msa_lite.pipeline.run.scores import evaluate_all, merge_vectors
from msa_lite.pipeline.run.verdict import complete_card, judge_run
from msa_lite.pipeline.stages.check import check_memory
from msa_lite.pipeline.stages.stage import Ahead
from msa_lite.recipe import Recipe, RecipeSource, load_recipe
from msa_lite.report.choice import candidate_name


def run_baseline(
    method: str,
    recipe: RecipeSource,
    overrides: Iterable[str] = (),
    progress: Progress = silent,
    *,
    force: bool = False,
) -> RunResult | None:
    """Run a method that MSA is compared with on a recipe's models and data, and score it in the same way.

    The run goes into `baselines/METHOD` of the recipe's output (`METHOD-prior` with `start: prior`). Raise before
    anything is written if method, recipe or inputs are at fault. force: only warn if the device's memory is too small
    by prediction. Return None in the processes of a launcher but the first.
    """
    check_method(method)
    recipe = load_recipe(recipe, overrides)
    plan, settings = plan_baseline(method, recipe)
    plan = replace(plan, force=force)
    with gathered([method, recipe.model_dump(mode="json")]) as crew:
        if not crew.first:
            follow_run(crew, recipe, plan)
            return None
        if method == TASK_VECTOR:
            return run_plan(recipe, plan, progress, crew=crew)
        return _run(recipe, plan, settings, progress, crew)
    return None


def plan_baseline(method: str, recipe: Recipe) -> tuple[RunPlan, Sequence[Setting]]:
    """Return the plan of a method's run, and the settings to try: none for the task vector.

    Raise UsageError for a recipe that the method cannot be run on.
    """
    if recipe.earlier:
        raise UsageError(
            f"earlier: {method} is compared on one request; run it with earlier=[], or on a recipe of its own with the "
            "rows of all requests"
        )
    check_grids(recipe.baseline.methods)
    if method == TASK_VECTOR and recipe.baseline.start == "prior":
        raise UsageError(f"{method} from the prior is MSA itself: `msa-lite run`; leave baseline.start at target")
    if method == TASK_VECTOR:
        folder = recipe.folder / BASELINES / method
        return replace(msa_plan(recipe), method=method, folder=folder, start="target"), ()
    return _plan(method, recipe)


def _run(recipe: Recipe, plan: RunPlan, settings: Sequence[Setting], progress: Progress, crew: Crew) -> RunResult:
    """Run the plan of a baseline that trains. The first process of a crew trains alone; all of them score."""

    with claimed(recipe, plan, progress, lambda run: check_baseline(run, settings), crew=crew) as run:
        if not crew.is_alone:
            notices.info("%s: one process trains; the others help with the scores", plan.method)
        drop_report(run.folder)
        trials = resolve_trials(run, settings)
        announce(progress, trials.steps())
        setting, epoch, scale = trials.choose(trials.fit(progress), progress)
        merged = merge_vectors(run, [trials.term(setting, epoch, scale)], progress)
        chosen = trials.values_of(setting, epoch, scale)
        reports = evaluate_all(run, merged, trials.describe(chosen), progress)
        learnt = run.rows.get("retain", ()) if setting.parameters.get("retain_weight") else ()
        findings = judge_run(run, learnt, progress)
        complete_card(run, merged, chosen)
        write_record(run, chosen, merged)
        write_run_report(run.folder)
        attacks = attack_result(run, merged, progress)
    return replace(make_result(run, chosen, merged, reports, findings), attacks=attacks)


def check_baseline(run: Run, settings: Sequence[Setting]) -> None:
    """Raise, before any training, if the method lacks what it needs, or the memory is too small by prediction."""
    resolve_trials(run, settings).check()
    check_attacks(run)
    check_memory(run)


def baseline_ahead(run: Run, settings: Sequence[Setting]) -> list[Ahead]:
    """Return what a method that trains would do with each of its stages."""
    trials = resolve_trials(run, settings)
    return scores_ahead(run, trials.stages(), lambda: trials.describe(trials.values_of(*trials.chosen_before())))


def _plan(method: str, recipe: Recipe) -> tuple[RunPlan, list[Setting]]:
    """Return the plan of a method's run, and the settings to try. Raise UsageError if several have no scores."""
    spec = recipe.baseline
    folder = recipe.folder / BASELINES / (method if spec.start == "target" else f"{method}-{spec.start}")
    rate = spec.learning_rate or recipe.vector.learning_rate
    grid = settings_grid(method, spec.methods.get(method, {}))
    points: list[dict[str, Value]] = [{**point, "learning_rate": point.get("learning_rate", rate)} for point in grid]
    several = [key for key in points[0] if len({point[key] for point in points}) > 1]
    settings = []
    for point in points:
        tried = {key: point[key] for key in several}
        name = "_".join([method, candidate_name(tried)]) if tried else method
        settings.append(Setting(point, tried, folder / "vectors" / name))
    choice: bool | Literal["if possible"] = len(points) * len(scales_of(recipe)) > 1 or "if possible"
    if choice is True and recipe.evaluate is None:
        raise UsageError(f"several settings of {method} need scores to choose by; do not set evaluate to null")
    if recipe.demo and (layers := [int(point["layer"]) for point in points if "layer" in point]):
        check_layer("the demo's model", demo_config(recipe.demo), max(layers))  # before it is trained
    names = [setting.folder.name for setting in settings]
    checkpoints = epochs_of(recipe) if spec.start == "prior" else 1
    return RunPlan(method, folder, spec.start, choice, names, checkpoints, sample=False), settings
