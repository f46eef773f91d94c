"""Attack the models of a finished run: does the unlearned model give back what it was to forget?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from msa_lite.attacks.attack import check_attack
from msa_lite.errors import OutputError, UsageError
from msa_lite.io.console.libraries import require
from msa_lite.io.console.progress import Progress, silent
from msa_lite.io.finished.seal import load_manifest, locked
from msa_lite.io.models.heads import has_precision
from msa_lite.pipeline.attack.campaign import Campaign, open_attacks
from msa_lite.pipeline.attack.run import Attacked, run_attacks
from msa_lite.pipeline.baseline.settings import baseline_scope
from msa_lite.pipeline.prepare.run import Run, msa_scope, prepare
from msa_lite.pipeline.run.folder import RunFolder, home_of, open_run
from msa_lite.pipeline.run.report import REPORT_FILES
from msa_lite.pipeline.stages.stage import look_ahead
from msa_lite.pipeline.verbs.dry_run import DryRun
from msa_lite.recipe import load_recipe
from msa_lite.record.seal import RECORD_FILE
from msa_lite.report import REPORT_FILE
from msa_lite.report.run.attacks import ATTACKS_FOLDER
from msa_lite.report.run.provenance import RECIPE_FILE, purge_day, read_run, recorded_baseline
from msa_lite.report.run.story import load_story

_CHANGEABLE = ("attack.", "evaluate.ideal", "evaluate.holdout")  # keys of a recipe that decide no stage of its run


def attack(
    folder: str | Path, attacks: Sequence[str] = (), *, overrides: Iterable[str] = (), progress: Progress = silent
) -> Attacked:
    """Attack target, ideal and unlearned model of a run, and report what the unlearned model gives back.

    attacks: their names (`msa_lite.catalogue`). Default: those of the recipe's key `attack`, or all that the run
    allows. overrides: changes of the recipe, as "attack.rows=100". Write attacks/NAME/ with records and report.json,
    attacks/report.json, and a new report of the run. Results from the same inputs are kept.

    Raise before any work: UsageError for a folder that is no run, and with all reasons against the attacks; OutputError
    for an unfinished run. Raise StageError if attacks failed, once the others are reported.
    """
    opened = _open(folder, attacks)
    with locked(opened.folder):
        _refuse_purged(opened.folder)  # again: a purge may have come before the lock
        return run_attacks(_campaign(opened, attacks, overrides), progress)


def dry_attack(folder: str | Path, attacks: Sequence[str] = (), overrides: Iterable[str] = ()) -> DryRun:
    """Return what `attack` would do with the same arguments; raise what it raises before its work. Write nothing."""
    campaign = _campaign(_open(folder, attacks), attacks, overrides)
    files = [f"{ATTACKS_FOLDER}/{REPORT_FILE}", *REPORT_FILES, RECORD_FILE]
    return DryRun("attack", campaign.folder, look_ahead(campaign.own_stages()), campaign.remarks, files)


def _open(folder: str | Path, attacks: Sequence[str]) -> RunFolder:
    """Return the finished run in a folder, on which the named attacks are to be made."""
    require("train")
    for name in attacks:
        check_attack(name)
    opened = open_run(folder)
    _check_finished(opened)
    return opened


def _campaign(opened: RunFolder, attacks: Sequence[str], overrides: Iterable[str]) -> Campaign:
    """Return the campaign against a finished run, with everything checked."""
    load_story(opened.folder)  # the report that comes last reads all of it
    return open_attacks(_prepare(opened, overrides), opened.result, attacks)


def _check_finished(run: RunFolder) -> None:
    """Raise OutputError for a run without an unlearned model, or whose data was purged."""
    _refuse_purged(run.folder)
    if load_manifest(run.result) is None:
        raise OutputError(
            f"{run.folder}: there is no unlearned model to attack yet; finish the run first (the command is in the "
            f"first line of {run.folder / RECIPE_FILE})"
        )


def _refuse_purged(folder: Path) -> None:
    if purge_day(folder) or purge_day(home_of(folder)):
        raise OutputError(f"{folder}: its data was purged, and attacks need the rows to forget")


def _prepare(opened: RunFolder, overrides: Iterable[str]) -> Run:
    """Return the run with its models, rows and questions, as when it was made; nothing is written."""
    changes = list(overrides)
    if wrong := [change for change in changes if not change.startswith(_CHANGEABLE)]:
        keys = ", ".join(f"{key.rstrip('.')}" for key in _CHANGEABLE)
        raise UsageError(f"{', '.join(wrong)}: of a finished run, only {keys} can be given anew")
    recipe = load_recipe(opened.recipe, changes)
    if not has_precision(recipe.vector.compute):  # the run was made on another machine
        recipe = load_recipe(opened.recipe, [*changes, "vector.compute=auto"])
    baseline = recorded_baseline(read_run(opened.folder))
    scope = baseline_scope(baseline, recipe)[0] if baseline else msa_scope(recipe)
    return prepare(recipe, replace(scope, folder=opened.folder))
