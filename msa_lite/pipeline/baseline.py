"""Run a baseline: recipe → training, epoch by epoch → the choice of an epoch → merge → scores.

A baseline trains a vector as MSA does, an adapter or a checkpoint. The same merge adds it to the target: once where
training started from the target, `scale` times where it started from the prior (MSA paper, App. "Augmenting Baselines
with Intermediate Checkpoints").
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from msa_lite.baselines.alternatives import draw_answers
from msa_lite.baselines.methods import METHODS, TASK_VECTOR, Value, check_grids, check_method, settings_grid
from msa_lite.baselines.objective import BaselineObjective
from msa_lite.baselines.passes import check_layer
from msa_lite.baselines.reference import ReferenceCache
from msa_lite.choose.candidates import TARGET, Candidates, Values
from msa_lite.data import Example, encode_qa, pad_id
from msa_lite.errors import NotFiniteError, UsageError
from msa_lite.io.checkpoint import load_checkpoint
from msa_lite.io.crew import Crew
from msa_lite.io.gathering import gathered
from msa_lite.io.progress import Progress, Step, announce, notices, silent
from msa_lite.io.seal import load_manifest
from msa_lite.merger import Term
from msa_lite.pipeline.cards import complete_card
from msa_lite.pipeline.demo import demo_config
from msa_lite.pipeline.epochs import BestEpoch, EveryEpoch
from msa_lite.pipeline.fits import check_learns, first_epoch, fit_rate, fit_settings
from msa_lite.pipeline.folder import BASELINES, claimed
from msa_lite.pipeline.follow import follow_run
from msa_lite.pipeline.loaded import LoadedTarget
from msa_lite.pipeline.msa import RunResult, make_result, msa_plan, run_plan
from msa_lite.pipeline.planning_check import check_memory
from msa_lite.pipeline.prepare import Run, RunPlan
from msa_lite.pipeline.removal import write_record
from msa_lite.pipeline.reporting import drop_report, write_run_report
from msa_lite.pipeline.stages import (
    choose_candidate,
    evaluate_all,
    evaluate_references,
    evaluate_target,
    merge_identity,
    merge_vectors,
    row_hashes,
    tracking_of,
    validation_of,
)
from msa_lite.pipeline.steps import score_steps, sweep_steps
from msa_lite.pipeline.verdict import judge_run
from msa_lite.recipe import Recipe, RecipeSource, load_recipe
from msa_lite.report.choosing import candidate_name
from msa_lite.train import FitSettings, epoch_folder, fit_vector
from msa_lite.train.auto import EPOCHS

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Setting:
    """One point of a method's grid."""

    parameters: Mapping[str, Value]
    """All parameters of the method."""
    tried: Mapping[str, Value]
    """Those of them whose values differ within the grid."""
    folder: Path
    """The folder of its vector."""


def run_baseline(
    method: str,
    recipe: RecipeSource,
    overrides: Iterable[str] = (),
    progress: Progress = silent,
    *,
    force: bool = False,
) -> RunResult | None:
    """Run a method that MSA is compared with on a recipe's models and data, and score it in the same way.

    The run goes into `baselines/METHOD` of the recipe's output (`METHOD-prior` with `start: prior`). Raise before
    anything is written if method, recipe or inputs are at fault. force: only warn if the device's memory is too small
    by prediction. Return None in the processes of a launcher but the first.
    """
    check_method(method)
    recipe = load_recipe(recipe, overrides)
    if recipe.earlier:
        raise UsageError(
            f"earlier: {method} is compared on one request; run it with earlier=[], or on a recipe of its own with the "
            "rows of all requests"
        )
    check_grids(recipe.baseline.methods)
    if method == TASK_VECTOR and recipe.baseline.start == "prior":
        raise UsageError(f"{method} from the prior is MSA itself: `msa-lite run`; leave baseline.start at target")
    settings: Sequence[Setting] = ()
    if method == TASK_VECTOR:
        folder = recipe.folder / BASELINES / method
        plan = replace(msa_plan(recipe), method=method, folder=folder, start="target")
    else:
        plan, settings = _plan(method, recipe)
    plan = replace(plan, force=force)
    with gathered([method, recipe.model_dump(mode="json")]) as crew:
        if not crew.first:
            follow_run(crew, recipe, plan)
            return None
        if method == TASK_VECTOR:
            return run_plan(recipe, plan, progress, crew=crew)
        return _run(recipe, plan, settings, progress, crew)
    return None


def _run(recipe: Recipe, plan: RunPlan, settings: Sequence[Setting], progress: Progress, crew: Crew) -> RunResult:
    """Run the plan of a baseline that trains. The first process of a crew trains alone; all of them score."""

    def check(run: Run) -> None:
        _resolved(run, settings).check()
        check_memory(run)

    with claimed(recipe, plan, progress, check, crew=crew) as run:
        if not crew.is_alone:
            notices.info("%s: one process trains; the others help with the scores", plan.method)
        drop_report(run.folder)
        trials = _resolved(run, settings)
        announce(progress, trials.steps())
        setting, epoch, scale = trials.choose(trials.fit(progress), progress)
        merged = merge_vectors(run, [trials.term(setting, epoch, scale)], progress)
        chosen: dict[str, Value] = {**setting.parameters, "epoch": epoch}
        chosen |= {"scale": scale} if plan.start == "prior" else {}
        about = plan.describe(recipe, chosen | {"epochs": _epochs(recipe)}, trials.compat)
        reports = evaluate_all(run, merged, about, progress)
        findings = judge_run(run, progress)
        complete_card(run, merged, chosen)
        write_record(run, chosen, merged)
        write_run_report(run.folder)
    return make_result(run, chosen, merged, reports, findings)


