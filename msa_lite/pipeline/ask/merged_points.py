"""Set the unlearned model of a run to any strengths: the merge in one target in memory; nothing is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msa_lite.errors import MismatchError, UsageError
from msa_lite.io.finished.seal import load_manifest
from msa_lite.io.weights.hub import Source, fetch
from msa_lite.pipeline.prepare.earlier import EarlierRun, open_earlier, strengths_of
from msa_lite.pipeline.run.folder import RunFolder
from msa_lite.pipeline.run.merge import LoadedTarget, Terms, merge_precision, point_terms
from msa_lite.report.run.provenance import PURGED_FILE, RECIPE_FILE, read_run, recorded_baseline
from msa_lite.strengths import Strengths, filtered_folder


@dataclass(frozen=True)
class MergedPoints:
    """A run of MSA whose strengths can be changed."""

    run: RunFolder
    chosen: Strengths
    """The strengths of the model that the run wrote."""
    filters: tuple[float, ...]
    """The λ whose forget vectors are there; 0 for the vector as it was fitted."""
    has_retain: bool
    """True if there is a retain vector to add, so that β may be above 0."""
    _earlier: Sequence[EarlierRun]
    _loaded: LoadedTarget

    def check(self, strengths: Strengths) -> None:
        """Raise UsageError for strengths that the run has no vectors for."""
        if strengths.filter not in self.filters:
            raise UsageError(f"λ = {strengths.filter:g}: the run has no such vector, only λ = {_listed(self.filters)}")
        if strengths.beta and not self.has_retain:
            raise UsageError("beta: the run adds no retain vector, so beta can only be 0")

    def model(self, strengths: Strengths) -> Any:
        """Return the model at these strengths; it is good until the next call. Raise as `check`.

        Raise MismatchError where the loaded target cannot be rewritten.
        """
        self.check(strengths)
        return self._loaded.merged(point_terms(self.run.folder, self.run.recipe, self._earlier, strengths))

    def close(self) -> None:
        """Free the memory of the target; the next call of `model` loads it again."""
        self._loaded.close()


def open_merged_points(run: RunFolder, target: Source) -> MergedPoints:
    """Open the vectors of a run. Raise UsageError, or MismatchError for damaged ones, with why there are none."""
    recipe, folder = run.recipe, run.folder
    if method := recorded_baseline(read_run(folder)):
        raise UsageError(f"this is a run of {method}, which has no α and β")
    chosen = strengths_of(recipe, folder)
    if chosen is None:
        raise UsageError(f"the run has not chosen its strengths yet; `msa-lite {folder / RECIPE_FILE}` goes on")
    if not _is_merged_at(run, chosen):
        raise UsageError(
            f"the run stopped after its strengths changed to {chosen}, and its model has former ones; "
            f"`msa-lite {folder / RECIPE_FILE}` goes on"
        )
    there = [0.0, *(strength for strength in recipe.filters if strength)]
    filters = tuple(s for s in there if _is_there(filtered_folder(folder, s) if s else folder / "vectors" / "forget"))
    if not filters:
        raise UsageError(
            f"its vectors {'were purged' if (folder / PURGED_FILE).exists() else 'are not there any more'}"
        )
    adds_retain = "retain" in recipe.vector_names and not recipe.starts_at_retain
    has_retain = adds_retain and _is_there(folder / "vectors" / "retain")
    if recipe.prior is None:
        raise UsageError("the run has no prior")
    prior = fetch(recipe.prior, by_content=False)
    loaded = LoadedTarget(target, prior, merge_precision(recipe), _refuse)
    return MergedPoints(run, chosen, filters, has_retain, open_earlier(recipe), loaded)


def _is_merged_at(run: RunFolder, strengths: Strengths) -> bool:
    """Check whether the run's model was merged at these strengths, by its manifest."""
    manifest = load_manifest(run.result) or {"inputs": {}}
    inputs, weights = manifest["inputs"], run.recipe.weights(strengths)
    recorded = inputs.get("strengths") or {"forget": inputs.get("alpha"), "retain": inputs.get("beta")}
    return all((recorded.get(name) or 0.0) == abs(weights[name]) for name in weights)


def _is_there(vector: Path) -> bool:
    return load_manifest(vector) is not None


def _refuse(terms: Terms) -> Any:
    """Refuse a target that is stored in another form than it is loaded: a run merges each point to the disk then."""
    raise MismatchError("the loaded target cannot be merged in memory, so its strengths cannot be changed here")


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)
