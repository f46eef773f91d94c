"""The settings of a baseline: those that its recipe asks for, the choice among epochs during a training, and its cost.

A baseline trains a vector as MSA does, an adapter or a checkpoint. The same merge adds it to the target: once where
training started from the target, `scale` times where it started from the prior (MSA paper, App. "Augmenting Baselines
with Intermediate Checkpoints").
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

from msa_lite.baselines.losses import check_layer
from msa_lite.baselines.methods import METHODS, TASK_VECTOR, Value, check_grids, check_method, settings_grid
from msa_lite.budget.needs import Need
from msa_lite.budget.plan import StageCost, sum_seconds
from msa_lite.budget.speed import Machine
from msa_lite.choose.rules import Rank, highest_rank
from msa_lite.choose.validation import Validation
from msa_lite.errors import NotFiniteError, UsageError
from msa_lite.io.finished.seal import drop_files, load_manifest
from msa_lite.io.models.heads import autocast
from msa_lite.pipeline.prepare.models import demo_config
from msa_lite.pipeline.prepare.run import Scope, msa_scope
from msa_lite.pipeline.run.folder import BASELINES
from msa_lite.pipeline.stages.costs import candidates_costs, vector_costs
from msa_lite.pipeline.stages.facts import Facts
from msa_lite.recipe import Recipe
from msa_lite.report import REPORT_FILE, load_report
from msa_lite.report.run.choice import candidate_name
from msa_lite.train import KeptEpochs, epoch_folder
from msa_lite.train.fit.loop import SCORES
from msa_lite.train.settings import EPOCHS

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BestEpoch:
    """Score each epoch on validation rows when it ends, and keep the weights of the best so far.

    Where training starts from the target, the trained model is scored; a broken one ends the training. Where it starts
    from the prior, each of the `scales` gives a model to score: the target plus so much of the change.
    """

    validation: Validation
    reference: Path
    """The folder of the target's scores."""
    first: int = 1
    """The first epoch that is a candidate."""
    scales: Sequence[float] = ()
    """Factors of the prior's change; none where training starts from the target."""
    merge: Mapping[str, Any] = field(default_factory=dict)
    """All that decides the target plus a change, besides the change."""
    load: Callable[[Path, float], Any] | None = None
    """Loads the target plus a change, by the folder of the epoch's weights and its factor."""
    release: Callable[[], None] = lambda: None
    """Frees the memory of what was loaded."""

    def describe(self) -> dict[str, Any]:
        """Return all that decides which epochs are kept, for a manifest."""
        rule = {**self.validation.describe(), **self.validation.describe_rule(), "first": self.first}
        added = {"scales": list(self.scales), "merge": self.merge} if self.scales else {}
        return {**rule, "target": load_report(self.reference).values(), **added}

    def __call__(self, model: Any, epoch: int, scores: Path) -> KeptEpochs:
        if epoch < self.first:
            return KeptEpochs(frozenset())
        ranks: dict[tuple[int, float], Rank | str] = {}
        scores.mkdir(exist_ok=True)
        try:
            for number, scale in product(range(self.first, epoch + 1), self.scales or [1.0]):
                values = self.values_of(number, scale)
                folder = scores / candidate_name(values)
                if not (folder / REPORT_FILE).is_file():
                    self._score(model, folder, epoch_folder(scores.parent, number), scale, values)
                ranks[number, scale] = self.validation.rank(folder, self.reference)
        finally:
            self.release()
        fault = ranks[epoch, 1.0] if not self.scales else None
        if isinstance(fault, str):
            logger.warning("epoch %d is broken (%s); training ends there", epoch, fault)
        best = highest_rank(ranks) or (epoch, 1.0)
        return KeptEpochs(frozenset([best[0]]), not isinstance(fault, str))

    def values_of(self, epoch: int, scale: float) -> dict[str, Value]:
        """Return a candidate's values, which name the folder of its scores."""
        return {"epoch": epoch, **({"scale": scale} if self.scales else {})}

    def _score(self, model: Any, folder: Path, weights: Path, scale: float, values: Mapping[str, Value]) -> None:
        """Score a candidate, without a change of the random numbers that the training goes on with."""
        import torch

        about = {"candidate": dict(values)}
        with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
            if self.load is None:
                with autocast(model):  # as the Trainer has it, also for parts of the model that it does not call
                    self.validation.score_into(folder, lambda: model, about)
                return
            load = partial(self.load, weights, scale)
            try:
                self.validation.score_into(folder, load, about, release=self.release)
            except NotFiniteError as error:
                logger.warning("%s: %s; it is left out of the choice", folder.name, error)
                self.validation.write_broken(folder, str(error))


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


def fit_costs(
    recipe: Recipe, method: str, settings: Sequence[Setting], number: int, facts: Facts, machine: Machine
) -> list[StageCost]:
    """Return the cost of a setting's fit, with the scores of its epochs.

    The best epoch of all settings so far lies on the disk, that of this setting, and one that is compared with them.
    """
    layers, parameters = facts.shapes["prior"].layers, settings[number].parameters
    used = min(1.0, (int(parameters.get("layer", layers)) + 1) / layers)
    reference = used if METHODS[method].runs_reference(parameters) else 0.0
    more = METHODS[method].more_passes(parameters, facts.retain_ratio)
    fixed = {"hold": 0.0, "epochs": epochs_of(recipe)}  # a baseline knows neither a hold nor an open end
    fitted = recipe.model_copy(update={"vector": recipe.vector.model_copy(update=fixed)})
    (cost,) = vector_costs(fitted, "forget", facts, machine, reference, more)
    need = Need(cost.need.parts, "the loss of a baseline may hold more than is counted")
    size, files = cost.disk["vectors"], dict(cost.while_running)
    if facts.questions:
        (scores,) = candidates_costs(recipe, epochs_of(recipe) * len(scales_of(recipe)), facts, machine)
        cost = replace(cost, seconds=sum_seconds(cost.seconds, scores.seconds))
        files["epochs that are compared"] = size * (min(1, number) + min(1, epochs_of(recipe) - 1))
    return [replace(cost, need=need, disk={"vectors": size} if number == 0 else {}, while_running=files)]


def scored_epochs(folder: Path) -> list[int]:
    """Return the epochs of a finished setting that have scores."""
    names = {path.parent.name for path in folder.glob(f"{SCORES}/*/{REPORT_FILE}")}
    return sorted({int(name.removeprefix("epoch-").partition("_")[0]) for name in names})


def files_beside_weights(folder: Path) -> dict[str, Any]:
    """Return the files of a setting without the weights of its epochs, of which the best alone stays."""
    files = (load_manifest(folder) or {}).get("files", {})
    return {name: item for name, item in files.items() if not name.startswith("epoch-")}


def drop_epochs(folder: Path, keep: int | None) -> None:
    """Remove the weights of a setting's epochs, all but one. Reports and records stay."""
    files = (load_manifest(folder) or {}).get("files", {})
    dropped = {name for name in files if name.startswith("epoch-") and not name.startswith(f"epoch-{keep}/")}
    if dropped:
        drop_files(folder, dropped)
    for place in folder.glob("epoch-*"):
        with suppress(OSError):  # not empty: it is kept
            place.rmdir()
