"""Find the runs in a folder, and tell how far each one is: from its files alone, without a lock that could stop it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from msa_lite.errors import MsaError
from msa_lite.io.finished.manifest import partial_folder
from msa_lite.io.finished.seal import CARD_FILE, MANIFEST, MARKER, is_worked_in, load_manifest
from msa_lite.report.run.choice import load_tradeoff
from msa_lite.report.run.provenance import RECIPE_FILE, load_provenance, purge_day, read_run
from msa_lite.report.run.stages import STAGES_FILE, load_stages
from msa_lite.report.run.update import load_curves
from msa_lite.report.verdict.verdict import VERDICT_FILE, load_verdict


def find_runs(folder: Path) -> dict[str, Path]:
    """Return the run in a folder, as "", or else all runs in the folders below it by name. Raise UsageError for none.

    A folder below with a recipe.yaml of something else is among them; the list says what it is.
    """
    if not (folder / RECIPE_FILE).exists() and (places := sorted(folder.glob(f"*/{RECIPE_FILE}"))):
        return {path.parent.name: path.parent for path in places}
    read_run(folder)
    return {"": folder}


def can_be_asked(folder: Path) -> bool:
    """Check whether a run has its model, and no process is about to replace it."""
    is_free = (folder / VERDICT_FILE).exists() or not is_worked_in(folder)
    return is_free and any(load_manifest(folder / form) for form in ("model", "adapter"))


def list_facts(folder: Path) -> dict[str, Any]:
    """Return what the list of a folder's runs shows."""
    return {"view": "list", "name": folder.resolve().name, "runs": [*map(_entry, find_runs(folder).values())]}


def _entry(folder: Path) -> dict[str, Any]:
    """Return a run's line in the list. "note": what is special about it, or why it cannot be read."""
    try:
        read_run(folder)
        run, verdict, purged = load_provenance(folder), load_verdict(folder), purge_day(folder)
        unfinished = "" if can_be_asked(folder) else "still going" if is_worked_in(folder) else "not finished"
        facts = {"outcome": verdict and verdict.outcome, "model": run.models["target"], "day": run.day}
        return {"name": folder.name, **facts, "note": f"purged on {purged}" if purged else unfinished}
    except (MsaError, OSError, KeyError) as error:
        return {"name": folder.name, "note": f"cannot be read: {error}"}


def progress_facts(folder: Path) -> dict[str, Any]:
    """Return what the page of a run that is not finished shows: stages, losses and points so far.

    Times are seconds since 1970. Raise UsageError where the folder is no run any more, FormatError for broken files.
    """
    read_run(folder)
    demo = ("prior", "target", "ideal") if (folder / "history").exists() else ()  # before the list is written
    stages = [(f"history: {name}", "fit", f"history/{name}") for name in demo]
    if (folder / STAGES_FILE).exists():
        stages = [(stage.name, stage.kind, str(stage.folder)) for stage in load_stages(folder).stages]
    return {
        "view": "watch",
        "name": folder.resolve().name,
        "names": load_provenance(folder).models,
        "began": (folder / RECIPE_FILE).stat().st_mtime,
        "now": time.time(),
        "works": is_worked_in(folder),
        "can_ask": can_be_asked(folder),
        "stages": [_progress(name, kind, folder / place) for name, kind, place in stages],
        "losses": load_curves(folder),
        "chart": load_tradeoff(folder / "sweep"),
        "command": f"msa-lite {folder / RECIPE_FILE}",
    }


def _progress(name: str, kind: str, place: Path) -> dict[str, Any]:
    """Return how far a stage is: when it was done, and when what is under way was begun."""
    facts: dict[str, Any] = {"name": name, "kind": kind}
    if (place / MANIFEST).exists():  # it, and the card, are written again once more is known of a model
        files = (path for path in place.iterdir() if path.name not in (MANIFEST, CARD_FILE))
        facts["done"] = max(path.stat().st_mtime for path in files)
    if (begun := partial_folder(place) / MARKER).exists():
        facts["begun"] = begun.stat().st_mtime
    return facts
