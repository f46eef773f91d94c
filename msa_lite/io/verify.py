"""Check a run's folder against the manifests of all finished stages in it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from msa_lite.errors import OutputError
from msa_lite.io.seal import MANIFEST, is_sealed, load_manifest, verify_folder

_UNFINISHED = (".partial", ".previous")


def verify_stages(folder: Path, needed: bool = True) -> dict[Path, list[str]]:
    """Re-hash a stage's folder, or all finished stages below a run's; return the faults of each (`verify_folder`).

    needed: raise OutputError where there is no stage.
    """
    alone = os.path.lexists(folder / MANIFEST)
    places = [folder] if alone else sorted(path.parent for path in folder.rglob(MANIFEST))
    stages = [
        place
        for place in places
        if not any(part.endswith(_UNFINISHED) for part in place.relative_to(folder).parts)
        and not any(other in place.parents for other in places)  # a stage's own file that happens to have the name
    ]
    if not stages and needed:
        raise OutputError(f"{folder}: no {MANIFEST} of msa-lite in there, nor in a folder below it")
    return {stage: verify_folder(stage) for stage in stages}


def unsealed(stages: Iterable[Path]) -> list[Path]:
    """Return the folders whose manifest would not show a change of itself: earlier versions made them."""
    return [stage for stage in stages if (manifest := load_manifest(stage)) and not is_sealed(manifest)]
