"""Settle the attacks on a run before any work: which of them, on which models and rows, in how much time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from msa_lite.attack_names import ATTACKS
from msa_lite.attacks.attack import Attack, Ground, check_unquantised, make_attack
from msa_lite.attacks.corner import CORNER_KINDS
from msa_lite.budget.speed import ScoreTimes
from msa_lite.data import sample_rows
from msa_lite.errors import Faults, UsageError, join_faults
from msa_lite.evals.models import check_source, model_identity
from msa_lite.evals.suite import check_same_tokens
from msa_lite.io.console.progress import Progress, Step, duration
from msa_lite.io.files.writing import digest
from msa_lite.io.finished.manifest import is_finished
from msa_lite.io.weights.hub import Source, fetch
from msa_lite.pipeline.attack.ground import Rewording, limit_ground, make_ground, open_rewording
from msa_lite.pipeline.prepare.models import fit_prior
from msa_lite.pipeline.prepare.run import Run, judge_settings
from msa_lite.pipeline.run.folder import BASELINES
from msa_lite.pipeline.stages.stage import Stage
from msa_lite.pipeline.stages.words import explain_stage
from msa_lite.report.attacks import ATTACKS_FOLDER, FEWEST_ROWS, MOST_BACK, AttackControl
from msa_lite.report.sentence import percent

UNLEARNED = "unlearned"
REFERENCES = ("ideal", "target")  # attacked like all others, since the results are shares between these two
_ROWS = {False: 40, True: 400}  # forget rows that are attacked where the recipe says nothing, without and with a GPU
_FEWEST = 20  # forget rows that a budget may lead to: a few more than an attack can hold on (`FEWEST_ROWS`)
_BACKWARD = 3.5  # times a forward pass: that, the backward pass, the step of the optimiser


@dataclass(frozen=True)
class Campaign:
    """The attacks on the models of one run, with everything that they need."""

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

    def models_of(self, attack: Attack) -> list[str]:
        """Return the models that an attack is made on."""
        return [name for name in self.models if not attack.only_results or name not in REFERENCES]

    def ground_of(self, attack: Attack) -> Ground:
        """Return the rows of an attack.

        Holdout rows are among them only where it needs them, or, as many as forget rows, as control.
        """
        if "holdout" in attack.needs:
            return self.ground
        count = len(self.ground.forget) if self.control == "holdout" else 0
        return replace(self.ground, holdout=sample_rows(self.ground.holdout, count, self.ground.seed))

    def used_by(self, attack: Attack) -> list[str]:
        """Return the models that an attack looks at besides the attacked one, as far as the run has them."""
        return [name for name in attack.uses if name in self.sources]

    def folder_of(self, name: str, model: str) -> Path:
        """Return the folder of an attack's records of a model."""
        return self.folder / ATTACKS_FOLDER / name / model

    def inputs(self, name: str, model: str) -> dict[str, Any]:
        """Return all that decides the records of an attack on a model, as their manifest records it."""
        attack = self.attacks[name]
        return {
            "attack": name,
            "settings": attack.describe(),
            "model": model_identity(self.sources[model]),
            "others": {used: model_identity(self.sources[used]) for used in self.used_by(attack)},
            "rows": digest(self.ground_of(attack).describe(attack.reads)),
        }

    @property
    def too_few_rows(self) -> list[str]:
        """Return a line for each attack, or part of one, that cannot hold on so few rows, whatever they show."""
        lines = []
        for attack_name, attack in self.attacks.items():
            counts = {
                f"{attack_name}, {aim}" if aim else attack_name: n for aim, n in attack.count_rows(self.ground).items()
            }
            few = {name: rows for name, rows in counts.items() if rows < FEWEST_ROWS}
            if few and len(few) == len(counts):
                few = {attack_name: max(few.values())}
            for name, rows in few.items():
                lines.append(
                    f"{name}: with {rows} rows no interval can end at "
                    f"{percent(MOST_BACK)} or below, so it stays undecided at best; {FEWEST_ROWS} rows are needed"
                )
        return lines

    def pairs(self) -> list[tuple[str, str]]:
        """Return each attack with each of its models, in the order of the work: model by model."""
        return [
            (name, model)
            for model in self.models
            for name in self.attacks
            if model in self.models_of(self.attacks[name])
        ]

    def finished_folder(self, name: str, model: str) -> Path | None:
        """Return the folder with the records of an attack on a model, from the same inputs; None: they are to be made.

        It is the run's, or for target and ideal that of another run of the recipe.
        """
        folder, inputs = self.folder_of(name, model), self.inputs(name, model)
        if is_finished(folder, inputs):
            return folder
        if model not in REFERENCES or folder.exists():
            return None
        homes = [self.home, *sorted((self.home / BASELINES).glob("*"))]
        copies = (home / ATTACKS_FOLDER / name / model for home in homes if home.resolve() != self.folder.resolve())
        return next((copy for copy in copies if is_finished(copy, inputs)), None)

    def missing(self) -> list[tuple[str, str]]:
        """Return the pairs whose records are still to be made."""
        return [pair for pair in self.pairs() if not self.finished_folder(*pair)]

    def steps(self, times: ScoreTimes) -> list[Step]:
        """Return the steps that are still to be made, with predicted seconds. The first of a model loads it.

        times: as measured on this machine.
        """
        steps, loaded = [], set()
        for name, model in self.missing():
            cost = self.attacks[name].cost(self.ground_of(self.attacks[name]))
            seconds = cost.scored * times.token + cost.generated * times.new_token
            seconds += _BACKWARD * cost.trained * times.token
            label, loading = attack_label(name, model), 0.0 if model in loaded else times.load
            steps.append(Step(label, "attack", seconds + loading, purpose=explain_stage(label)))
            loaded.add(model)
        return steps

    def seconds(self, times: ScoreTimes) -> float:
        """Return the predicted time of what is still to be made."""
        return sum(step.amount for step in self.steps(times))

    def within(self, limit: float, times: ScoreTimes) -> Campaign:
        """Return a campaign that by prediction takes no longer than a limit: with fewer rows, then fewer attacks.

        Finished records cost nothing. A campaign that was begun in this run's folder goes on with its rows, as long as
        an attack of it fits, so that a rerun with a limit ends what the first one began. limit: seconds. Raise
        UsageError where not even one attack fits.
        """
        smaller = [self]
        while (count := len(smaller[-1].ground.forget)) > _FEWEST:
            ground = limit_ground(self.ground, max(_FEWEST, count * 3 // 4))
            smaller.append(replace(self, ground=ground).reworded())
        begun = [campaign for campaign in smaller if campaign.is_begun]
        fitting = (campaign for campaign in smaller if campaign.seconds(times) <= limit)
        for campaign in (*begun[:1], next(fitting, smaller[-1]), smaller[-1]):
            alone = {name: replace(campaign, attacks={name: attack}) for name, attack in campaign.attacks.items()}
            costs = {name: single.seconds(times) for name, single in alone.items()}
            reduced = campaign
            while reduced.attacks and reduced.seconds(times) > limit:
                dearest = max(reduced.attacks, key=lambda name: costs[name])
                reason = f"takes about {duration(costs[dearest])}, and the budget is {duration(limit)}"
                reduced = reduced.without({dearest: reason})
            if reduced.attacks:
                return reduced.naming_parts()
        cheapest = min(costs, key=lambda name: costs[name])
        raise UsageError(
            f"--budget: {duration(limit)} is too little for one attack: {cheapest} alone takes about "
            f"{duration(costs[cheapest])} on {len(campaign.ground.forget)} rows"
        )

    def naming_parts(self) -> Campaign:
        """Return the campaign with the parts of attacks that its rows do not allow, in the place of former ones."""
        whole = {name: reason for name, reason in self.left_out.items() if "," not in name}
        parts = {
            f"{name}, {part}": reason
            for name, attack in self.attacks.items()
            for part, reason in attack.left_out(self.ground_of(attack)).items()
        }
        return replace(self, left_out=whole | parts)

    @property
    def is_begun(self) -> bool:
        """Check whether the run's own folder holds finished records; those of target and ideal may be another run's."""
        return any(self.finished_folder(*pair) == self.folder_of(*pair) for pair in self.pairs())

    def without(self, reasons: Mapping[str, str]) -> Campaign:
        """Return the campaign without some attacks, each with the reason."""
        attacks = {name: attack for name, attack in self.attacks.items() if name not in reasons}
        parts = {name: reason for name, reason in self.left_out.items() if name.partition(",")[0] not in reasons}
        return replace(self, attacks=attacks, left_out={**parts, **reasons})

    def to_reword(self) -> list[str]:
        """Return the questions that a judge has still to reword."""
        return self.rewording.missing(self._asked) if self.rewording and "prompt" in self.attacks else []

    def reworded(self, progress: Progress | None = None) -> Campaign:
        """Return the campaign with the questions that a judge has reworded.

        progress: if given, the judge is asked for what is missing first (`Rewording.make`).
        """
        if self.rewording is None:
            return self
        make = self.rewording.known if progress is None else partial(self.rewording.make, progress=progress)
        made = make(self._asked)
        return replace(self, ground=replace(self.ground, rewordings=made.rewordings, corners=made.corners))

    @property
    def _asked(self) -> Ground:
        """Return the rows of the attack prompt, be it among the attacks or not."""
        return self.ground_of(make_attack("prompt", {}))


def attack_stages(campaign: Campaign) -> list[Stage]:
    """Return the stages of a campaign: the records of each attack on each model, in the order of the work."""
    return [
        Stage(attack_label(*pair), "attack", campaign.folder_of(*pair), inputs=partial(campaign.inputs, *pair))
        for pair in campaign.pairs()
    ]


def attack_label(name: str, model: str) -> str:
    """Return the label of an attack's progress."""
    return f"{name}: {model}"


def open_attacks(
    run: Run, result: Path | None, names: Sequence[str] = (), models: Mapping[str, str] | None = None
) -> Campaign:
    """Return the campaign against a run, with everything checked that can be before any work.

    Settings of attacks that depend on the models are the same for all of them. result: the folder of the unlearned
    model; None before there is one. names: of the attacks; empty: those that the recipe names, or all that are
    possible. An attack that somebody named and that cannot be made is an error; else it is left out, with the reason.
    models: further models to attack, by name. Raise UsageError with all that forbids the attacks.
    """
    import torch

    keys, more = run.recipe.attack, models or {}
    wanted = names or keys.attacks
    of_run: dict[str, dict[str, Any]] = {"relearn": {"compute": run.recipe.vector.compute}}
    if run.judge.kind != "none":
        of_run["sample"] = {"judge": run.judge}
    attacks = {name: make_attack(name, keys.settings(name) | of_run.get(name, {})) for name in wanted or ATTACKS}
    ground = limit_ground(make_ground(run), keys.rows or _ROWS[torch.cuda.is_available()])
    kinds = CORNER_KINDS if keys.prompt.corner == "judge" else ()
    judge = judge_settings(keys.prompt.judge)
    rewording = open_rewording(run.recipe.folder, judge, ground, "prompt" in attacks, kinds)
    sources = _sources(run, result, more)
    attacked = [name for name in (*REFERENCES, UNLEARNED, *more) if name in sources]
    attacks = {name: attacks[name] for name in ATTACKS if name in attacks}
    campaign = Campaign(
        run.folder, run.recipe.folder, attacks, sources, attacked, ground, _control(run, ground), {}, rewording
    )
    return _possible(campaign.reworded(), bool(wanted))


def _possible(campaign: Campaign, wanted: bool) -> Campaign:
    """Return the campaign with the attacks that can be made. Raise UsageError for those that cannot, if `wanted`."""
    faults, left_out, possible = Faults(), dict[str, str](), dict[str, Attack]()
    for name, attack in campaign.attacks.items():
        rows = campaign.ground_of(attack)
        lacking = _lacking(attack, campaign.sources, campaign.ground)
        reasons = Faults(UsageError(reason) for reason in lacking or attack.faults(rows))
        if not reasons:
            with reasons.gathered(""):
                used = [*campaign.models_of(attack), *campaign.used_by(attack)]
                possible[name] = attack.fit_to({model: campaign.sources[model] for model in used})
        if reasons and not wanted:
            left_out[name] = "; ".join(map(str, reasons))
        for reason in reasons if wanted else ():
            with faults.gathered(f"{name}: "):
                raise reason
    faults.check()
    if not possible:
        lines = [f"{name}: {reason}" for name, reason in left_out.items()]
        raise UsageError(join_faults(f"{campaign.folder}: no attack is possible on this run:", lines))
    return replace(campaign, attacks=possible, left_out=left_out).naming_parts()


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
    sources = {name: run.sources[name] for name in REFERENCES if name in run.sources}
    target, prior = sources["target"], run.sources["prior"]
    if (
        run.scope.start == "target" and run.recipe.has_prior
    ):  # then that is the target, but attacks compare with the recipe's prior
        prior = fit_prior(target, fetch(run.recipe.prior_checkpoint))
    if prior.folder != target.folder:
        sources["prior"] = prior
    if result is not None:
        sources[UNLEARNED] = fetch(str(result))
    if taken := sorted(sources.keys() & more.keys()):
        raise UsageError(f"--model: {', '.join(taken)}: the run has a model of this name; choose another")
    sources |= {name: fetch(place) for name, place in more.items()}
    for name, source in sources.items():
        check_source(source)
        if name in more:
            check_same_tokens(target, source)
        check_unquantised(name, source)
    return sources
