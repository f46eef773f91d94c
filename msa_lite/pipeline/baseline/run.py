"""Run a baseline: recipe → training, epoch by epoch → the choice of an epoch → merge → scores.

A baseline trains a vector as MSA does, an adapter or a checkpoint. The same merge adds it to the target: once where
training started from the target, `scale` times where it started from the prior (MSA paper, App. "Augmenting Baselines
with Intermediate Checkpoints").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from msa_lite.baselines.losses import check_layer
from msa_lite.baselines.methods import TASK_VECTOR, Value, check_grids, check_method, settings_grid
from msa_lite.errors import UsageError
from msa_lite.pipeline.baseline.settings import Setting, scales_of
from msa_lite.pipeline.baseline.trials import Trials
from msa_lite.pipeline.prepare.models import demo_config
from msa_lite.pipeline.prepare.run import Scope, msa_scope
from msa_lite.pipeline.run.evidence import evidence_stages
from msa_lite.pipeline.run.folder import BASELINES
from msa_lite.pipeline.run.scores import earlier_stages, score_stages
from msa_lite.pipeline.stages.stage import Stage, unique
from msa_lite.recipe import Recipe
from msa_lite.report.run.choice import candidate_name


def baseline_stages(trials: Trials) -> list[Stage]:
    """Return the stages of a method that trains."""

    def describe() -> Mapping[str, Any]:
        return trials.describe(trials.values_of(*trials.chosen()))

    return unique(
        [
            *trials.stages(),
            *score_stages(trials.context, describe),
            *earlier_stages(trials.context),
            *evidence_stages(trials.context),
        ]
    )


def baseline_scope(method: str, recipe: Recipe) -> tuple[Scope, Sequence[Setting]]:
    """Return the scope of a method's run, and the settings to try: none for the task vector.

    Raise UsageError for a recipe that the method cannot be run on.
    """
    check_method(method)
    if recipe.earlier:
        raise UsageError(
            f"earlier: {method} is compared on one request; run it with earlier=[], or on a recipe of its own with the "
            "rows of all requests"
        )
    check_grids(recipe.baseline.methods)
    if method == TASK_VECTOR and recipe.baseline.start == "prior":
        raise UsageError(f"{method} from the prior is MSA itself: `msa-lite run`; leave baseline.start at target")
    if method == TASK_VECTOR:
        folder = recipe.folder / BASELINES / method
        return replace(msa_scope(recipe), method=method, folder=folder, start="target", is_baseline=True), ()
    return _scope(method, recipe)


def _scope(method: str, recipe: Recipe) -> tuple[Scope, list[Setting]]:
    """Return the scope of a method's run, and the settings to try. Raise UsageError if several have no scores."""
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
    choice: bool | Literal["if possible"] = len(points) * len(scales_of(recipe)) > 1 or "if possible"
    if choice is True and recipe.evaluate is None:
        raise UsageError(f"several settings of {method} need scores to choose by; do not set evaluate to null")
    if recipe.demo and (layers := [int(point["layer"]) for point in points if "layer" in point]):
        check_layer("the demo's model", demo_config(recipe.demo), max(layers))  # before it is trained
    names = [setting.folder.name for setting in settings]
    return Scope(method, folder, spec.start, choice, names, sample=False, is_baseline=True), settings
