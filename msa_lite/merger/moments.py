"""The second moments of the inputs of a target's linear layers, as `train.moments` writes them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from msa_lite.errors import FormatError, MismatchError, UsageError, join_faults
from msa_lite.io.finished.seal import MANIFEST, load_manifest, verify_folder
from msa_lite.io.weights.blocks import Files, read_whole
from msa_lite.io.weights.checkpoint import TensorEntry, read_shard
from msa_lite.merger.formula import Filter
from msa_lite.merger.unseen import unseen_sentence

MOMENTS_FOLDER = "moments"  # the kind of folder, and its name in a run
SIDES = ("forget", "retain")


@dataclass(frozen=True)
class Layer:
    """A linear layer whose inputs were measured."""

    roots: tuple[str, ...]
    """The name of its roots in the files, which layers with the same input share. A tensor of several experts has one
    for each of its slices."""
    transposed: bool = False
    """True where the target stores its weight as (in, out)."""


@dataclass(frozen=True)
class Moments:
    """The second moments of the inputs of a target's linear layers, on forget and on retain rows."""

    folder: Path
    inputs: Mapping[str, Any]
    """All that decides them, as their manifest records it."""
    target: str
    """The revision of the target that they were measured at."""
    rows: str | None
    """The hash of the rows to forget, as the model gets them; None where that is not known."""
    layers: Mapping[str, Layer]
    """The layers by the target's tensor names."""
    roots: Mapping[str, TensorEntry]
    """The roots (k, in) by set and name: "forget.model.layers.0.self_attn.q_proj.weight"."""
    unseen: Mapping[str, Any]
    """The forecast for rows that were not measured (`Unseen.facts`); empty without one."""
    json_keys: ClassVar = {"out": "folder", "layers": "count"}

    @property
    def count(self) -> int:
        """Return the number of layers."""
        return len(self.layers)

    def unseen_at(self, strength: float) -> dict[str, Any]:
        """Return the forecast at one λ, with its sentence; empty without one."""
        if (ratio := self.unseen.get("ratios", {}).get(f"{strength:g}")) is None:
            return {}
        facts = {**self.unseen, "ratios": {f"{strength:g}": ratio}}
        return facts | {"sentence": unseen_sentence(facts)}

    def filter_of(self, root: str, files: Files) -> Filter:
        """Return the filter of the layers with these roots."""
        try:
            forget, retain = (read_whole(files, self.roots[f"{side}.{root}"], np.float32) for side in SIDES)
        except FormatError as error:
            raise FormatError(f"{self.folder}: the moments of {root} are damaged; measure them again") from error
        if forget.shape[1] != retain.shape[1]:
            raise FormatError(
                f"{self.folder}: the moments of {root} are of {forget.shape[1]} inputs on forget rows and of "
                f"{retain.shape[1]} on retain rows; measure them again"
            )
        return Filter(forget, retain)

    def roots_of(self, name: str, count: int) -> tuple[str, ...]:
        """Return the names of a tensor's roots, one for each of its matrices; none where it was not measured.

        Raise MismatchError where there are more or fewer.
        """
        roots = self.layers[name].roots if name in self.layers else ()
        if roots and len(roots) != count:
            raise MismatchError(f"{name}: {count} matrices in the vector, {len(roots)} in {self.folder}")
        return roots


def load_moments(folder: Path) -> Moments:
    """Open a folder that `run --until moments` has written.

    Raise UsageError where it is none, FormatError where the files are not as they were written, to the last byte.
    """
    manifest = load_manifest(folder)
    is_damaged = manifest is None and os.path.lexists(folder / MANIFEST)
    if not is_damaged and (manifest or {}).get("kind") != MOMENTS_FOLDER:
        raise UsageError(f"{folder}: holds no moments; `msa-lite run RECIPE --until moments` measures them")
    if faults := verify_folder(folder):
        remedy = "measure the moments again, or take away what is not theirs"
        raise FormatError(join_faults(f"{folder}: is not as it was written ({remedy}):", faults))
    assert manifest is not None, "verified"
    entries = {e.name: e for name in manifest["files"] for e in read_shard(folder / name).tensors}
    try:
        layers = {str(name): _layer(*value) for name, value in manifest["layers"].items()}
        target, rows = str(manifest["inputs"]["target"]["revision"]), manifest["inputs"].get("forget")
        wanted = [f"{side}.{root}" for side in SIDES for layer in layers.values() for root in layer.roots]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{folder}: its manifest does not tell which layers were measured; measure again") from error
    if odd := [name for name in dict.fromkeys(wanted) if not _is_root(entries.get(name))]:
        raise FormatError(
            join_faults(f"{folder}: moments that are missing, or no matrices in fp32; measure again:", odd)
        )
    return Moments(folder, manifest["inputs"], target, rows, layers, entries, manifest.get("unseen") or {})


def _layer(roots: str | list[str], transposed: bool) -> Layer:
    """Return a layer from a manifest. Raise TypeError for what is none."""
    roots = [roots] if isinstance(roots, str) else roots
    if not (isinstance(roots, list) and roots and all(isinstance(root, str) for root in roots)):
        raise TypeError(f"{roots}: no names of roots")
    return Layer(tuple(roots), bool(transposed))


def _is_root(entry: TensorEntry | None) -> bool:
    return entry is not None and entry.dtype == "F32" and len(entry.shape) == 2 and 0 not in entry.shape
