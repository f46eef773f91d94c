"""Attack the models of a finished run: does the unlearned model give back what it was to forget?

All models are attacked alike, on the same rows. A model is loaded once for all attacks on it. The records of each
attack and model are a stage of their own, so that a rerun goes on where a stop was. Records of target and ideal from
another run of the recipe are used again.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msa_lite.attack_names import ATTACKS
from msa_lite.attacks.attack import Subject, make_attack
from msa_lite.attacks.findings import TrialRecords, judge_model, measured
from msa_lite.budget.speed import ScoreTimes
from msa_lite.data import encode_qa, encode_text
from msa_lite.errors import OutputError, UsageError
from msa_lite.evals.benchmark import Record
from msa_lite.evals.models import model_identity
from msa_lite.evals.records import read_records, write_records
from msa_lite.io.extras import require
from msa_lite.io.lock import locked
from msa_lite.io.manifest import is_finished, stage_folder
from msa_lite.io.progress import Progress, announce, duration, notices, part_of, silent
from msa_lite.io.seal import load_manifest
from msa_lite.pipeline.attack_ground import limit_ground, make_ground
from msa_lite.pipeline.attack_plan import (
    REFERENCES,
    UNLEARNED,
    AttackPlan,
    attack_label,
    default_rows,
    plan_attacks,
)
from msa_lite.pipeline.baseline import plan_baseline
from msa_lite.pipeline.folder import BASELINES
from msa_lite.pipeline.msa import msa_plan
from msa_lite.pipeline.planning_measure import time_scores
from msa_lite.pipeline.prepare import Run, prepare
from msa_lite.pipeline.reopen import RunFolder, open_run
from msa_lite.pipeline.reporting import write_run_report
from msa_lite.recipe import load_recipe
from msa_lite.record.write import write_attacks
from msa_lite.report import Report, write_report
from msa_lite.report.attacks import ATTACKS_FOLDER, AttackFacts, AttackResult, attack_report
from msa_lite.report.provenance import RECIPE_FILE, load_provenance
from msa_lite.report.purged import PURGED_FILE

ATTACK_KIND = "attack"
_TIMED_ROWS = 16
_CHANGEABLE = ("attack.", "evaluate.ideal", "evaluate.holdout")  # keys of a recipe that decide no stage of its run


@dataclass(frozen=True)
class Attacked:
    """The results of the attacks on a run."""

    folder: Path
    """The folder of the results, `attacks` in the run's."""
    facts: AttackFacts
    """All results."""

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON-able form, for `--json`."""
        report = attack_report(self.facts, {})
        return {"output": str(self.folder), **report.settings, "metrics": report.values()}


def attack(
    folder: str | Path,
    attacks: Sequence[str] | None = None,
    *,
    overrides: Iterable[str] = (),
    models: Mapping[str, str] | None = None,
    budget: float | None = None,
    progress: Progress = silent,
) -> Attacked:
    """Attack target, ideal and unlearned model of a run, and report what the unlearned model gives back.

    attacks: their names (`ATTACKS`); None: those of the recipe's key `attack`, or all that the run allows. overrides:
    changes of the recipe, as "attack.rows=100". models: further models to attack, by name. budget: seconds that all of
    it may take by prediction. Write attacks/NAME/ with records and report.json, attacks/report.json, and the run's
    report anew. What was made from the same inputs stays as it is.

    Raise UsageError for what is no run, OutputError for a run that is not finished, and UsageError with all that
    forbids the attacks, before any work.
    """
    require("train")
    opened = open_run(folder)
    _check_finished(opened)
    run = _prepare(opened, overrides)
    names = list(attacks or run.recipe.attack.attacks or ATTACKS)
    named = bool(attacks or run.recipe.attack.attacks)
    made = {name: make_attack(name, run.recipe.attack.settings(name)) for name in ATTACKS if name in _known(names)}
    ground = limit_ground(make_ground(run), run.recipe.attack.rows or default_rows())
    plan = plan_attacks(run, opened.result, made, ground, models or {}, named)
    with locked(opened.folder):
        _take_over(plan, opened)
        if _unfinished(plan):
            times = _measure(plan)
            plan = plan.within(budget, times) if budget is not None else plan
            _tell(plan, times)
            announce(progress, plan.steps(times))
        _run_attacks(plan, progress)
        facts = _judge(plan)
        models_made_of = {name: model_identity(plan.sources[name]) for name in plan.models}
        out = opened.folder / ATTACKS_FOLDER
        write_report(attack_report(facts, models_made_of), out)
        write_attacks(opened.folder)
        write_run_report(opened.folder)
    return Attacked(out, facts)


def _known(names: Sequence[str]) -> Sequence[str]:
    """Return the names. Raise UsageError for one that no attack has."""
    for name in names:
        if name not in ATTACKS:
            make_attack(name, {})  # raises, with the nearest name
    return names


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
    if wrong := [
        change for change in changes if not change.startswith(("attack.", "evaluate.ideal", "evaluate.holdout"))
    ]:
        raise UsageError(f"{', '.join(wrong)}: a finished run takes only attack.*, evaluate.ideal and evaluate.holdout")
    recipe = load_recipe(opened.recipe, changes)
    method = load_provenance(opened.folder).method
    plan = msa_plan(recipe) if method == "msa" else plan_baseline(method, recipe)[0]
    return prepare(recipe, replace(plan, folder=opened.folder))


def _take_over(plan: AttackPlan, opened: RunFolder) -> None:
    """Copy finished records of target and ideal from the recipe's other runs, where their inputs are the same."""
    homes = [opened.home, *sorted((opened.home / BASELINES).glob("*"))]
    for name, one in plan.attacks.items():
        for model in plan.of(one):
            out, inputs = plan.folder_of(name, model), plan.inputs(name, model)
            if model not in REFERENCES or out.exists():
                continue
            for home in homes:
                other = home / ATTACKS_FOLDER / name / model
                if home.resolve() != plan.folder.resolve() and is_finished(other, inputs):
                    out.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copytree(other, out.with_name(f"{model}.tmp"), dirs_exist_ok=True)
                    out.with_name(f"{model}.tmp").rename(out)
                    break


