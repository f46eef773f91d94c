"""Find the earlier runs whose vectors are part of a run's result, by its recipe. The record itself holds no paths."""

from __future__ import annotations

from pathlib import Path

from msa_lite.io.reading import local_path, read_yaml
from msa_lite.report.provenance import RECIPE_FILE


def reach_earlier(folder: Path) -> list[Path]:
    """Return the folders of all earlier runs that are there, also those that earlier runs name in turn."""
    reached: dict[Path, Path] = {}
    places = _earlier_folders(folder)
    while places:
        place = places.pop(0)
        if place.resolve() not in (*reached, folder.resolve()):
            reached[place.resolve()] = place
            places += _earlier_folders(place)
    return list(reached.values())


def _earlier_folders(folder: Path) -> list[Path]:
    """Return the folders of earlier runs that recipe.yaml names, as far as they are there."""
    if not (folder / RECIPE_FILE).exists():
        return []
    recipe = read_yaml(folder / RECIPE_FILE)
    names = recipe.get("earlier") if isinstance(recipe, dict) else None
    folders = [local_path(name) for name in names or () if isinstance(name, str)]
    return [place for place in folders if place.is_dir()]
