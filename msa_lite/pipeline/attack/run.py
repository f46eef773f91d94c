"""Attack the models of a prepared run, and report what the unlearned model gives back.

All models are attacked alike, on the same rows. A model is loaded once for all attacks on it. The records of each
attack and model are a stage of their own, so that a rerun goes on where a stop was. Records of target and ideal from
another run of the recipe are used again.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

from msa_lite.attack_names import ATTACKS
from msa_lite.attacks.attack import Subject, make_attack
from msa_lite.attacks.findings import TrialRecords, judge_model, measured
from msa_lite.budget.speed import ScoreTimes
from msa_lite.data import encode_qa, encode_text
from msa_lite.errors import MsaError, StageError, join_faults
from msa_lite.evals.benchmark import Record
from msa_lite.evals.models import model_identity
from msa_lite.evals.records import read_records, write_records
from msa_lite.io.console.progress import Progress, announce, duration, notices, under
from msa_lite.io.finished.manifest import stage_folder
from msa_lite.io.finished.seal import load_manifest
from msa_lite.pipeline.attack.ground import limit_ground, make_ground, open_rewording
from msa_lite.pipeline.attack.plan import REFERENCES, UNLEARNED, AttackPlan, attack_label, default_rows, plan_attacks
from msa_lite.pipeline.prepare.run import Run, judge_settings
from msa_lite.pipeline.run.report import write_run_report
from msa_lite.pipeline.stages.measure import time_scores
from msa_lite.record.facts import write_attacks
from msa_lite.report import Report, write_report
from msa_lite.report.attacks import ATTACKS_FOLDER, AttackFacts, AttackResult, attack_report, load_attacks
from msa_lite.report.rows import SideBySide

logger = logging.getLogger(__name__)

ATTACK_KIND = "attack"
_TIMED_ROWS = 16


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


def open_attacks(
    run: Run, result: Path | None, names: Sequence[str] = (), models: Mapping[str, str] | None = None
) -> AttackPlan:
    """Return the plan of attacks on a run, with everything that can be checked before any work.

    result: the folder of the unlearned model; None before there is one. names: of the attacks; empty: those that the
    recipe names, or all that are possible. models: further models to attack, by name. Raise UsageError with all that
    forbids the attacks.
    """
    keys = run.recipe.attack
    wanted = names or keys.attacks
    of_run: dict[str, dict[str, Any]] = {"relearn": {"compute": run.recipe.vector.compute}}
    if run.judge.kind != "none":
        of_run["sample"] = {"judge": run.judge}
    made = {name: make_attack(name, keys.settings(name) | of_run.get(name, {})) for name in wanted or ATTACKS}
    ground = limit_ground(make_ground(run), keys.rows or default_rows())
    rewording = open_rewording(run.recipe.folder, judge_settings(keys.prompt.judge), ground, "prompt" in made)
    ground = rewording.known(ground) if rewording else ground
    plan = plan_attacks(run, result, {name: made[name] for name in ATTACKS if name in made}, ground, models or {},
                        bool(wanted))  # fmt: skip
    return replace(plan, rewording=rewording)


def run_attacks(
    plan: AttackPlan, progress: Progress, budget: float | None = None, examples: Sequence[SideBySide] = ()
) -> Attacked:
    """Make the attacks of a plan, as far as they are not made yet, and write their reports, and the run's anew.

    budget: seconds that they may take by prediction. examples: those of the run's report. Raise UsageError where not
    even one attack fits, and StageError where some failed; the others are made and reported before that.
    """
    plan, times = fit_to_budget(plan, budget)
    if times:
        _tell(plan, times)
        announce(progress, plan.steps(times))
    plan, failed = _reword(plan, progress)
    _take_over(plan)
    failed |= _make_records(plan, progress)
    plan, out = plan.without(failed), plan.folder / ATTACKS_FOLDER
    facts, models = _with_earlier(plan, _judge(plan))
    if facts.attacks:
        write_report(attack_report(facts, models), out)
        write_attacks(plan.folder)
        write_run_report(plan.folder, examples)
    if failed:
        lines = [f"{name}: {reason}" for name, reason in failed.items()]
        raise StageError(join_faults(f"{out}: attacks failed; the others are made and reported:", lines))
    return Attacked(out, facts)


def fit_to_budget(plan: AttackPlan, budget: float | None) -> tuple[AttackPlan, ScoreTimes | None]:
    """Return a plan that takes no longer than a budget by prediction, and the times that were measured for it.

    budget: seconds; None: any time. The times are None if nothing is left to be made. Raise UsageError where not even
    one attack fits.
    """
    if not plan.missing():
        return plan, None
    times = _measure(plan)
    return (plan if budget is None else plan.within(budget, times)), times


def _reword(plan: AttackPlan, progress: Progress) -> tuple[AttackPlan, dict[str, str]]:
    """Have the judge reword the questions that it has not reworded yet.

    Return the plan with all rewordings; if the judge failed, the plan without the attack that asks them, and why.
    """
    if not (plan.rewording and plan.to_reword()):
        return plan, {}
    try:
        return replace(plan, ground=plan.rewording.make(plan.ground, progress)), {}
    except MsaError as error:
        failed = {"prompt": f"no rewordings: {error}"}
        return plan.without(failed), failed


def _with_earlier(plan: AttackPlan, facts: AttackFacts) -> tuple[AttackFacts, dict[str, Any]]:
    """Return the results with those of other attacks that were made before, and the identities of all models.

    Results on other models or rows, or beside another control, are left out: they would be read as shares between the
    models of this report.
    """
    models = {name: model_identity(plan.sources[name]) for name in plan.models}
    earlier = load_attacks(plan.folder / ATTACKS_FOLDER, plan.sources[UNLEARNED].folder)
    if earlier is None:
        return facts, models
    known = {attack.name: attack for attack in facts.attacks}
    # "relearn, part" is a part of an attack, which may be made now.
    before = {name: reason for name, reason in earlier.left_out.items() if name.partition(",")[0] not in known}
    left_out = before | dict(facts.left_out)
    for attack in earlier.attacks:
        if attack.name not in known and attack.name in ATTACKS:
            recorded = _recorded_models(plan, attack) if attack.control == plan.control else None
            if recorded is None:
                left_out[attack.name] = "was made with other models or rows before; make it again"
            else:
                known[attack.name] = attack
                models |= {name: identity for name, identity in recorded.items() if name not in models}
    left_out = {name: reason for name, reason in left_out.items() if name not in known}
    return AttackFacts(tuple(known[name] for name in ATTACKS if name in known), left_out), models


def _recorded_models(plan: AttackPlan, earlier: AttackResult) -> dict[str, Any] | None:
    """Return the identities of the models of an earlier attack, by its records.

    Return None where a model of the plan, or the rows, were others then.
    """
    plan, recorded = replace(plan, attacks={earlier.name: make_attack(earlier.name, {})}), {}
    references = [model for model in plan.of(plan.attacks[earlier.name]) if model in REFERENCES]
    for model in [*references, *earlier.models]:
        manifest, is_known = load_manifest(plan.folder_of(earlier.name, model)), model in plan.sources
        inputs = manifest["inputs"] if manifest else {}
        present = plan.inputs(earlier.name, model if is_known else UNLEARNED)
        if any(inputs.get(part) != present[part] for part in ("others", "rows", *(["model"] if is_known else []))):
            return None
        recorded[model] = inputs["model"]
    return recorded


def _take_over(plan: AttackPlan) -> None:
    """Copy finished records of target and ideal from the recipe's other runs, where their inputs are the same."""
    for name, model in plan.pairs():
        out, found = plan.folder_of(name, model), plan.found(name, model)
        if found and found != out:
            out.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(found, out.with_name(f"{model}.tmp"), dirs_exist_ok=True)
            out.with_name(f"{model}.tmp").rename(out)


