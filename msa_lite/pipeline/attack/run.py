"""Attack the models of a finished run, and report what the unlearned model gives back.

All models are attacked alike, on the same rows. A model is loaded once for all attacks on it. The records of each
attack and model are a stage of their own, so that a rerun goes on where a stop was. Records of target and ideal from
another run of the recipe are read there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

from msa_lite.attacks.attack import check_attack
from msa_lite.attacks.findings import TrialRecords, judge_model, measured
from msa_lite.catalogue import ATTACKS
from msa_lite.errors import MsaError, OutputError, StageError, UsageError, join_faults
from msa_lite.evals.benchmarks.benchmark import Record
from msa_lite.evals.engine.models import model_identity
from msa_lite.evals.judge.server import check_consent
from msa_lite.evals.scores.records import read_records
from msa_lite.io.console.libraries import require
from msa_lite.io.console.progress import Progress, announce, notices, silent
from msa_lite.io.finished.seal import locked
from msa_lite.io.models.heads import has_precision
from msa_lite.pipeline.attack.campaign import ATTACK_KIND, REFERENCES, Campaign, open_attacks
from msa_lite.pipeline.baseline.entered import entered_scope
from msa_lite.pipeline.baseline.settings import baseline_scope
from msa_lite.pipeline.prepare.run import msa_scope, prepare
from msa_lite.pipeline.run.folder import RunFolder, home_of, open_run
from msa_lite.pipeline.run.report import REPORT_FILES, check_as_written, write_run_report
from msa_lite.pipeline.stages.stage import DryRun, Stage, look_ahead, steps
from msa_lite.recipe import load_recipe
from msa_lite.record.seal import RECORD_FILE
from msa_lite.report import REPORT_FILE, Report, write_report
from msa_lite.report.run.attacks import ATTACKS_FOLDER, AttackFacts, AttackResult, attack_report
from msa_lite.report.run.provenance import purge_day, read_run, recorded_method
from msa_lite.report.run.stages import add_stages
from msa_lite.report.run.story import load_story

logger = logging.getLogger(__name__)

_CHANGEABLE = ("attack.", "evaluate.ideal", "evaluate.holdout")  # keys of a recipe that decide no stage of its run


@dataclass(frozen=True)
class Attacked:
    """The results of the attacks on a run."""

    json_keys: ClassVar = {"output": "folder", "**": "values"}

    folder: Path
    """The folder of the results, `attacks` in the run's."""
    facts: AttackFacts
    """All results."""

    @property
    def values(self) -> dict[str, Any]:
        """Return settings and metrics of all results."""
        report = attack_report(self.facts, {})
        return {**report.settings, "metrics": report.values()}


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
    files = [*_findings(campaign.attacks), *REPORT_FILES, RECORD_FILE]
    return DryRun("attack", campaign.folder, look_ahead(campaign.own_stages()), campaign.remarks, files)


def _open(folder: str | Path, attacks: Sequence[str]) -> RunFolder:
    """Return the finished run in a folder, on which the named attacks are to be made.

    Raise OutputError for a run without an unlearned model, or whose data was purged.
    """
    require("train")
    for name in attacks:
        check_attack(name)
    opened = open_run(folder)
    _refuse_purged(opened.folder)
    opened.check_result("attack")
    return opened


def _refuse_purged(folder: Path) -> None:
    if purge_day(folder) or purge_day(home_of(folder)):
        raise OutputError(f"{folder}: its data was purged, and attacks need the rows to forget")


def _campaign(opened: RunFolder, attacks: Sequence[str], overrides: Iterable[str]) -> Campaign:
    """Return the campaign against a finished run, with everything checked; models, rows and questions are as it was."""
    load_story(opened.folder)  # the report that comes last reads all of it
    changes = list(overrides)
    if wrong := [change for change in changes if not change.startswith(_CHANGEABLE)]:
        keys = ", ".join(key.rstrip(".") for key in _CHANGEABLE)
        raise UsageError(f"{', '.join(wrong)}: of a finished run, only {keys} can be given anew")
    recipe = load_recipe(opened.recipe, changes)
    if not has_precision(recipe.vector.compute):  # the run was made on another machine
        recipe = load_recipe(opened.recipe, [*changes, "vector.compute=auto"])
    name, is_entered = recorded_method(read_run(opened.folder))
    scope = msa_scope(recipe)
    if name is not None:
        scope = entered_scope(name, recipe) if is_entered else baseline_scope(name, recipe)[0]
    campaign = open_attacks(prepare(recipe, replace(scope, folder=opened.folder)), opened.result, attacks)
    check_as_written(opened.folder, [*REPORT_FILES, *_findings(campaign.attacks)])
    if recipe.evaluate and "sample" in campaign.attacks:
        check_consent(recipe.evaluate.judge)
    return campaign


