"""Read what a run did to weights: how its vectors were fitted, and the merge's update by layer and kind of module."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from msa_lite.errors import FormatError
from msa_lite.io.files.reading import read_text
from msa_lite.io.finished.seal import MANIFEST, check_read
from msa_lite.report.tables.reports import is_finite_number, reading, stage_manifest

Key = TypeVar("Key")
_LAYER = re.compile(r"(?:^|\.)(\d+)\.")


@dataclass(frozen=True)
class TensorUpdate:
    """One tensor's change."""

    name: str
    """The tensor's name in the target."""
    layer: int | None
    """The number of its layer; None for tensors outside the layers, as embeddings."""
    kind: str
    """The module's place in its layer: "mlp.down_proj"."""
    weights: int
    """Weights that it has."""
    relative_size: float | None
    """‖update‖ / ‖weights before‖."""
    norm: float
    """‖update‖."""
    weight_norm: float
    """‖weights before‖."""


@dataclass(frozen=True)
class GroupUpdate:
    """The change of several tensors together."""

    name: str
    """The layer or the kind of module."""
    tensors: int
    """Tensors in it."""
    norm: float
    """‖update‖ over all of them."""
    relative_size: float | None
    """‖update‖ / ‖weights before‖ over all of them; None where all weights are 0."""


@dataclass(frozen=True)
class Update:
    """The change of the whole model, and how much of it the stored numbers hold."""

    form: Literal["model", "adapter"]
    """A whole model, or an adapter to be used on the target."""
    folder: Path
    """The folder that holds it."""
    figures: Mapping[str, Any]
    """The totals that the merge recorded: weights_changed, relative_size, rounding_loss, update_cosine, …; of an
    adapter modules, rank, truncation_loss."""
    tensors: tuple[TensorUpdate, ...]
    """Every tensor that a vector touches, in the model's order; empty for an adapter."""
    notes: tuple[str, ...]
    """Warnings of the merge."""
    json_keys: ClassVar = ("form", "figures", "notes", "layers", "kinds", "tensors")

    @property
    def layers(self) -> tuple[GroupUpdate, ...]:
        """Return the change of each layer, in order; what lies outside the layers comes last."""
        return _groups(self.tensors, lambda tensor: "other" if tensor.layer is None else str(tensor.layer))

    @property
    def kinds(self) -> tuple[GroupUpdate, ...]:
        """Return the change of each kind of module over all layers."""
        return _groups(self.tensors, lambda tensor: tensor.kind)


def _groups(tensors: Iterable[TensorUpdate], name_of: Callable[[TensorUpdate], str]) -> tuple[GroupUpdate, ...]:
    """Group tensors by the name that `name_of` gives; return each group's change, in order of first appearance."""
    members: dict[str, list[TensorUpdate]] = {}
    for tensor in tensors:
        members.setdefault(name_of(tensor), []).append(tensor)
    groups = []
    for name, group in members.items():
        norm = math.hypot(*(tensor.norm for tensor in group))
        weights = math.hypot(*(tensor.weight_norm for tensor in group))
        groups.append(GroupUpdate(name, len(group), norm, norm / weights if weights else None))
    return tuple(groups)


def load_update(folder: Path, form: Literal["model", "adapter"]) -> Update | None:
    """Load what the merge recorded in the folder of a model or adapter; None where it is not finished.

    Raise FormatError for a broken manifest.
    """
    manifest = stage_manifest(folder)
    if manifest is None:
        return None
    with reading(folder / MANIFEST):
        change = dict(manifest.get("change") or {})
        notes = tuple(map(str, change.pop("notes", ()) or ()))
        tensors = ((manifest.get("fidelity") or {}).get("tensors") or {}).items()
        parts = [_tensor(name, figures) for name, figures in tensors]
    parts.sort(key=lambda one: (one.layer is None, one.layer or 0, one.kind))
    return Update(form, folder, change, tuple(parts), notes)


def _tensor(name: str, figures: Mapping[str, Any]) -> TensorUpdate:
    layer, kind = place_of(name)
    size = figures["relative_size"]
    sizes = (None if size is None else float(size), float(figures["norm"]), float(figures["weight_norm"]))
    return TensorUpdate(name, layer, kind, int(figures["weights"]), *sizes)


def place_of(tensor: str) -> tuple[int | None, str]:
    """Return (layer, kind of module) of a tensor: "model.layers.3.mlp.down_proj.weight" → (3, "mlp.down_proj").

    The numbers of experts are left out, so that experts of a layer are one kind.
    """
    name = tensor.removesuffix(".weight")
    match = _LAYER.search(name)
    if match is None:
        return None, name.removeprefix("model.")
    rest = name[match.end() :]
    return int(match[1]), ".".join(part for part in rest.split(".") if not part.isdigit())


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
    for place in (place for place in places if names is None or place.name in names):
        if (manifest := stage_manifest(place)) and "filter" not in manifest:
            with reading(place / MANIFEST):
                fits[place.name] = _fit(manifest, _curve(place / _LOG))
    return fits


def load_curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return (step, loss) of each fit of a run by name, finished or under way; some 300 steps of each."""
    logs = [path for part in ("history/*", "vectors/*", "vectors/*/try-*") for path in folder.glob(f"{part}/{_LOG}")]
    curves = {}
    for path in sorted(logs):  # what is made anew comes after what it replaces
        with suppress(FormatError):  # moved, or half written
            steps = [(step, loss) for step, _, loss in _curve(path) if math.isfinite(loss)]
            curves[path.relative_to(folder).parts[1].removesuffix(".partial")] = steps[:: max(1, len(steps) // 300)]
    return curves


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
    check_read(path)
    with reading(path):
        lines = [dict(json.loads(line)) for line in read_text(path).split("\n") if line.strip()]
        return [(int(line["step"]), float(line["epoch"]), float(line["loss"])) for line in lines if "loss" in line]
