"""Open the folder of a run that was made before, wherever it lies now."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from msa_lite.pipeline.folder import BASELINES
from msa_lite.recipe import Recipe, load_recipe, moved_paths
from msa_lite.report.provenance import RECIPE_FILE, read_run


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, and the recipe that was resolved for it."""

    folder: Path
    """The folder of this run."""
    recipe: Recipe
    """Its recipe, with the paths of files in the folder as they are now."""

    @property
    def home(self) -> Path:
        """Return the folder of the recipe: this one, or for the run of a baseline the one above `baselines`."""
        return self.recipe.folder

    @property
    def result(self) -> Path:
        """Return the folder of what the run makes: the unlearned model, or an adapter on the target."""
        return self.folder / ("adapter" if self.recipe.merge.form == "adapter" else "model")


def open_run(folder: str | Path) -> RunFolder:
    """Open the folder of a run. Raise UsageError for any other folder; RecipeError if its recipe cannot be read."""
    folder = Path(folder)
    read_run(folder)
    recipe = load_recipe(folder / RECIPE_FILE)
    place = folder.resolve()
    home = folder.parent.parent if place.parent.name == BASELINES else folder
    return RunFolder(folder, load_recipe(moved_paths(recipe.model_dump(mode="json"), recipe.output.rstrip("/"), home)))
