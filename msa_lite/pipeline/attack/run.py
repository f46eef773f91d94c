"""Attack the models of a prepared run, and report what the unlearned model gives back.

All models are attacked alike, on the same rows. A model is loaded once for all attacks on it. The records of each
attack and model are a stage of their own, so that a rerun goes on where a stop was. Records of target and ideal from
another run of the recipe are read there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

from msa_lite.attacks.findings import TrialRecords, judge_model, measured
from msa_lite.catalogue import ATTACKS
from msa_lite.errors import MsaError, StageError, join_faults
from msa_lite.evals.benchmarks.benchmark import Record
from msa_lite.evals.engine.models import model_identity
from msa_lite.evals.scores.records import read_records
from msa_lite.io.console.progress import Progress, announce, notices
from msa_lite.pipeline.attack.campaign import ATTACK_KIND, REFERENCES, Campaign
from msa_lite.pipeline.run.report import write_run_report
from msa_lite.pipeline.stages.stage import Stage, steps
from msa_lite.report import Report, write_report
from msa_lite.report.run.attacks import ATTACKS_FOLDER, AttackFacts, AttackResult, attack_report
from msa_lite.report.run.stages import add_stages

logger = logging.getLogger(__name__)


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
        write_run_report(campaign.folder)
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
