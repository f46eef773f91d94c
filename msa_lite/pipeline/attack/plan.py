"""Plan the attacks on a run before any work: which of them, on which models and rows, in how much time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from msa_lite.attacks.attack import Attack, Cost, Ground, check_unquantised
from msa_lite.budget.speed import ScoreTimes
from msa_lite.data import sample_rows
from msa_lite.errors import Faults, UsageError, join_faults
from msa_lite.evals.models import check_source, model_identity
from msa_lite.evals.suite import check_same_tokens
from msa_lite.io.console.progress import Step, duration
from msa_lite.io.files.writing import digest
from msa_lite.io.finished.manifest import is_finished
from msa_lite.io.weights.hub import Source, fetch
from msa_lite.pipeline.attack.ground import Rewording, limit_ground
from msa_lite.pipeline.prepare.models import fit_prior
from msa_lite.pipeline.prepare.run import Run
from msa_lite.pipeline.run.folder import BASELINES
from msa_lite.pipeline.stages.stage import Stage
from msa_lite.report.attacks import ATTACKS_FOLDER, FEWEST_ROWS, MOST_BACK, AttackControl
from msa_lite.report.sentence import percent

UNLEARNED = "unlearned"
REFERENCES = ("ideal", "target")  # attacked like all others, since the results are shares between these two
_ROWS = {False: 40, True: 400}  # forget rows that are attacked by default, without and with a GPU
_FEWEST = 20  # forget rows that a budget may lead to: a few more than an attack can hold on (`FEWEST_ROWS`)
_BACKWARD = 3.5  # times a forward pass: that, the backward pass, the step of the optimiser


@dataclass(frozen=True)
class AttackPlan:
    """Everything that the attacks on a run need."""

    folder: Path
    """The run's folder."""
    home: Path
    """The folder of the recipe: the run's own, or for the run of a baseline the one above `baselines`."""
    attacks: Mapping[str, Attack]
    """The attacks by name, in their order."""
    sources: Mapping[str, Source]
    """The attacked models by name, in the order in which they are loaded, and others that attacks look at."""
    models: Sequence[str]
    """The names of the attacked models: ideal and target first."""
    ground: Ground
    """The rows."""
    control: AttackControl
    left_out: Mapping[str, str]
    """Attacks that cannot be made on this run, each with the reason."""
    rewording: Rewording | None = None
    """The judge that rewords the questions for the attack prompt."""

    def of(self, attack: Attack) -> list[str]:
        """Return the models that an attack is made on."""
        return _models_of(attack, self.models)

    def ground_of(self, attack: Attack) -> Ground:
        """Return the rows of an attack."""
        return _ground_of(attack, self.ground, self.control)

    def folder_of(self, name: str, model: str) -> Path:
        """Return the folder of an attack's records of a model."""
        return self.folder / ATTACKS_FOLDER / name / model

    def inputs(self, name: str, model: str) -> dict[str, Any]:
        """Return all that decides the records of an attack on a model, as their manifest records it."""
        attack = self.attacks[name]
        others = {other: model_identity(self.sources[other]) for other in attack.uses if other in self.sources}
        return {
            "attack": name,
            "settings": attack.describe(),
            "model": model_identity(self.sources[model]),
            "others": others,
            "rows": digest(self.ground_of(attack).describe(attack.reads)),
        }

    @property
    def too_few_rows(self) -> list[str]:
        """Return a line for each attack, or part of one, that cannot hold on so few rows, whatever they show."""
        lines = []
        for name, attack in self.attacks.items():
            counts = attack.count_rows(self.ground)
            few = {part: rows for part, rows in counts.items() if rows < FEWEST_ROWS}
            if few and len(few) == len(counts):
                few = {"": max(few.values())}
            for part, rows in few.items():
                lines.append(
                    f"{f'{name}, {part}' if part else name}: with {rows} rows no interval can end at "
                    f"{percent(MOST_BACK)} or below, so it stays undecided at best; {FEWEST_ROWS} rows are needed"
                )
        return lines

    def pairs(self) -> list[tuple[str, str]]:
        """Return each attack with each of its models, in the order of the work: model by model."""
        return [(name, model) for model in self.models for name in self.attacks if model in self.of(self.attacks[name])]

    def found(self, name: str, model: str) -> Path | None:
        """Return the folder with the records of an attack on a model, from the same inputs; None: they are to be made.

        It is the plan's own, or for target and ideal that of another run of the recipe.
        """
        own, inputs = self.folder_of(name, model), self.inputs(name, model)
        if is_finished(own, inputs):
            return own
        if model not in REFERENCES or own.exists():
            return None
        homes = [self.home, *sorted((self.home / BASELINES).glob("*"))]
        others = (home / ATTACKS_FOLDER / name / model for home in homes if home.resolve() != self.folder.resolve())
        return next((other for other in others if is_finished(other, inputs)), None)

    def missing(self) -> list[tuple[str, str]]:
        """Return the pairs whose records are still to be made."""
        return [pair for pair in self.pairs() if not self.found(*pair)]

    def steps(self, times: ScoreTimes) -> list[Step]:
        """Return the steps that are still to be made, with predicted seconds. The first of a model loads it."""
        steps, loaded = [], set()
        for name, model in self.missing():
            cost = self.attacks[name].cost(self.ground_of(self.attacks[name]))
            load = 0.0 if model in loaded else times.load
            loaded.add(model)
            steps.append(Step(attack_label(name, model), "attack", load + cost_seconds(cost, times)))
        return steps

    def within(self, budget: float, times: ScoreTimes) -> AttackPlan:
        """Return a plan that takes no longer than the budget by prediction: with fewer rows, then with fewer attacks.

        What is made already costs nothing. A plan that was begun in this run's folder goes on with its rows, as long
        as one of its attacks fits, so that a rerun with a budget ends what the first one began. budget: seconds. Raise
        UsageError where not even one attack fits.
        """
        plans = [self]
        while len(plans[-1].ground.forget) > _FEWEST:
            rows = max(_FEWEST, len(plans[-1].ground.forget) * 3 // 4)
            plans.append(replace(self, ground=limit_ground(self.ground, rows)))
        begun = [plan for plan in plans if plan.is_begun]
        fitting = (plan for plan in plans if plan.seconds(times) <= budget)
        for plan in (*begun[:1], next(fitting, plans[-1]), plans[-1]):
            costs = {name: plan.only([name]).seconds(times) for name in plan.attacks}
            reduced = plan
            while reduced.attacks and reduced.seconds(times) > budget:
                dearest = max(reduced.attacks, key=lambda name: costs[name])
                reason = f"takes about {duration(costs[dearest])}, and the budget is {duration(budget)}"
                reduced = reduced.without({dearest: reason})
            if reduced.attacks:
                return reduced
        cheapest = min(costs, key=lambda name: costs[name])
        raise UsageError(
            f"--budget: {duration(budget)} is too little for one attack: {cheapest} alone takes about "
            f"{duration(costs[cheapest])} on {len(plan.ground.forget)} rows"
        )

    @property
    def is_begun(self) -> bool:
        """Check whether the run's own folder holds records of this plan; those of target and ideal may be another's."""
        return any(self.found(*pair) == self.folder_of(*pair) for pair in self.pairs())

    def only(self, names: Sequence[str]) -> AttackPlan:
        """Return the plan of some of its attacks."""
        return replace(self, attacks={name: self.attacks[name] for name in names})

    def to_reword(self) -> list[str]:
        """Return the questions that a judge has still to reword."""
        return self.rewording.missing(self.ground) if self.rewording and "prompt" in self.attacks else []

    def without(self, reasons: Mapping[str, str]) -> AttackPlan:
        """Return the plan without some attacks, each with the reason."""
        attacks = {name: attack for name, attack in self.attacks.items() if name not in reasons}
        return replace(self, attacks=attacks, left_out={**self.left_out, **reasons})

    def seconds(self, times: ScoreTimes) -> float:
        """Return the predicted time of what is still to be made."""
        return sum(step.amount for step in self.steps(times))


def attack_stages(plan: AttackPlan) -> list[Stage]:
    """Return the stages of a plan: the records of each attack on each model, in the order of the work."""
    return [
        Stage(
            attack_label(name, model),
            "attack",
            plan.folder_of(name, model),
            inputs=partial(plan.inputs, name, model),
        )
        for name, model in plan.pairs()
    ]


def attack_label(name: str, model: str) -> str:
    """Return the label of an attack's progress."""
    return f"{name}: {model}"


def cost_seconds(cost: Cost, times: ScoreTimes) -> float:
    """Return the predicted seconds of some work, by the times that were measured on this machine."""
    return cost.scored * times.token + cost.generated * times.new_token + _BACKWARD * cost.trained * times.token


def default_rows() -> int:
    """Return the forget rows that are attacked where nothing else is said: 40 on a CPU, 400 on a GPU."""
    import torch

    return _ROWS[torch.cuda.is_available()]


def plan_attacks(
    run: Run, result: Path | None, attacks: Mapping[str, Attack], ground: Ground, more: Mapping[str, str], wanted: bool
) -> AttackPlan:
    """Return the plan of attacks on a run, with settings of attacks that depend on the models fixed for all of them.

    result: the folder of the unlearned model; None before there is one. more: further models by name. wanted: the user
    named the attacks, so that one that cannot be made is an error; else it is left out, with the reason. Raise
    UsageError with all that forbids the attacks, before any work.
    """
    sources = _sources(run, result, more)
    control = _control(run, ground)
    models = [name for name in (*REFERENCES, UNLEARNED, *more) if name in sources]
    faults, left_out, possible = Faults(), dict[str, str](), dict[str, Attack]()
    for name, attack in attacks.items():
        rows = _ground_of(attack, ground, control)
        reasons = Faults(UsageError(reason) for reason in _lacking(attack, sources, ground) or attack.faults(rows))
        if not reasons:
            with reasons.gathered(""):
                used = [*_models_of(attack, models), *(other for other in attack.uses if other in sources)]
                possible[name] = attack.fit_to({model: sources[model] for model in used})
                left_out |= {f"{name}, {part}": reason for part, reason in attack.left_out(rows).items()}
        if reasons and not wanted:
            left_out[name] = "; ".join(map(str, reasons))
        for reason in reasons if wanted else ():
            with faults.gathered(f"{name}: "):
                raise reason
    faults.check()
    if not possible:
        lines = [f"{name}: {reason}" for name, reason in left_out.items()]
        raise UsageError(join_faults(f"{run.folder}: no attack is possible on this run:", lines))
    return AttackPlan(run.folder, run.recipe.folder, possible, sources, models, ground, control, left_out)


def _models_of(attack: Attack, models: Sequence[str]) -> list[str]:
    """Return the models that an attack is made on."""
    return [name for name in models if not attack.only_results or name not in REFERENCES]


def _ground_of(attack: Attack, ground: Ground, control: AttackControl) -> Ground:
    """Return the rows of an attack: holdout rows only where it needs them, or, as many as forget rows, as control."""
    if "holdout" in attack.needs:
        return ground
    count = len(ground.forget) if control == "holdout" else 0
    return replace(ground, holdout=sample_rows(ground.holdout, count, ground.seed))


def _control(run: Run, ground: Ground) -> AttackControl:
    """Return what the results are held against. Raise UsageError where there is nothing."""
    if "ideal" in run.sources:
        return "ideal"
    if ground.holdout:
        return "holdout"
    raise UsageError(
        f"{run.folder}: there is no control: an attack may teach or give away what it seems to bring back. Give an "
        "ideal model (evaluate.ideal=MODEL), or rows of the same kind that no model saw (evaluate.holdout.path=FILE)"
    )


def _lacking(attack: Attack, sources: Mapping[str, Source], ground: Ground) -> list[str]:
    """Return a line for each thing that an attack needs and the run lacks."""
    words = {
        "retain": (ground.retain, "needs rows to keep (retain.data)"),
        "holdout": (ground.holdout, "needs rows of the same kind that no model saw (evaluate.holdout)"),
        "ideal": ("ideal" in sources, "needs an ideal model (evaluate.ideal)"),
        "target": ("target" in sources, "needs the target"),
        "prior": ("prior" in sources, "needs a prior"),
    }
    return [words[need][1] for need in attack.needs if not words[need][0]]


def _sources(run: Run, result: Path | None, more: Mapping[str, str]) -> dict[str, Source]:
    """Return the models by name. Raise UsageError for one that is stored quantised, or has a name that is taken."""
    own = {name: run.sources[name] for name in REFERENCES if name in run.sources}
    prior = run.sources["prior"]
    if run.scope.start == "target":  # then that is the target, but attacks compare with the recipe's prior
        prior = fit_prior(own["target"], fetch(run.recipe.prior_checkpoint))
    if prior.folder != own["target"].folder:
        own["prior"] = prior
    if result is not None:
        own[UNLEARNED] = fetch(str(result))
    if taken := sorted(own.keys() & more.keys()):
        raise UsageError(f"--model: {', '.join(taken)}: the run has a model of this name; choose another")
    sources = own | {name: fetch(place) for name, place in more.items()}
    for name, source in sources.items():
        check_source(source)
        if name in more:
            check_same_tokens(own["target"], source)
        check_unquantised(name, source)
    return sources