def _plan(method: str, recipe: Recipe) -> tuple[RunPlan, list[Setting]]:
    """Return the plan of a method's run, and the settings to try. Raise UsageError if several have no scores."""
    spec = recipe.baseline
    folder = recipe.folder / BASELINES / (method if spec.start == "target" else f"{method}-{spec.start}")
    rate = spec.learning_rate or recipe.vector.learning_rate
    grid = settings_grid(method, spec.methods.get(method, {}))
    points: list[dict[str, Value]] = [{**point, "learning_rate": point.get("learning_rate", rate)} for point in grid]
    several = [key for key in points[0] if len({point[key] for point in points}) > 1]
    settings = []
    for point in points:
        tried = {key: point[key] for key in several}
        name = "_".join([method, candidate_name(tried)]) if tried else method
        settings.append(Setting(point, tried, folder / "vectors" / name))
    choice: bool | Literal["if possible"] = len(points) * len(_scales(recipe)) > 1 or "if possible"
    if choice is True and recipe.evaluate is None:
        raise UsageError(f"several settings of {method} need scores to choose by; do not set evaluate to null")
    if recipe.demo and (layers := [int(point["layer"]) for point in points if "layer" in point]):
        check_layer("the demo's model", demo_config(recipe.demo), max(layers))  # before it is trained
    names = [setting.folder.name for setting in settings]
    checkpoints = _epochs(recipe) if spec.start == "prior" else 1
    return RunPlan(method, folder, spec.start, choice, names, checkpoints, sample=False), settings


def _epochs(recipe: Recipe) -> int:
    usual = EPOCHS if recipe.vector.epochs == "auto" else recipe.vector.epochs
    return recipe.baseline.epochs or usual


def _scales(recipe: Recipe) -> list[float]:
    scale = recipe.baseline.scale
    return scale if isinstance(scale, list) else [scale]


def _resolved(run: Run, settings: Sequence[Setting]) -> _Trials:
    """Return the run with the learning rate that suits the model, where the recipe names none."""

    def with_rate(setting: Setting) -> Setting:
        if setting.parameters["learning_rate"] != "auto":
            return setting
        return replace(setting, parameters={**setting.parameters, "learning_rate": fit_rate(run, "forget")})

    return _Trials(run, [with_rate(setting) for setting in settings])


@dataclass(frozen=True)
class _Trials:
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
        check_learns(self.run, ["forget"], epochs=_epochs(self.run.recipe))
        if cache := self._cache():
            cache.check()

    def steps(self) -> list[Step]:
        """Return the steps in their order: target and ideal are scored before anything is trained."""
        fits = [Step(setting.folder.name, "fit") for setting in self.settings]
        count = len(self.settings) * _epochs(self.run.recipe) * len(_scales(self.run.recipe))
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
        fitted = self._fit_settings(learning_rate=setting.parameters["learning_rate"])
        first = first_epoch(fitted, len(self.run.examples["forget"]))
        after: BestEpoch | EveryEpoch | None = None
        if self.run.validation is not None and reference is not None:
            best = BestEpoch(validation_of(self.run), reference, first)
            after = EveryEpoch(first) if self.from_prior else best
        fit_vector(
            self.run.sources["prior"],
            self.run.examples["forget"],
            setting.folder,
            tokenizer=self.run.prompter.tokenizer,
            settings=fitted,
            label=setting.folder.name,
            extra_files=row_hashes(self.run.rows["forget"]),
            objective=self._objective(setting),
            after_epoch=after,
            tracking=tracking_of(self.run),
            progress=progress,
        )

    def choose(self, settings: Sequence[Setting], progress: Progress) -> tuple[Setting, int, float]:
        """Return (setting, epoch, scale). Without scores that is the last epoch."""
        scales = _scales(self.run.recipe)
        if self.run.validation is None:
            return settings[0], _epochs(self.run.recipe), scales[0]
        parts: dict[str, tuple[Setting, int, float]] = {}
        values: list[Values] = []
        known = {TARGET: evaluate_target(self.run, progress)}
        for setting in settings:
            trained = "epoch-*" if self.from_prior else "scores/epoch-*"
            epochs = {int(path.name.removeprefix("epoch-")): path for path in setting.folder.glob(trained)}
            for epoch, scale in product(sorted(epochs), scales):
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
        candidates = Candidates(values, load, made_of, known, release=target.close)
        choice = choose_candidate(self.run, candidates, "the epoch", progress)
        return parts[candidate_name(choice.values)]

    def _fit_settings(self, **changes: Any) -> FitSettings:
        return fit_settings(self.run, "forget", epochs=_epochs(self.run.recipe), **changes)

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
