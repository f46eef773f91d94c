"""The stages of a baseline: train each setting, choose a setting and an epoch, merge that and score it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from msa_lite.baselines.losses import check_layer
from msa_lite.baselines.methods import METHODS, Value
from msa_lite.baselines.objective import BaselineObjective, draw_answers
from msa_lite.choose.choice import TARGET, Candidates, Values
from msa_lite.choose.rules import highest_rank
from msa_lite.data import Example, encode_qa, pad_id
from msa_lite.errors import NotFiniteError, StageError, UsageError
from msa_lite.io.console.progress import Progress
from msa_lite.io.finished.manifest import is_finished
from msa_lite.io.finished.seal import load_manifest
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.io.weights.hub import Source
from msa_lite.merger import Term
from msa_lite.pipeline.baseline.settings import (
    BestEpoch,
    Setting,
    drop_epochs,
    epochs_of,
    files_beside_weights,
    fit_costs,
    scales_of,
    scored_epochs,
)
from msa_lite.pipeline.prepare.run import Context, Run
from msa_lite.pipeline.run.choice import choose_candidate
from msa_lite.pipeline.run.evidence import evidence_stages
from msa_lite.pipeline.run.filtering import filter_stage, moments_stage
from msa_lite.pipeline.run.merge import LoadedTarget, merge_identity, merge_stage
from msa_lite.pipeline.run.scores import earlier_stages, score_stage, score_stages, scores_folder, validation_of
from msa_lite.pipeline.run.vectors import (
    check_learns,
    check_shares,
    first_epoch,
    fit_rate,
    fit_settings,
    make_fit,
    row_hashes,
    tracking_of,
)
from msa_lite.pipeline.stages.stage import Stage, unique
from msa_lite.report.run.choice import Choice, candidate_name, load_choice
from msa_lite.strengths import filtered_folder
from msa_lite.train import FitSettings, VectorFit, epoch_folder
from msa_lite.train.fit.loop import SCORES

logger = logging.getLogger(__name__)

_CHOICE = "choosing the epoch"


def _never(values: Values | None) -> Any:
    raise AssertionError("every epoch was scored when it ended")


@dataclass(frozen=True)
class Trials:
    """A method's run, from checks to the choice."""

    context: Context
    settings: Sequence[Setting]
    failed: list[Setting] = field(default_factory=list)
    """Settings whose loss stopped being a number in this process."""

    @property
    def run(self) -> Run:
        return self.context.run

    @property
    def method(self) -> str:
        return self.context.scope.method

    @property
    def from_prior(self) -> bool:
        return self.context.scope.start == "prior"

    @property
    def filter(self) -> float:
        """Return the strength λ of the chosen change's filter. 0 is no filter; for a baseline, `auto` is 0, too."""
        strength = self.context.recipe.merge.filter
        return strength if isinstance(strength, float) else 0.0

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
        for setting in self.settings:
            settings = self._settings_of(setting)
            check_learns("forget", settings, len(self.run.examples["forget"]))
            check_shares(self.run.crew, settings)
        if not self.context.chooses:
            logger.warning(
                "%s: no questions to choose an epoch by, so the last one is taken; evaluate.forget can give some",
                self.method,
            )

    def stages(self) -> list[Stage]:
        """Return the stages of the run: models to compare with are scored before anything is trained."""
        context, names = self.context, [setting.folder.name for setting in self.settings]
        recipe = context.recipe
        by_rows = context.chooses_by_rows and context.scope.start == "prior"
        scored = [*(["ideal"] if context.has_ideal else []), *(["prior"] if by_rows else []), "target"]
        scores, needs = list[Stage](), list[str]()
        for name in scored if context.chooses else ():
            scores.append(score_stage(context, name, "validation", needs[:1] if context.has_ideal else ()))
            needs.append(scores[-1].name)
        fits = [
            Stage(
                setting.folder.name,
                "fit",
                setting.folder,
                partial(self._fit, setting),
                needs=needs,
                inputs=partial(self._fit_inputs, setting),
                cost=partial(fit_costs, recipe, self.method, self.settings, number),
                says="a copy of a model is trained to forget; the change of its weights is the vector",
            )
            for number, setting in enumerate(self.settings)
        ]
        choice = Stage(
            _CHOICE,
            "choose",
            context.scope.folder / "sweep",
            self._choose,
            needs=names,
            inputs=lambda: self._candidates(self._fitted)[0].inputs(validation_of(self.run)),
            says="the epochs' scores on validation rows are compared",
        )
        chosen = [choice] if context.chooses else []
        needs = [*names, *(stage.name for stage in chosen)]
        moments, filtered = ([moments_stage(context)], [self._filter_stage(needs)]) if self.filter else ([], [])
        merge = merge_stage(context, lambda: [self._merged()], [*needs, *(stage.name for stage in filtered)])
        up_to_merge = [*moments, *scores, *fits, *chosen, *filtered, merge]
        later = [*score_stages(context, self._describe), *earlier_stages(context), *evidence_stages(context)]
        return unique([*up_to_merge, *later])

    def _filter_stage(self, needs: Sequence[str]) -> Stage:
        """Return the stage that filters the chosen change."""

        def fitted() -> tuple[Path, Source]:
            return self.term(*self.chosen()).vector, self.run.sources["prior"]

        folders = {self.filter: self._filtered}
        return filter_stage(self.context, f"change of {self.method}", self.filter, folders, fitted, needs)

    @property
    def _filtered(self) -> Path:
        """The folder of the filtered change."""
        return filtered_folder(self.context.scope.folder, self.filter, self.method)

    def _merged(self) -> Term[Path]:
        """Return the merge's one term, once it is chosen and filtered."""
        term = self.term(*self.chosen())
        return term.with_vector(self._filtered) if self.filter else term

    def _fit(self, setting: Setting, progress: Progress) -> None:
        """Train a setting. One whose loss is no number any more is left out, unless no other is there."""
        try:
            name = setting.folder.name
            make_fit(self._fit_of(setting), setting.folder, self.run.crew, {"name": name}, progress)
        except NotFiniteError as error:
            self.failed.append(setting)
            if len(self.failed) == len(self.settings):
                raise
            logger.warning("%s; it is left out of the choice", error)
        if self.run.validation is not None:
            self._keep_best()

    def _keep_best(self) -> None:
        """Remove the weights of all epochs but the best so far, of whatever setting. Reports and records stay."""
        fitted = [setting for setting in self._fitted if is_finished(setting.folder, self._fit_inputs(setting))]
        candidates, chosen_by_name = self._candidates(fitted)
        validation = validation_of(self.run)
        ranks = {name: validation.rank(candidates.known[name], self._reference) for name in chosen_by_name}
        if (best := highest_rank(ranks)) is not None:
            chosen, epoch, _ = chosen_by_name[best]
            for setting in fitted:
                drop_epochs(setting.folder, epoch if setting is chosen else None)

    @property
    def _fitted(self) -> list[Setting]:
        """Settings whose fit is on disk, even one made from other inputs."""
        return [setting for setting in self.settings if setting not in self.failed and load_manifest(setting.folder)]

    def fit_named(self, name: str) -> VectorFit:
        """Return the fit of the setting whose folder has this name."""
        return next(self._fit_of(setting) for setting in self.settings if setting.folder.name == name)

    def _fit_inputs(self, setting: Setting) -> dict[str, Any]:
        """Return all that decides the vector of a setting."""
        return self._fit_of(setting).inputs()

    def _fit_of(self, setting: Setting) -> VectorFit:
        settings = self._settings_of(setting)
        return VectorFit(
            self.run.sources["prior"],
            self.run.examples["forget"],
            self.run.prompter.tokenizer,
            settings,
            self._objective(setting),
            self._after(settings),
            label=setting.folder.name,
            extra_files=row_hashes(self.run.rows["forget"]),
            tracking=tracking_of(self.run),
        )

    def _settings_of(self, setting: Setting) -> FitSettings:
        rate = self._rate(setting)
        return fit_settings(self.run, "forget", epochs=epochs_of(self.run.recipe), learning_rate=rate)

    def _rate(self, setting: Setting) -> Value:
        """Return the learning rate of a setting, or the one that suits the model."""
        rate = setting.parameters["learning_rate"]
        return fit_rate(self.run, "forget") if rate == "auto" else rate

    def _after(self, fitted: FitSettings) -> BestEpoch | None:
        """Return what happens after an epoch: its scores on validation rows are compared with the best so far."""
        if self.run.validation is None:
            return None
        first = first_epoch(fitted, len(self.run.examples["forget"]))
        best = BestEpoch(validation_of(self.run), self._reference, first)
        if not self.from_prior:
            return best
        target = LoadedTarget.of(self.run)

        def load(weights: Path, scale: float) -> Any:
            return target.merged([Term(self.method, weights, scale)])

        scales, merge = scales_of(self.run.recipe), merge_identity(self.run)
        return replace(best, scales=scales, merge=merge, load=load, release=target.close)

    @property
    def _reference(self) -> Path:
        """The folder of the target's scores on the validation rows."""
        return scores_folder(self.run, "target", "validation")

    def _choose(self, progress: Progress) -> Choice:
        """Return the best setting, epoch and scale on the validation rows."""
        self._keep_best()  # a kill may have left more
        return choose_candidate(self.run, self._candidates(self._fitted)[0], "the epoch", progress)

    def chosen(self) -> tuple[Setting, int, float]:
        """Return (setting, epoch, scale) as they were chosen. Without scores that is the last epoch."""
        if self.run.validation is None:
            return self.settings[0], epochs_of(self.run.recipe), scales_of(self.run.recipe)[0]
        return self._candidates(self._fitted)[1][candidate_name(load_choice(self.run.folder / "sweep").values)]

    def values_of(self, setting: Setting, epoch: int, scale: float) -> dict[str, Value]:
        """Return what was chosen, by name."""
        values: dict[str, Value] = {**setting.parameters, "learning_rate": self._rate(setting), "epoch": epoch}
        values |= {"scale": scale} if self.from_prior else {}
        return values | ({"filter": self.filter} if self.filter else {})

    def _describe(self) -> dict[str, Any]:
        """Return the method as the unlearned model's report names it."""
        recipe, chosen = self.run.recipe, self.values_of(*self.chosen())
        return self.run.scope.describe(recipe, {**chosen, "epochs": epochs_of(recipe)})

    def _candidates(self, fitted: list[Setting]) -> tuple[Candidates, dict[str, tuple[Setting, int, float]]]:
        """Return the candidates to choose from, and (setting, epoch, scale) of each by its name. All are scored."""
        chosen_by_name: dict[str, tuple[Setting, int, float]] = {}
        values: list[Values] = []
        known = {TARGET: self._reference}
        for setting in fitted:
            for epoch, scale in product(scored_epochs(setting.folder), scales_of(self.run.recipe)):
                own: dict[str, Value] = {"epoch": epoch, **({"scale": scale} if self.from_prior else {})}
                values.append({**setting.tried, **own})
                name = candidate_name(values[-1])
                chosen_by_name[name] = setting, epoch, scale
                known[name] = setting.folder / SCORES / candidate_name(own)
        made_of: dict[str, Any] = {"vectors": [files_beside_weights(setting.folder) for setting in fitted]}
        made_of |= merge_identity(self.run) if self.from_prior else {}
        return Candidates(values, _never, made_of, known), chosen_by_name

    def term(self, setting: Setting, epoch: int, scale: float) -> Term[Path]:
        """Return the weights of an epoch as a term of a merge.

        Raise StageError if they were dropped after an earlier choice, among other settings.
        """
        weights = setting.folder if self.run.validation is None else epoch_folder(setting.folder, epoch)
        if not weights.is_dir():
            raise StageError(f"{weights}: dropped after an earlier choice; remove {setting.folder}, and run again")
        return Term(self.method, weights, scale)

    def _objective(self, setting: Setting) -> BaselineObjective:
        return BaselineObjective(
            self.method,
            setting.parameters,
            self.run.examples["forget"],
            self.run.examples.get("retain", ()),
            pad=pad_id(self.run.prompter.tokenizer),
            seed=self.run.recipe.seed,
            alternatives=self._alternatives(),
            full=self.run.recipe.vector.mode == "full",
        )

    def _alternatives(self) -> list[Example]:
        """Return the questions of the forget examples with other answers, for methods of pairs."""
        if METHODS[self.method].takes != "pairs":
            return []
        known = {row.index: row for row in self.run.rows["forget"]}
        questions = [known[example.index] for example in self.run.examples["forget"]]
        answers = draw_answers(len(questions), self.run.recipe.seed)
        pairs = enumerate(zip(questions, answers, strict=True))
        rows = [replace(row, index=i, answer=answer) for i, (row, answer) in pairs]
        return encode_qa(rows, self.run.prompter, self.run.recipe.vector.max_length)
