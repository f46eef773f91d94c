"""One setting of a baseline: the epochs that are kept, and the cost of its training."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msa_lite.baselines.methods import METHODS, Value
from msa_lite.budget.plan import StageCost, sum_seconds
from msa_lite.budget.speed import Machine
from msa_lite.choose.rules import Rank
from msa_lite.choose.validation import Validation
from msa_lite.io.finished.seal import drop_files, load_manifest
from msa_lite.pipeline.stages.asking import candidates_costs
from msa_lite.pipeline.stages.costs import vector_costs
from msa_lite.pipeline.stages.facts import Facts
from msa_lite.recipe import Recipe
from msa_lite.report import load_report
from msa_lite.train import KeptEpochs, epoch_folder
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
        if epoch >= self.first:
            epoch_folder(scores, epoch).mkdir(parents=True, exist_ok=True)  # stays when the weights go
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


def fit_costs(
    recipe: Recipe, method: str, settings: Sequence[Setting], number: int, facts: Facts, machine: Machine
) -> list[StageCost]:
    """Return the cost of a setting's fit, with the scores of its epochs where these are candidates by themselves.

    All epochs that are kept lie on the disk until one of them is chosen.
    """
    layers, parameters = facts.shapes["prior"].layers, settings[number].parameters
    used = min(1.0, (int(parameters.get("layer", layers)) + 1) / layers)
    reference = used if METHODS[method].runs_reference(parameters) else 0.0
    more = METHODS[method].more_passes(parameters, _tokens_per_row(facts))
    fixed = {"hold": 0.0, "epochs": epochs_of(recipe)}  # a baseline knows neither a hold nor an open end
    fitted = recipe.model_copy(update={"vector": recipe.vector.model_copy(update=fixed)})
    (cost,) = vector_costs(fitted, "forget", facts, machine, reference, more)
    if "validation" in facts.asked and recipe.baseline.start == "target":
        (scores,) = candidates_costs(recipe, epochs_of(recipe), facts, machine)
        cost = replace(cost, seconds=sum_seconds(cost.seconds, scores.seconds))
    checkpoints = epochs_of(recipe) if recipe.baseline.start == "prior" else 1
    size = cost.disk["vectors"]
    until_chosen = {"epochs to choose from": (checkpoints * len(settings) - 1) * size}
    disk = {"vectors": size} if number == 0 else {}
    return [replace(cost, disk=disk, while_running={**cost.while_running, **until_chosen})]


def _tokens_per_row(facts: Facts) -> float:
    """Return the tokens of a retain row for each token of a forget row; 1 where they are not known."""
    sets = [facts.rows.get(name) for name in ("retain", "forget")]
    per_row = [size.tokens / size.count for size in sets if size and size.count]
    return per_row[0] / per_row[1] if len(per_row) == 2 else 1.0


def epoch_of(folder: Path) -> int:
    """Return the number of an epoch by its folder."""
    return int(folder.name.removeprefix("epoch-"))


def epoch_score_costs(recipe: Recipe, settings: int, facts: Facts, machine: Machine) -> list[StageCost]:
    """Return the cost of scoring epochs that were trained from the prior; others were scored when they were trained."""
    count = epochs_of(recipe) * len(scales_of(recipe)) * settings if recipe.baseline.start == "prior" else 0
    return candidates_costs(recipe, count, facts, machine)


def files_beside_weights(folder: Path) -> dict[str, Any]:
    """Return the files of a setting without the weights of its epochs, which are dropped after the choice."""
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
