"""Try the settings of a baseline: train each, and choose a setting and an epoch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from msa_lite.baselines.losses import check_layer
from msa_lite.baselines.methods import METHODS, Value
from msa_lite.baselines.objective import BaselineObjective, ReferenceCache, draw_answers
from msa_lite.choose.candidates import TARGET, Candidates, Values
from msa_lite.choose.choice import load_choice
from msa_lite.choose.rules import Rank
from msa_lite.choose.validation import Validation
from msa_lite.data import Example, encode_qa, pad_id
from msa_lite.errors import NotFiniteError, UsageError
from msa_lite.io.console.progress import Progress, Step
from msa_lite.io.finished.seal import load_manifest
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.merger import Term
from msa_lite.pipeline.prepare.run import Run, check_learns, first_epoch, fit_rate, fit_settings
from msa_lite.pipeline.run.choice import LoadedTarget
from msa_lite.pipeline.run.scores import (
    choose_candidate,
    evaluate_references,
    evaluate_target,
    merge_identity,
    merge_inputs,
    row_hashes,
    scoring_inputs,
    tracking_of,
    validation_folder,
    validation_of,
)
from msa_lite.pipeline.run.steps import score_steps, sweep_steps
from msa_lite.pipeline.stages.stage import StageInputs
from msa_lite.recipe import Recipe
from msa_lite.report import load_report
from msa_lite.report.choice import candidate_name
from msa_lite.train import FitSettings, KeptEpochs, epoch_folder, fit_inputs, fit_vector
from msa_lite.train.settings import EPOCHS

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BestEpoch:
    """Score the model after each epoch on validation rows, and keep the best so far. A broken epoch ends training."""

    validation: Validation
    reference: Path
    """The folder of the target's scores."""
    first: int = 1
    """The first epoch that is a candidate."""

    def describe(self) -> dict[str, Any]:
        """Return all that decides which epochs are kept, for a manifest."""
        target = load_report(self.reference).values()
        return {**self.validation.describe(), **self.validation.describe_rule(), "target": target, "first": self.first}

    def __call__(self, model: Any, epoch: int, scores: Path) -> KeptEpochs:
        if epoch < self.first:
            return KeptEpochs(frozenset())
        scores.mkdir(exist_ok=True)
        ranks = {}
        for number in range(self.first, epoch + 1):
            folder = epoch_folder(scores, number)
            self.validation.score_into(folder, lambda: model, {"epoch": number})
            ranks[number] = self.validation.rank(folder, self.reference)
        if isinstance(ranks[epoch], str):
            logger.warning("epoch %d is broken (%s); training ends there", epoch, ranks[epoch])
        whole = {number: rank for number, rank in ranks.items() if isinstance(rank, Rank)}
        best = max(whole, key=lambda number: whole[number]) if whole else epoch
        return KeptEpochs(frozenset([best]), isinstance(ranks[epoch], Rank))


@dataclass(frozen=True)
class EveryEpoch:
    """Keep each epoch from the `first` on, to be added to the target and scored later."""

    first: int = 1

    def describe(self) -> str:
        """Return all that decides which epochs are kept, for a manifest."""
        return f"every epoch from {self.first}"

    def __call__(self, model: Any, epoch: int, scores: Path) -> KeptEpochs:
        return KeptEpochs(frozenset(range(self.first, epoch + 1)))


@dataclass(frozen=True)
class Setting:
    """One point of a method's grid."""

    parameters: Mapping[str, Value]
    """All parameters of the method."""
    tried: Mapping[str, Value]
    """Those of them whose values differ within the grid."""
    folder: Path
    """The folder of its vector."""


def epochs_of(recipe: Recipe) -> int:
    """Return the epochs of a baseline's training."""
    usual = EPOCHS if recipe.vector.epochs == "auto" else recipe.vector.epochs
    return recipe.baseline.epochs or usual


def scales_of(recipe: Recipe) -> list[float]:
    """Return the factors of the prior's change to try."""
    scale = recipe.baseline.scale
    return scale if isinstance(scale, list) else [scale]


def resolve_trials(run: Run, settings: Sequence[Setting]) -> Trials:
    """Return the run with the learning rate that suits the model, where the recipe names none."""

    def with_rate(setting: Setting) -> Setting:
        if setting.parameters["learning_rate"] != "auto":
            return setting
        return replace(setting, parameters={**setting.parameters, "learning_rate": fit_rate(run, "forget")})

    return Trials(run, [with_rate(setting) for setting in settings])