def _measure(plan: AttackPlan) -> ScoreTimes:
    """Return how long loading, scoring and answering take on this machine, by a few rows and the unlearned model."""
    ground, rows = plan.ground, plan.ground.forget[:_TIMED_ROWS]
    tokenizer = ground.prompter.tokenizer
    texts = encode_text(rows, tokenizer, ground.max_length) if rows[0].text else encode_qa(rows, ground.prompter)
    return time_scores(plan.sources[UNLEARNED], tokenizer, texts)


def _tell(plan: AttackPlan, times: ScoreTimes) -> None:
    """Tell what will be attacked, and in how much time."""
    notices.info(
        "%s on %s, %d forget rows%s: about %s",
        ", ".join(plan.attacks),
        ", ".join(plan.models),
        len(plan.ground.forget),
        f" and {len(plan.ground.holdout)} holdout rows" if plan.ground.holdout else "",
        duration(plan.seconds(times)),
    )
    for name, reason in plan.left_out.items():
        notices.info("%s is left out: %s", name, reason)
    for line in plan.too_few_rows:
        notices.info("%s", line)


def _make_records(plan: AttackPlan, progress: Progress) -> dict[str, str]:
    """Make the records of all attacks that are missing, model by model; return the attacks that failed, with reasons.

    An attack that failed on one model is not made on the next ones: its results would have no control.
    """
    subjects, failed = {name: Subject(name, source) for name, source in plan.sources.items()}, dict[str, str]()
    for model, pairs in groupby(plan.missing(), lambda pair: pair[1]):
        for name, _ in pairs:
            if name not in failed:
                try:
                    _make(plan, name, subjects[model], subjects, progress)
                except MsaError as error:
                    logger.warning("%s: %s", attack_label(name, model), error)
                    failed[name] = f"failed on {model}: {error}"
        subjects[model].close()
    return failed