def _unfinished(plan: AttackPlan) -> bool:
    return any(
        not is_finished(plan.folder_of(name, model), plan.inputs(name, model))
        for name, one in plan.attacks.items()
        for model in plan.of(one)
    )


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


def _run_attacks(plan: AttackPlan, progress: Progress) -> None:
    """Make the records of all attacks that are missing, model by model."""
    subjects = {name: Subject(name, source) for name, source in plan.sources.items()}
    for model in plan.models:
        for name, one in plan.attacks.items():
            if model not in plan.of(one):
                continue
            out, inputs = plan.folder_of(name, model), plan.inputs(name, model)
            if is_finished(out, inputs):
                continue
            label = attack_label(name, model)
            others = {other: subjects[other] for other in one.uses if other in subjects and other != model}
            with stage_folder(
                out, ATTACK_KIND, inputs, {"sources": {"model": plan.sources[model].pinned()}}
            ) as partial:
                for trial, records in one.run(subjects[model], plan.ground, others, part_of(progress, label, 0, 1)):
                    for part, rows in records.items():
                        write_records(partial / f"{trial.name}.{part}.jsonl", rows)
            progress(label, 1, 1)
            for other in others.values():
                other.close()
        subjects[model].close()


def _judge(plan: AttackPlan) -> AttackFacts:
    """Compute the results of all attacks, and write the report of each."""
    results = []
    for name, one in plan.attacks.items():
        drawn = {model: _read(plan.folder_of(name, model)) for model in plan.of(one)}
        models = {
            model: judge_model(drawn, model, one, plan.ground, plan.control)
            for model in plan.of(one)
            if model not in REFERENCES
        }
        result = AttackResult(name, ATTACKS[name].summary, one.source, plan.control, len(plan.ground.forget), models)
        results.append(result)
        metrics = {
            f"{trial}.{measure}.{model}": metric
            for (model, trial, measure), metric in measured(drawn, one.measures(plan.ground)).items()
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
