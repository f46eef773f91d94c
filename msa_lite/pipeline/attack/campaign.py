"""Settle the attacks on a run before any work: which of them, on which models and rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from msa_lite.attacks.attack import Attack, Ground, check_unquantised, make_attack
from msa_lite.catalogue import ATTACKS
from msa_lite.data import Row, load_rows, sample_rows
from msa_lite.errors import Faults, UsageError, join_faults
from msa_lite.evals.benchmarks.benchmark import Benchmark, BenchmarkSettings, Item
from msa_lite.evals.engine.models import check_source, model_identity
from msa_lite.io.files.writing import digest
from msa_lite.io.finished.manifest import is_finished
from msa_lite.io.weights.hub import Source, fetch
from msa_lite.pipeline.prepare.models import fit_prior
from msa_lite.pipeline.prepare.run import Run
from msa_lite.pipeline.run.folder import BASELINES
from msa_lite.pipeline.stages.stage import Stage
from msa_lite.report.run.attacks import ATTACKS_FOLDER, FEWEST_ROWS, MOST_BACK, AttackControl
from msa_lite.report.run.stages import ROWS
from msa_lite.report.verdict.figures import percent

UNLEARNED = "unlearned"
REFERENCES = ("ideal", "target")  # attacked like all others, since the results are shares between these two
_ROWS = {False: 40, True: 400}  # forget rows that are attacked where the recipe says nothing, without and with a GPU
_HOLDOUT = 100  # rows; membership inference scores them cheaply, and with fewer, none of them is 1 %


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
    """The models by name: those that are attacked, and the prior, which some attacks look at."""
    ground: Ground
    """The rows."""
    control: AttackControl
    left_out: Mapping[str, str]
    """Attacks, and parts of attacks, that cannot be made on this run, each with the reason."""

    def models_of(self, attack: Attack) -> list[str]:
        """Return the models that an attack is made on, ideal and target first."""
        names = [UNLEARNED] if attack.only_results else [*REFERENCES, UNLEARNED]
        return [name for name in names if name in self.sources]

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
        """Return the folder of an attack's records of a model.

        It is the run's, or for target and ideal that of another run of the recipe with records from the same inputs.
        """
        own = self.folder / ATTACKS_FOLDER / name / model
        if model not in REFERENCES or own.exists():
            return own
        homes, inputs = [self.home, *sorted((self.home / BASELINES).glob("*"))], self.inputs(name, model)
        copies = (home / ATTACKS_FOLDER / name / model for home in homes)
        return next((copy for copy in copies if is_finished(copy, inputs)), own)

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
    def remarks(self) -> list[str]:
        """Return a line for each attack, or part of one, that is left out, or has too few rows to hold."""
        few: dict[str, int] = {}
        for name, attack in self.attacks.items():
            counts = {part: rows for part, rows in attack.count_rows(self.ground).items() if rows < FEWEST_ROWS}
            if len(counts) == len(attack.count_rows(self.ground)):
                counts = {"": max(counts.values())} if counts else {}
            few |= {f"{name}, {part}" if part else name: rows for part, rows in counts.items()}
        left_out = [f"{name} is left out: {reason}" for name, reason in self.left_out.items()]
        return left_out + [
            f"{name}: with {rows} rows no interval can end at {percent(MOST_BACK)} or below, so it stays undecided at "
            f"best; {FEWEST_ROWS} rows are needed"
            for name, rows in few.items()
        ]

    def pairs(self) -> list[tuple[str, str]]:
        """Return each attack with each of its models, in the order of the work: model by model."""
        models = (*REFERENCES, UNLEARNED)
        return [(name, m) for m in models for name, attack in self.attacks.items() if m in self.models_of(attack)]

    def missing(self) -> list[tuple[str, str]]:
        """Return the pairs whose records are still to be made."""
        return [pair for pair in self.pairs() if not is_finished(self.folder_of(*pair), self.inputs(*pair))]

    def without(self, reasons: Mapping[str, str]) -> Campaign:
        """Return the campaign without some attacks, each with the reason."""
        attacks = {name: attack for name, attack in self.attacks.items() if name not in reasons}
        parts = {name: reason for name, reason in self.left_out.items() if name.partition(",")[0] not in reasons}
        return replace(self, attacks=attacks, left_out={**parts, **reasons})


def attack_stages(campaign: Campaign) -> list[Stage]:
    """Return the stages of a campaign: the run's own records of each attack on each model, in the order of the work."""
    return [
        Stage(
            attack_label(name, model),
            "attack",
            campaign.folder_of(name, model),
            inputs=partial(campaign.inputs, name, model),
            says=attack_says(name),
            holds=ROWS,
        )
        for name, model in campaign.pairs()
        if campaign.folder_of(name, model).is_relative_to(campaign.folder)
    ]


