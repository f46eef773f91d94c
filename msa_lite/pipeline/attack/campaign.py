"""Settle the attacks on a run before any work: which of them, on which models and rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from msa_lite.attacks.attack import Attack, Ground, Subject, check_unquantised, make_attack
from msa_lite.attacks.sample import Sample
from msa_lite.catalogue import ATTACKS
from msa_lite.data import Row, load_rows, sample_rows
from msa_lite.errors import Faults, UsageError, join_faults
from msa_lite.evals.benchmarks.benchmark import Benchmark, BenchmarkSettings, Item
from msa_lite.evals.benchmarks.qa import row_of
from msa_lite.evals.engine.models import check_source, model_identity
from msa_lite.evals.judge.server import find_server
from msa_lite.evals.scores.records import write_records
from msa_lite.io.console.progress import Progress, under
from msa_lite.io.files.writing import digest
from msa_lite.io.finished.manifest import is_finished, stage_folder
from msa_lite.io.weights.hub import Source, fetch
from msa_lite.pipeline.prepare.division import each_once
from msa_lite.pipeline.prepare.models import fit_prior
from msa_lite.pipeline.prepare.run import Run
from msa_lite.pipeline.run.folder import BASELINES
from msa_lite.pipeline.stages.stage import Stage
from msa_lite.record.facts import UNSIGNED
from msa_lite.record.seal import SIGNATURE_FILE
from msa_lite.report.run.attacks import ATTACKS_FOLDER, FEWEST_ROWS, MOST_BACK, AttackControl
from msa_lite.report.verdict.figures import percent

ATTACK_KIND = "attack"
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
    subjects: Mapping[str, Subject]
    """The models by name: those that are attacked, and the prior, which some attacks look at."""
    ground: Ground
    """The rows."""
    control: AttackControl
    left_out: Mapping[str, str]
    """Attacks, and parts of attacks, that cannot be made on this run, each with the reason."""

    @property
    def models(self) -> list[str]:
        """Return the models that are attacked, ideal and target first."""
        return [name for name in (*REFERENCES, UNLEARNED) if name in self.subjects]

    def models_of(self, attack: Attack) -> list[str]:
        """Return the models that an attack is made on."""
        return [name for name in self.models if name == UNLEARNED or not attack.only_results]

    def ground_of(self, attack: Attack) -> Ground:
        """Return the rows of an attack.

        Holdout rows are among them only where it needs them, or, as many as forget rows, as control.
        """
        if "holdout" in attack.needs:
            return self.ground
        count = len(self.ground.forget) if self.control == "holdout" else 0
        return replace(self.ground, holdout=sample_rows(self.ground.holdout, count, self.ground.seed))

    def used_by(self, attack: Attack) -> dict[str, Subject]:
        """Return the models that an attack looks at besides the attacked one, as far as the run has them."""
        return {name: self.subjects[name] for name in attack.uses if name in self.subjects}

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
            "model": model_identity(self.subjects[model].source),
            "others": {used: model_identity(subject.source) for used, subject in self.used_by(attack).items()},
            "rows": digest(self.ground_of(attack).describe(attack.reads)),
        }

    def stages(self) -> dict[tuple[str, str], Stage]:
        """Return the records by attack and model as stages, in the order of the work: model by model."""
        return {
            (name, model): Stage(
                f"{name}: {model}",
                "attack",
                self.folder_of(name, model),
                partial(self._make_records, name, model),
                inputs=partial(self.inputs, name, model),
                says=f"an attack: {ATTACKS[name].summary}",
            )
            for model in self.models
            for name, attack in self.attacks.items()
            if model in self.models_of(attack)
        }

    def own_stages(self) -> list[Stage]:
        """Return the stages of the run itself, without records of another run of the recipe."""
        return [stage for stage in self.stages().values() if stage.folder and stage.folder.is_relative_to(self.folder)]

    def missing(self) -> dict[tuple[str, str], Stage]:
        """Return the stages whose records are still to be made."""
        return {
            (name, model): stage
            for (name, model), stage in self.stages().items()
            if stage.folder and not is_finished(stage.folder, self.inputs(name, model))
        }

    def _make_records(self, name: str, model: str, progress: Progress) -> None:
        attack, subject = self.attacks[name], self.subjects[model]
        used = {name: other for name, other in self.used_by(attack).items() if other is not subject}
        folder, facts = self.folder_of(name, model), {"sources": {"model": subject.source.pinned()}}
        shown = under(progress, f"{name}: {model}")
        try:
            with stage_folder(folder, ATTACK_KIND, self.inputs(name, model), facts) as unfinished:
                for trial, records in attack.run(subject, self.ground_of(attack), used, shown):
                    for set_name, rows in records.items():
                        write_records(unfinished / f"{trial.name}.{set_name}.jsonl", rows)
        finally:
            for other in used.values():
                other.close()

    @property
    def remarks(self) -> list[str]:
        """Return a line for each attack, or part of one, that is left out, or has too few rows to hold."""
        remarks = [UNSIGNED] if (self.folder / SIGNATURE_FILE).exists() else []
        remarks += [f"{name} is left out: {reason}" for name, reason in self.left_out.items()]
        if isinstance(sample := self.attacks.get("sample"), Sample) and (server := find_server(sample.judge)):
            count = len(self.ground.forget) + len(self.ground_of(sample).holdout)
            rows = f"{count} questions with their right answers, the answers of {', '.join(self.models)}"
            remarks.append(f"sample: {server.gets(sample.judge.model_name, rows)}")
        for name, attack in self.attacks.items():
            counts = attack.count_rows(self.ground)
            few = {part: rows for part, rows in counts.items() if rows < FEWEST_ROWS}
            if few and len(few) == len(counts):
                few = {"": max(few.values())}
            remarks += [
                f"{name}{f', {part}' if part else ''}: with {rows} rows no interval can end at {percent(MOST_BACK)} or "
                f"below, so it stays undecided at best; {FEWEST_ROWS} rows are needed"
                for part, rows in few.items()
            ]
        return remarks

    def without(self, reasons: Mapping[str, str]) -> Campaign:
        """Return the campaign without some attacks, each with the reason."""
        attacks = {name: attack for name, attack in self.attacks.items() if name not in reasons}
        parts = {name: reason for name, reason in self.left_out.items() if name.partition(",")[0] not in reasons}
        return replace(self, attacks=attacks, left_out={**parts, **reasons})


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
    ground = _make_ground(run, rows)
    subjects = {name: Subject(name, source) for name, source in _sources(run, result).items()}
    campaign = Campaign(run.folder, run.recipe.folder, {}, subjects, ground, _control(run, ground), {})
    attacks, left_out, faults = dict[str, Attack](), dict[str, str](), Faults()
    for name in ATTACKS:
        is_wanted = not wanted or name in wanted
        if not is_wanted and not (campaign.folder / ATTACKS_FOLDER / name).is_dir():
            continue
        attack, own = make_attack(name, of_run.get(name, {})), Faults()
        with own.gathered(f"{name}: " if wanted else ""):
            _check_needs(attack, campaign)
            used = [*campaign.models_of(attack), *campaign.used_by(attack)]
            attack = attack.fit_to({model: subjects[model].source for model in used})
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
        "ideal": ("ideal" in campaign.subjects, "an ideal model (evaluate.ideal)"),
        "prior": ("prior" in campaign.subjects, "a prior"),
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


def _make_ground(run: Run, most: int) -> Ground:
    """Return the rows that attacks may use: at most so many forget rows, and as many holdout rows, or 100; seeded.

    Forget rows are all questions about the forget set, those that a choice was made by, too: the vector is fitted to
    all rows, and all are to be forgotten. Where the run asks none, they are the rows that the vector learnt. Holdout
    rows are of the same kind. Each row is there once. Retain rows are those of MSA's vector, whatever the run's method
    learns, so that all methods are attacked alike.
    """
    questions, seed = run.questions.everything, run.recipe.seed
    forget = sample_rows(asked_rows(questions, "forget") or each_once(run.rows["forget"]), most, seed)
    is_text = bool(forget[0].text)
    holdout: Sequence[Row] = asked_rows(questions, "holdout")
    if not holdout and "evaluate.holdout" in run.data:
        holdout = load_rows(run.data["evaluate.holdout"])
    alike = [row for row in holdout if bool(row.text) == is_text]
    rewordings: dict[str, list[str]] = {}
    if (settings := run.recipe.evaluate) and run.test and not any(row.text for row in forget):
        published = BenchmarkSettings(settings.data, settings.split)
        rewordings = run.test.wordings(published, [row.question for row in forget])
    return Ground(
        forget=forget,
        retain=run.retain,
        # An attack that uses them only as its control takes as many as there are forget rows.
        holdout=sample_rows(alike, max(most, _HOLDOUT), seed),
        learnt=run.rows["forget"],
        # A published benchmark may ask in its own form.
        prompter=next((b.prompter for b in questions if asked_rows([b], "forget")), run.prompter),
        max_new_tokens=run.recipe.max_new_tokens,
        max_length=run.recipe.vector.max_length,
        seed=seed,
        rewordings=rewordings,
    )


def asked_rows(questions: Sequence[Benchmark], name: str) -> list[Row]:
    """Return the items of a set as rows, in the order of the data; none where they are no questions and no texts."""
    items = [item for benchmark in questions if name in benchmark.sets for item in benchmark.sets[name].items]
    rows = [row for row in map(_row, items) if row is not None]
    return sorted(each_once(rows), key=lambda row: row.index)


def _row(item: Item) -> Row | None:
    fields, about = item.fields, "" if item.group is None else str(item.group)
    if fields.get("text"):
        return Row(item.index, text=fields["text"], about=about)
    if not (fields.get("question") and fields.get("answer")):
        return None
    return row_of(item.index, fields, about)
