"""Open the folder of a run that was made before, wherever it lies now."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from msa_lite.errors import FormatError, UsageError
from msa_lite.io.reading import read_text
from msa_lite.pipeline.folder import BASELINES, RECIPE_FILE
from msa_lite.recipe import Recipe, load_recipe, moved_paths

_SIGN = "# A run of msa-lite"
_TRAINING = "# A training of msa-lite"


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
    file = folder / RECIPE_FILE
    try:
        text = read_text(file)
    except FormatError as error:
        hint = f"; give the folder, {folder.parent}" if folder.name == RECIPE_FILE else ""
        raise UsageError(f"{folder}: no run of msa-lite, since there is no {RECIPE_FILE} of one in it{hint}") from error
    if not text.startswith(_SIGN):
        what = "a training's folder, not a run's" if text.startswith(_TRAINING) else "no run of msa-lite"
        raise UsageError(f"{folder}: is {what}; give the folder that `msa-lite RECIPE.yaml` has written")
    recipe = load_recipe(file)
    place = folder.resolve()
    home = folder.parent.parent if place.parent.name == BASELINES else folder
    return RunFolder(folder, load_recipe(moved_paths(recipe.model_dump(mode="json"), recipe.output.rstrip("/"), home)))