def _findings(attacks: Iterable[str]) -> list[str]:
    """Return the names of the reports of attacks in a run's folder."""
    return [f"{ATTACKS_FOLDER}/{REPORT_FILE}", *(f"{ATTACKS_FOLDER}/{name}/{REPORT_FILE}" for name in attacks)]


def run_attacks(campaign: Campaign, progress: Progress) -> Attacked:
    """Make the attacks of a campaign, as far as they are not made yet, and write their reports, and the run's anew.

    Raise StageError where some attacks failed; the others are made and reported
    before that.
    """
    if missing := campaign.missing():
        _tell(campaign, dict.fromkeys(name for name, _ in missing))
        announce(progress, steps(missing.values()))
    add_stages([stage.listed(campaign.folder) for stage in campaign.own_stages()], campaign.folder)
    failed = _make_records(campaign, missing, progress)
    campaign, out = campaign.without(failed), campaign.folder / ATTACKS_FOLDER
    facts = _judge(campaign)
    if facts.attacks:
        models = {name: model_identity(campaign.subjects[name].source) for name in campaign.models}
        write_report(attack_report(facts, models), out)
        write_run_report(campaign.folder, written=_findings(campaign.attacks))
    if failed:
        lines = [f"{name}: {reason}" for name, reason in failed.items()]
        raise StageError(join_faults(f"{out}: attacks failed; the others are made and reported:", lines))
    return Attacked(out, facts)


def _tell(campaign: Campaign, attacks: Iterable[str]) -> None:
    """Tell what will be attacked, and what will not."""
    notices.info(
        "%s on %s, %d forget rows%s",
        ", ".join(attacks),
        ", ".join(campaign.models),
        len(campaign.ground.forget),
        f" and {len(campaign.ground.holdout)} holdout rows" if campaign.ground.holdout else "",
    )
    for line in campaign.remarks:
        notices.info("%s", line)


def _make_records(campaign: Campaign, missing: Mapping[tuple[str, str], Stage], progress: Progress) -> dict[str, str]:
    """Make the missing records, model by model; return the attacks that failed, with reasons.

    An attack that failed on one model is not made on the next ones: its results would have no control.
    """
    failed: dict[str, str] = {}
    for model, pairs in groupby(missing, lambda pair: pair[1]):
        for name, _ in pairs:
            if name not in failed:
                try:
                    missing[name, model].run(progress)
                except MsaError as error:
                    logger.warning("%s: %s", missing[name, model].name, error)
                    failed[name] = f"failed on {model}: {error}"
        campaign.subjects[model].close()
    return failed


def _judge(campaign: Campaign) -> AttackFacts:
    """Compute the results of all attacks, and write the report of each."""
    results, control, count = [], campaign.control, len(campaign.ground.forget)
    for name, attack in campaign.attacks.items():
        ground, models = campaign.ground_of(attack), campaign.models_of(attack)
        records = {model: _read(campaign.folder_of(name, model)) for model in models}
        judged = {
            model: judge_model(records, model, attack, ground, control) for model in models if model not in REFERENCES
        }
        result = AttackResult(name, ATTACKS[name].summary, attack.source, control, count, judged)
        results.append(result)
        metrics = {
            f"{trial}.{measure}.{model}": metric
            for (model, trial, measure), metric in measured(records, attack.measures(ground)).items()
        }
        settings = attack_report(AttackFacts((result,)), {}).settings["attacks"][0] | {"settings": attack.describe()}
        write_report(Report(ATTACK_KIND, name, metrics, settings), campaign.folder / ATTACKS_FOLDER / name)
    return AttackFacts(tuple(results), campaign.left_out)


def _read(folder: Path) -> TrialRecords:
    """Return the records of an attack on one model: by trial, then by set."""
    records: dict[str, dict[str, list[Record]]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        trial, set_name = path.name.removesuffix(".jsonl").rsplit(".", 1)
        records.setdefault(trial, {})[set_name] = read_records(path)
    return records