@dataclass(frozen=True)
class Trials:
    """A method's run, from checks to the choice."""

    run: Run
    settings: Sequence[Setting]

    @property
    def method(self) -> str:
        return self.run.plan.method

    @property
    def from_prior(self) -> bool:
        return self.run.plan.start == "prior"

    @property
    def compat(self) -> list[str]:
        """Return the known deviations that the recipe wants repeated, where the method has one."""
        return list(self.run.recipe.baseline.compat) if METHODS[self.method].compat else []

    def check(self) -> None:
        """Raise before any training where the method lacks what it needs."""
        forget, config = self.run.recipe.forget, load_checkpoint(self.run.sources["prior"].folder).config
        for setting in self.settings:
            weight = setting.parameters.get("retain_weight")
            if not weight and not setting.parameters["forget_weight"]:
                raise UsageError(f"{self.method}: with forget_weight and retain_weight 0 there is nothing to minimise")
            if weight and "retain" not in self.run.rows:
                raise UsageError(
                    f"{self.method} needs a retain set (its retain_weight is {weight:g}): give retain.data in the "
                    f"recipe, or baseline.methods.{self.method}.retain_weight=0"
                )
            if "layer" in setting.parameters:
                check_layer(self.run.sources["prior"].name, config, int(setting.parameters["layer"]))
        if METHODS[self.method].takes == "pairs" and forget.data.format != "qa":
            raise UsageError(f"{self.method} needs questions to answer otherwise: forget.data.format qa")
        check_learns(self.run, ["forget"], epochs=epochs_of(self.run.recipe))
        if cache := self._cache():
            cache.check()

    def steps(self) -> list[Step]:
        """Return the steps in their order: target and ideal are scored before anything is trained."""
        fits = [Step(setting.folder.name, "fit") for setting in self.settings]
        count = len(self.settings) * epochs_of(self.run.recipe) * len(scales_of(self.run.recipe))
        choice = sweep_steps(self.run, "the epoch", count)
        before = [step for step in choice if step.label == "validation: ideal"]
        if self.run.validation is not None:
            before.append(Step("validation: target", "score"))
        after = [step for step in choice if step.label in ("choosing the epoch", "merge")]
        return [*before, *fits, *after, *score_steps(self.run)]

    def fit(self, progress: Progress) -> list[Setting]:
        """Train every setting that is not there yet. Return those whose loss stayed a number."""
        reference = self._target_validation(progress)
        fitted = []
        for setting in self.settings:
            try:
                self._fit(setting, reference, progress)
                fitted.append(setting)
            except NotFiniteError as error:
                if not fitted and setting is self.settings[-1]:
                    raise
                logger.warning("%s; it is left out of the choice", error)
        return fitted

    def _fit(self, setting: Setting, reference: Path | None, progress: Progress) -> None:
        fitted = self._settings_of(setting)
        fit_vector(
            self.run.sources["prior"],
            self.run.examples["forget"],
            setting.folder,
            tokenizer=self.run.prompter.tokenizer,
            settings=fitted,
            label=setting.folder.name,
            extra_files=row_hashes(self.run.rows["forget"]),
            objective=self._objective(setting),
            after_epoch=self._after(fitted, reference),
            tracking=tracking_of(self.run),
            progress=progress,
        )

    def _settings_of(self, setting: Setting) -> FitSettings:
        return self._fit_settings(learning_rate=setting.parameters["learning_rate"])

    def _after(self, fitted: FitSettings, reference: Path | None) -> BestEpoch | EveryEpoch | None:
        """Return what happens after an epoch. reference: the folder of the target's scores on the validation rows."""
        if self.run.validation is None or reference is None:
            return None
        first = first_epoch(fitted, len(self.run.examples["forget"]))
        return EveryEpoch(first) if self.from_prior else BestEpoch(validation_of(self.run), reference, first)

    def stages(self) -> list[StageInputs]:
        """Return the stages up to the merged model."""
        run, names = self.run, [setting.folder.name for setting in self.settings]
        reference = validation_folder(run, "target") if run.validation else None
        scored, before = list[StageInputs](), list[str]()
        for name in [name for name in ("ideal", "target") if run.validation and name in run.sources]:
            inputs = partial(scoring_inputs, run, name, "validation", run.sources[name])
            scored.append(StageInputs(f"validation: {name}", validation_folder(run, name), inputs, [*before]))
            before.append(f"validation: {name}")

        def fit(setting: Setting) -> dict[str, Any]:
            fitted, objective = self._settings_of(setting), self._objective(setting)
            prior, examples = run.sources["prior"], run.examples["forget"]
            return fit_inputs(prior, examples, fitted, objective, self._after(fitted, reference))

        fits = [
            StageInputs(setting.folder.name, setting.folder, partial(fit, setting), before) for setting in self.settings
        ]
        there = [setting for setting in self.settings if load_manifest(setting.folder)]

        def choice() -> dict[str, Any]:
            assert reference is not None, "there is a choice"
            return self._candidates(there, reference)[0].inputs(validation_of(run))

        def merge() -> dict[str, Any]:
            return merge_inputs(run, [self.term(*self.chosen_before())])

        chosen = [StageInputs("choosing the epoch", run.folder / "sweep", choice, names)] if run.validation else []
        needs = [*names, *(stage.label for stage in chosen)]
        return [*scored, *fits, *chosen, StageInputs("merge", run.folder / run.recipe.merge.form, merge, needs)]

    def chosen_before(self) -> tuple[Setting, int, float]:
        """Return (setting, epoch, scale) as an earlier run has chosen them."""
        if self.run.validation is None:
            return self.settings[0], epochs_of(self.run.recipe), scales_of(self.run.recipe)[0]
        there = [setting for setting in self.settings if load_manifest(setting.folder)]
        parts = self._candidates(there, validation_folder(self.run, "target"))[1]
        return parts[candidate_name(load_choice(self.run.folder / "sweep").values)]

    def values_of(self, setting: Setting, epoch: int, scale: float) -> dict[str, Value]:
        """Return what was chosen, by name."""
        return {**setting.parameters, "epoch": epoch} | ({"scale": scale} if self.from_prior else {})

    def describe(self, chosen: Mapping[str, Value]) -> dict[str, Any]:
        """Return the method as the unlearned model's report names it."""
        recipe = self.run.recipe
        return self.run.plan.describe(recipe, {**chosen, "epochs": epochs_of(recipe)}, self.compat)

    def choose(self, settings: Sequence[Setting], progress: Progress) -> tuple[Setting, int, float]:
        """Return (setting, epoch, scale). Without scores that is the last epoch."""
        scales = scales_of(self.run.recipe)
        if self.run.validation is None:
            return settings[0], epochs_of(self.run.recipe), scales[0]
        candidates, parts = self._candidates(settings, evaluate_target(self.run, progress))
        choice = choose_candidate(self.run, candidates, "the epoch", progress)
        return parts[candidate_name(choice.values)]

    def _candidates(
        self, settings: Sequence[Setting], reference: Path
    ) -> tuple[Candidates, dict[str, tuple[Setting, int, float]]]:
        """Return the candidates to choose from, and (setting, epoch, scale) of each by its name."""
        parts: dict[str, tuple[Setting, int, float]] = {}
        values: list[Values] = []
        known = {TARGET: reference}
        for setting in settings:
            trained = "epoch-*" if self.from_prior else "scores/epoch-*"
            epochs = {int(path.name.removeprefix("epoch-")): path for path in setting.folder.glob(trained)}
            for epoch, scale in product(sorted(epochs), scales_of(self.run.recipe)):
                values.append({**setting.tried, "epoch": epoch} | ({"scale": scale} if self.from_prior else {}))
                name = candidate_name(values[-1])
                parts[name] = setting, epoch, scale
                if not self.from_prior:
                    known[name] = epochs[epoch]

        target = LoadedTarget(self.run)

        def load(candidate: Values | None) -> Any:
            return target.merged([self.term(*parts[candidate_name(candidate or {})])])

        vectors = [(load_manifest(setting.folder) or {}).get("files") for setting in settings]
        made_of = {"vectors": vectors} | (merge_identity(self.run) if self.from_prior else {})
        return Candidates(values, load, made_of, known, release=target.close), parts

    def _fit_settings(self, **changes: Any) -> FitSettings:
        return fit_settings(self.run, "forget", epochs=epochs_of(self.run.recipe), **changes)

    def term(self, setting: Setting, epoch: int, scale: float) -> Term[Path]:
        """Return the weights of an epoch as the merge's one term."""
        weights = setting.folder if self.run.validation is None else epoch_folder(setting.folder, epoch)
        return Term(self.method, weights, scale)

    def _target_validation(self, progress: Progress) -> Path | None:
        """Return the folder of the target's scores on the validation rows, with which epochs are compared."""
        if self.run.validation is None:
            logger.warning(
                "%s: no questions to choose an epoch by, so the last one is taken; evaluate.forget can give some",
                self.method,
            )
            return None
        evaluate_references(self.run, progress)
        return evaluate_target(self.run, progress)

    def _objective(self, setting: Setting) -> BaselineObjective:
        return BaselineObjective(
            self.method,
            setting.parameters,
            self.run.examples["forget"],
            self.run.examples.get("retain", ()),
            pad=pad_id(self.run.prompter.tokenizer),
            seed=self.run.recipe.seed,
            alternatives=self._alternatives(),
            cache=self._cache(),
            compat=bool(self.compat),
            full=self.run.recipe.vector.mode == "full",
        )

    def _alternatives(self) -> list[Example]:
        """Return the questions of the forget examples with other answers, for methods of pairs."""
        if METHODS[self.method].takes != "pairs":
            return []
        known = {row.index: row for row in self.run.rows["forget"]}
        questions = [known[example.index] for example in self.run.examples["forget"]]
        answers = draw_answers(len(questions), self.run.recipe.seed, self.run.alternatives)
        pairs = enumerate(zip(questions, answers, strict=True))
        rows = [replace(row, index=i, answer=answer) for i, (row, answer) in pairs]
        return encode_qa(rows, self.run.prompter, self.run.recipe.vector.max_length)

    def _cache(self) -> ReferenceCache | None:
        """Return the cache of log-probabilities before training, where the method needs them."""
        if METHODS[self.method].reference != "log_probs":
            return None
        sets = {"forget": self.run.examples["forget"], "alternatives": self._alternatives()}
        quantised = self.run.recipe.vector.mode == "qlora"
        return ReferenceCache(self.run.folder / "reference", self.run.sources["prior"], quantised, sets)
