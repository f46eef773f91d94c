"""List the stages of each command with the folders that they make, to tell which of them are to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from msa_lite.choose.choice import load_choice
from msa_lite.io.weights.hub import fetch
from msa_lite.pipeline.baseline.trials import Setting
from msa_lite.pipeline.prepare.run import Run, RunPlan
from msa_lite.pipeline.run.choice import run_terms, sweep_inputs
from msa_lite.pipeline.run.knowledge import PROBE_FOLDER, check_parts
from msa_lite.pipeline.run.probe import probe_stages
from msa_lite.pipeline.run.scores import merge_inputs, scoring_inputs, validation_folder
from msa_lite.pipeline.run.steps import check_steps, prior_steps, score_steps
from msa_lite.pipeline.run.vectors import vector_inputs
from msa_lite.pipeline.stages.facts import vector_names
from msa_lite.pipeline.stages.stage import Ahead, StageInputs, look_ahead
from msa_lite.recipe import Recipe, TrainingRecipe
from msa_lite.strengths import Strengths

_CHOICE = "choosing alpha and beta"


def vectors_ahead(run: Run, names: Sequence[str]) -> list[Ahead]:
    """Return what `vector` would do."""
    return look_ahead(_fits(run, names))


def _fits(run: Run, names: Sequence[str]) -> list[StageInputs]:
    return [StageInputs(f"{name} vector", run.vector_folder(name), partial(vector_inputs, run, name)) for name in names]


def run_ahead(run: Run, command: str) -> list[Ahead]:
    """Return what `run` or `sweep` would do, or a baseline that merges as they do."""
    fits = _fits(run, run.vector_names)
    checks = [_check(run, step.label) for step in check_steps(run)]
    labels = [stage.label for stage in fits]
    needs = [*labels, *(stage.label for stage in checks if stage.label in ("validation: ideal", "validation: prior"))]
    choice = [StageInputs(_CHOICE, run.folder / "sweep", partial(sweep_inputs, run), needs)] if run.validation else []

    def merge() -> dict[str, Any]:
        return merge_inputs(run, run_terms(run, _chosen(run)))

    labels += [stage.label for stage in choice]
    made = [*checks, *fits, *choice, StageInputs("merge", run.folder / run.recipe.merge.form, merge, labels)]
    if command == "sweep":
        return look_ahead([*made, *_validation_after(run)])
    return scores_ahead(run, made, lambda: run.plan.describe(run.recipe, _chosen(run).values))


def _chosen(run: Run) -> Strengths:
    """Return alpha and beta: those of the recipe, or those that were chosen."""
    return Strengths.of(load_choice(run.folder / "sweep").values) if run.validation else run.recipe.points[0]


def _check(run: Run, label: str) -> StageInputs:
    """Return a stage of the check of target and prior before the fits."""
    for part in check_parts(run):
        if part.label == label:
            return StageInputs(label, part.folder, part.inputs)
    name = label.removeprefix("validation: ")
    inputs = partial(scoring_inputs, run, name, "validation", run.sources[name])
    needs = ["validation: ideal"] if name == "target" else []
    return StageInputs(label, validation_folder(run, name), inputs, needs)


def _validation_after(run: Run) -> list[StageInputs]:
    """Return the scores of the merged model on the validation rows, where there are such rows."""
    if run.validation is None:
        return []

    def inputs() -> dict[str, Any]:
        return scoring_inputs(run, "unlearned", "validation", fetch(str(run.folder / run.recipe.merge.form)))

    return [StageInputs("validation: unlearned", validation_folder(run, "unlearned"), inputs, ["merge"])]


def scores_ahead(run: Run, made: Sequence[StageInputs], describe: Callable[[], Mapping[str, Any]]) -> list[Ahead]:
    """Return what a run would do: the stages up to the merged model, and the scores after it.

    describe: returns the method as the unlearned model's report names it, once the model is there.
    """
    labels = {stage.label for stage in made}
    ahead = [*made, *(_validation_after(run) if _CHOICE in labels else [])]
    for step in [*score_steps(run), *prior_steps(run)]:
        part, _, name = step.label.partition(": ")
        needs = ["merge"] if name == "unlearned" else []
        needs += ["scores: ideal"] if part == "scores" and name != "ideal" else []
        ahead.append(
            StageInputs(step.label, run.folder / "evaluation" / name, partial(_score, run, name, describe), needs)
        )
    return look_ahead(ahead)


def _score(run: Run, name: str, describe: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Return all that decides the scores of a model on the test rows."""
    if name != "unlearned":
        return scoring_inputs(run, name, "test", run.sources[name])
    return scoring_inputs(run, name, "test", fetch(str(run.folder / run.recipe.merge.form)), describe())


def probe_ahead(run: Run) -> list[Ahead]:
    """Return what `probe` would do."""
    stages = probe_stages(run).items()
    return look_ahead(StageInputs(f"probe: {name}", folder, lambda made=made: made) for name, (folder, made) in stages)  # type: ignore[misc]


def rough_stages(
    command: str, recipe: Recipe, plan: RunPlan, which: str, settings: Sequence[Setting] = ()
) -> list[Ahead]:
    """Return the stages of a command whose inputs are not all here."""
    if command == "probe":
        return look_ahead([StageInputs("probe: prior", plan.folder / PROBE_FOLDER / "prior")])
    fits = [StageInputs(setting.folder.name, setting.folder) for setting in settings]
    names = [] if settings else vector_names(recipe)
    fits += [StageInputs(f"{name} vector", plan.folder / "vectors" / name) for name in names if which in ("all", name)]
    if command == "vector":
        return look_ahead(fits)
    chooses = recipe.evaluate is not None if settings else recipe.has_choice
    label = "choosing the epoch" if settings else _CHOICE
    choice = [StageInputs(label, plan.folder / "sweep")] if chooses else []
    merge = StageInputs("merge", plan.folder / recipe.merge.form)
    models = ["ideal"] if recipe.evaluate and recipe.evaluate.ideal else []
    models += ["target", "unlearned"] if recipe.evaluate else []
    scores = [StageInputs(f"scores: {name}", plan.folder / "evaluation" / name) for name in models]
    return look_ahead([*fits, *choice, merge, *([] if command == "sweep" else scores)])


def rough_training(recipe: TrainingRecipe) -> list[Ahead]:
    """Return the stages of a training whose inputs are not all here."""
    names = [f"{number}-{stage.title}" for number, stage in enumerate(recipe.stages, 1)]
    return look_ahead(StageInputs(name, recipe.folder / name) for name in names)
