"""Find a former run of a recipe that was started in another working folder: a relative `output` starts from that."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from msa_lite.io.files.reading import local_path
from msa_lite.report.run.provenance import RECIPE_FILE

_MOST = 1000  # folders beside each other that are looked into


def find_former_run(output: str, recipe: str) -> Path | None:
    """Return the folder of a run by this relative output elsewhere, while there is none here; None if none is found.

    recipe: its file, or the name of a shipped one. Looked into are the recipe's own folder, the folders above that and
    above the working folder, and those directly in the working folder.
    """
    here = Path(output).expanduser()
    if here.is_absolute() or os.path.exists(here):
        return None
    with suppress(OSError):  # a folder that nobody may read, or that is gone, holds no run to go on with
        return next((place / here for place in _places(recipe) if os.path.isfile(place / here / RECIPE_FILE)), None)
    return None


def _places(recipe: str) -> Iterator[Path]:
    """Yield folders in which somebody may have started the recipe, the likeliest first."""
    working, file = Path.cwd(), local_path(recipe)
    if file.is_file():
        yield from [Path(os.path.abspath(file.parent)), *Path(os.path.abspath(file.parent)).parents]
    yield from working.parents
    with os.scandir(working) as entries:
        yield from (Path(working, entry.name) for entry in islice(entries, _MOST) if entry.is_dir())
