"""Attack the models of a finished run: does the unlearned model give back what it was to forget?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from msa_lite.errors import OutputError, UsageError
from msa_lite.io.extras import require
from msa_lite.io.lock import locked
from msa_lite.io.precision import has_precision
from msa_lite.io.progress import Progress, silent
from msa_lite.io.seal import load_manifest
from msa_lite.pipeline.attacking import Attacked, open_attacks, run_attacks
from msa_lite.pipeline.baseline import plan_baseline
from msa_lite.pipeline.msa import msa_plan
from msa_lite.pipeline.prepare import Run, prepare
from msa_lite.pipeline.reopen import RunFolder, open_run
from msa_lite.pipeline.reporting import write_run_report
from msa_lite.recipe import load_recipe
from msa_lite.report.provenance import RECIPE_FILE, load_provenance
from msa_lite.report.purged import PURGED_FILE

_CHANGEABLE = ("attack.", "evaluate.ideal", "evaluate.holdout")  # keys of a recipe that decide no stage of its run


def attack(
    folder: str | Path,
    attacks: Sequence[str] = (),
    *,
    overrides: Iterable[str] = (),
    models: Mapping[str, str] | None = None,
    budget: float | None = None,
    progress: Progress = silent,
) -> Attacked:
    """Attack target, ideal and unlearned model of a run, and report what the unlearned model gives back.

    attacks: their names (`msa_lite.attack_names`); none: those of the recipe's key `attack`, or all that the run
    allows. overrides: changes of the recipe, as "attack.rows=100". models: further models to attack, by name. budget:
    seconds that all of it may take by prediction. Write attacks/NAME/ with records and report.json,
    attacks/report.json, and the run's report anew. What was made from the same inputs stays as it is.

    Raise UsageError for what is no run, OutputError for a run that is not finished, and UsageError with all that
    forbids the attacks, before any work.
    """
    require("train")
    opened = open_run(folder)
    _check_finished(opened)
    plan = open_attacks(_prepare(opened, overrides), opened.result, attacks, models)
    with locked(opened.folder):
        result = run_attacks(plan, progress, budget)
        write_run_report(opened.folder)
    return result


def _check_finished(run: RunFolder) -> None:
    """Raise OutputError for a run without an unlearned model, or whose data was purged."""
    if (run.folder / PURGED_FILE).exists():
        raise OutputError(f"{run.folder}: its data was purged, and attacks need the rows to forget")
    if load_manifest(run.result) is None:
        raise OutputError(
            f"{run.folder}: there is no unlearned model to attack yet; finish the run first (the command is in the "
            f"first line of {run.folder / RECIPE_FILE})"
        )


def _prepare(opened: RunFolder, overrides: Iterable[str]) -> Run:
    """Return the run with its models, rows and questions, as when it was made; nothing is written."""
    changes = list(overrides)
    if wrong := [change for change in changes if not change.startswith(_CHANGEABLE)]:
        keys = ", ".join(f"{key.rstrip('.')}" for key in _CHANGEABLE)
        raise UsageError(f"{', '.join(wrong)}: of a finished run, only {keys} can be given anew")
    recipe = load_recipe(opened.recipe, changes)
    if not has_precision(recipe.vector.compute):  # the run was made on another machine
        recipe = load_recipe(opened.recipe, [*changes, "vector.compute=auto"])
    method = load_provenance(opened.folder).method
    plan = msa_plan(recipe) if method == "msa" else plan_baseline(method, recipe)[0]
    return prepare(recipe, replace(plan, folder=opened.folder))