def _make(plan: AttackPlan, name: str, subject: Subject, subjects: Mapping[str, Subject], progress: Progress) -> None:
    """Make the records of an attack on one model."""
    one, inputs = plan.attacks[name], plan.inputs(name, subject.name)
    others = {other: subjects[other] for other in one.uses if other in subjects and other != subject.name}
    facts = {"sources": {"model": subject.source.pinned()}}
    shown = under(progress, attack_label(name, subject.name))
    try:
        with stage_folder(plan.folder_of(name, subject.name), ATTACK_KIND, inputs, facts) as partial:
            for trial, records in one.run(subject, plan.ground_of(one), others, shown):
                for part, rows in records.items():
                    write_records(partial / f"{trial.name}.{part}.jsonl", rows)
    finally:
        for other in others.values():
            other.close()


def _judge(plan: AttackPlan) -> AttackFacts:
    """Compute the results of all attacks, and write the report of each."""
    results = []
    for name, one in plan.attacks.items():
        drawn = {model: _read(plan.folder_of(name, model)) for model in plan.of(one)}
        models = {
            model: judge_model(drawn, model, one, plan.ground_of(one), plan.control)
            for model in plan.of(one)
            if model not in REFERENCES
        }
        result = AttackResult(name, ATTACKS[name].summary, one.source, plan.control, len(plan.ground.forget), models)
        results.append(result)
        metrics = {
            f"{trial}.{measure}.{model}": metric
            for (model, trial, measure), metric in measured(drawn, one.measures(plan.ground_of(one))).items()
        }
        settings = attack_report(AttackFacts((result,)), {}).settings["attacks"][0] | {"settings": one.describe()}
        write_report(Report(ATTACK_KIND, name, metrics, settings), plan.folder / ATTACKS_FOLDER / name)
    return AttackFacts(tuple(results), plan.left_out)


def _read(folder: Path) -> TrialRecords:
    """Return the records of an attack on one model: by trial, then by set."""
    drawn: dict[str, dict[str, list[Record]]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        trial, part = path.name.removesuffix(".jsonl").rsplit(".", 1)
        drawn.setdefault(trial, {})[part] = read_records(path)
    return drawn
