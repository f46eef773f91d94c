"""Read how a run's vectors were fitted: rows, settings and the course of the loss."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msa_lite.io.reading import read_text
from msa_lite.io.seal import MANIFEST
from msa_lite.report.faults import is_finite_number, reading, stage_manifest

_LOG = "train_log.jsonl"


@dataclass(frozen=True)
class Fit:
    """The training of one vector, or of one setting of a baseline."""

    rows: int | None
    """Rows that were learnt; None where the manifest does not say."""
    settings: Mapping[str, Any]
    """The settings by name: mode, lora_rank, epochs, learning_rate, batch_size, …"""
    curve: tuple[tuple[float, float], ...]
    """(epoch, mean loss of a step) for each logged step, in order."""
    steps: int
    """Optimiser steps."""
    epochs: float
    """Passes over the rows that were made."""
    loss: Mapping[str, float]
    """Mean loss on the rows of "prior", "target" and "tuned", where the fit measured them; else empty."""
    ended: str | None
    """The reason why a fit without a fixed number of epochs ended."""

    @property
    def closed(self) -> float | None:
        """Return the share of the way from the prior's loss to the target's that was made; None if not measured."""
        start, goal, tuned = (self.loss.get(name) for name in ("prior", "target", "tuned"))
        if start is None or goal is None or tuned is None or start <= goal:
            return None
        return (start - tuned) / (start - goal)


def load_fits(folder: Path, names: Collection[str] | None = None) -> dict[str, Fit]:
    """Load the fits in a run's `vectors/` by name, all or those of these names. Raise FormatError for broken files."""
    places = sorted(path for path in folder.glob("*") if path.is_dir() and path.suffix not in (".partial", ".previous"))
    fits = {}
    for place in places:
        if names is not None and place.name not in names:
            continue
        if manifest := stage_manifest(place):
            with reading(place / MANIFEST):
                fits[place.name] = _fit(manifest, _curve(place / _LOG))
    return fits


def _fit(manifest: Mapping[str, Any], lines: list[tuple[int, float, float]]) -> Fit:
    outcome = manifest.get("fit") or {}
    rows, settings = manifest.get("rows"), manifest["inputs"].get("settings") or {}
    loss = {name: float(value) for name, value in (outcome.get("loss") or {}).items() if is_finite_number(value)}
    settings = dict(settings) | {key: outcome[key] for key in ("learning_rate",) if key in outcome}
    steps, epochs = (lines[-1][0], lines[-1][1]) if lines else (0, 0.0)
    return Fit(
        rows=rows if isinstance(rows, int) else None,
        settings=settings,
        curve=tuple((epoch, value) for _, epoch, value in lines),
        steps=steps,
        epochs=epochs,
        loss=loss,
        ended=outcome.get("reason"),
    )


def _curve(path: Path) -> list[tuple[int, float, float]]:
    """Return (step, epoch, loss) of each logged step."""
    if not path.is_file():
        return []
    with reading(path):
        lines = [dict(json.loads(line)) for line in read_text(path).split("\n") if line.strip()]
        return [(int(line["step"]), float(line["epoch"]), float(line["loss"])) for line in lines if "loss" in line]