def attack_says(name: str) -> str:
    """Return what an attack is for, in a clause."""
    return f"an attack: {ATTACKS[name].summary}"


def attack_label(name: str, model: str) -> str:
    """Return the label of an attack's progress."""
    return f"{name}: {model}"


def open_attacks(run: Run, result: Path | None, names: Sequence[str] = ()) -> Campaign:
    """Return the campaign against a run, with everything checked that can be before any work.

    Settings of attacks that depend on the models are the same for all of them. result: the folder of the unlearned
    model; None before there is one. names: of the attacks; empty: those that the recipe names, or all that are
    possible. Attacks that were made before on the same models and rows are among them, so that their results stay in
    the report. An attack that somebody named and that cannot be made is an error; else it is left out, with the reason.
    Raise UsageError with all that forbids the attacks.
    """
    import torch

    wanted = names or run.recipe.attack.attacks
    of_run: dict[str, dict[str, Any]] = {"relearn": {"compute": run.recipe.vector.compute}}
    if run.judge.kind != "none":
        of_run["sample"] = {"judge": run.judge}
    rows = run.recipe.attack.rows or _ROWS[torch.cuda.is_available()]
    ground, sources = limit_ground(_make_ground(run), rows), _sources(run, result)
    campaign = Campaign(run.folder, run.recipe.folder, {}, sources, ground, _control(run, ground), {})
    attacks, left_out, faults = dict[str, Attack](), dict[str, str](), Faults()
    for name in ATTACKS:
        is_wanted = not wanted or name in wanted
        if not is_wanted and not (campaign.folder / ATTACKS_FOLDER / name).is_dir():
            continue
        attack, own = make_attack(name, of_run.get(name, {})), Faults()
        with own.gathered(f"{name}: " if wanted else ""):
            _check_needs(attack, campaign)
            used = [*campaign.models_of(attack), *campaign.used_by(attack)]
            attack = attack.fit_to({model: sources[model] for model in used})
            parts = attack.left_out(campaign.ground_of(attack))
        if not is_wanted and (own or replace(campaign, attacks={name: attack}).missing()):
            left_out[name] = "was made with other models or rows before; make it again"
        elif own:
            left_out[name] = str(own[0])
            faults += own
        else:
            attacks[name] = attack
            left_out |= {f"{name}, {part}": reason for part, reason in parts.items()}
    if wanted:
        faults.check()
    if not attacks:
        lines = [f"{name}: {reason}" for name, reason in left_out.items()]
        raise UsageError(join_faults(f"{campaign.folder}: no attack is possible on this run:", lines))
    return replace(campaign, attacks=attacks, left_out=left_out)


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


def _check_needs(attack: Attack, campaign: Campaign) -> None:
    """Raise UsageError for an attack that needs what the run lacks."""
    needs = {
        "retain": (campaign.ground.retain, "rows to keep (retain.data)"),
        "holdout": (campaign.ground.holdout, "rows of the same kind that no model saw (evaluate.holdout)"),
        "ideal": ("ideal" in campaign.sources, "an ideal model (evaluate.ideal)"),
        "prior": ("prior" in campaign.sources, "a prior"),
    }
    if lacking := [words for need, (is_there, words) in needs.items() if need in attack.needs and not is_there]:
        raise UsageError(f"needs {' and '.join(lacking)}")


