"""Find the runs in a folder, and tell how far each one is: from its files alone, without a lock that could stop it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from msa_lite.errors import MsaError
from msa_lite.io.finished.manifest import partial_folder
from msa_lite.io.finished.seal import MANIFEST, MARKER, is_worked_in, load_manifest
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
    has_model = any(load_manifest(folder / form) for form in ("model", "adapter"))
    return has_model and ((folder / VERDICT_FILE).exists() or not is_worked_in(folder))


def list_facts(folder: Path) -> dict[str, Any]:
    """Return what the list of a folder's runs shows."""
    runs = [_entry(run) for run in find_runs(folder).values()]
    return {"view": "list", "name": folder.resolve().name, "runs": runs}


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
    listed = load_stages(folder).stages if (folder / STAGES_FILE).exists() else ()
    places = [(stage, folder / str(stage.folder)) for stage in listed]
    return {
        "view": "watch",
        "name": folder.resolve().name,
        "names": load_provenance(folder).models,
        "began": _time(folder / RECIPE_FILE),
        "now": time.time(),
        "works": is_worked_in(folder),
        "can_ask": can_be_asked(folder),
        "stages": [
            {"name": stage.name, "kind": stage.kind, "done": _time(place / MANIFEST), "begun": _time(partial_folder(place) / MARKER)}
            for stage, place in places
        ],
        "losses": load_curves(folder),
        "chart": load_tradeoff(folder / "sweep"),
        "command": f"msa-lite {folder / RECIPE_FILE}",
    }


def _time(path: Path) -> float | None:
    """Return the time at which a file was last written; None where it is not there."""
    return path.stat().st_mtime if path.exists() else None