def _sources(run: Run, result: Path | None) -> dict[str, Source]:
    """Return the models by name. Raise UsageError for one that is stored quantised."""
    sources = {name: run.sources[name] for name in REFERENCES if name in run.sources}
    target, prior = sources["target"], run.sources["prior"]
    if run.scope.start == "target" and run.recipe.has_prior:
        # Then the run's prior is the target, but attacks compare with the recipe's.
        prior = fit_prior(target, fetch(run.recipe.prior_checkpoint))
    if prior.folder != target.folder:
        sources["prior"] = prior
    if result is not None:
        sources[UNLEARNED] = fetch(str(result))
    for name, source in sources.items():
        check_source(source)
        check_unquantised(name, source)
    return sources


def _make_ground(run: Run) -> Ground:
    """Return all rows that attacks may use.

    Forget rows are all questions about the forget set, those that a choice was made by, too: the vector is fitted to
    all rows, and all are to be forgotten. Where the run asks none, they are the rows that the vector learnt. Holdout
    rows are of the same kind. Each row is there once. Retain rows are those of MSA's vector, whatever the run's method
    learns, so that all methods are attacked alike.
    """
    questions = run.questions.everything
    forget = asked_rows(questions, "forget") or _distinct(run.rows["forget"])
    is_text = bool(forget[0].text)
    holdout: Sequence[Row] = asked_rows(questions, "holdout")
    if not holdout and "evaluate.holdout" in run.data:
        holdout = load_rows(run.data["evaluate.holdout"])
    rewordings: dict[str, list[str]] = {}
    if (settings := run.recipe.evaluate) and run.test and not any(row.text for row in forget):
        published = BenchmarkSettings(settings.data, settings.split)
        rewordings = run.test.wordings(published, [row.question for row in forget])
    return Ground(
        forget=forget,
        retain=run.retain,
        holdout=[row for row in holdout if bool(row.text) == is_text],
        learnt=run.rows["forget"],
        # A published benchmark may ask in its own form.
        prompter=next((b.prompter for b in questions if asked_rows([b], "forget")), run.prompter),
        max_new_tokens=run.recipe.max_new_tokens,
        max_length=run.recipe.vector.max_length,
        seed=run.recipe.seed,
        rewordings=rewordings,
    )


def limit_ground(ground: Ground, rows: int) -> Ground:
    """Return the ground with at most so many forget rows, and as many holdout rows, or 100: seeded samples.

    An attack that uses holdout rows only as its control takes as many as there are forget rows.
    """
    places = sample_rows(range(len(ground.forget)), rows, ground.seed)
    return replace(
        ground,
        forget=[ground.forget[at] for at in places],
        holdout=sample_rows(ground.holdout, max(rows, _HOLDOUT), ground.seed),
        rewordings={name: [questions[at] for at in places] for name, questions in ground.rewordings.items()},
    )


def asked_rows(questions: Sequence[Benchmark], name: str) -> list[Row]:
    """Return the items of a set as rows, in the order of the data; none where they are no questions and no texts."""
    items = [item for benchmark in questions if name in benchmark.sets for item in benchmark.sets[name].items]
    rows = [row for row in map(_row, items) if row is not None]
    return sorted(_distinct(rows), key=lambda row: row.index)


def _distinct(rows: Sequence[Row]) -> list[Row]:
    """Return the rows, of those with the same content only the first."""
    kept: dict[str, Row] = {}
    for row in rows:
        kept.setdefault(row.sha256, row)
    return list(kept.values())


def _row(item: Item) -> Row | None:
    fields, about = item.fields, "" if item.group is None else str(item.group)
    if fields.get("text"):
        return Row(item.index, text=fields["text"], about=about)
    if not (fields.get("question") and fields.get("answer")):
        return None
    earlier = tuple((question, answer) for question, answer in fields.get("earlier", ()))
    system = fields.get("system", "")
    return Row(item.index, fields["question"], fields["answer"], earlier=earlier, system=system, about=about)
