"""In which weights? The update of an unlearned model beside the weights that the forget rows were trained into.

A stage of training with `into:` changes known weights M alone, so "removed or hidden" has a ground truth. An update
that lies elsewhere can silence a row, but the row's place still holds it. The measure of LACUNA (arXiv 2607.02513,
section 4.2) is the ROC AUC by which the size of a weight's change tells M from all other weights: there, 0.91 for an
oracle that is given M, and 0.50 to 0.52 for published methods.

Beside it: precision and recall of the |M| largest changes, the share of the update's squared norm that lies in M, and,
where the models before and after the stage are kept, how much of the stage the update takes back. Deviations: LACUNA
also reports the best of several detectors, such as a regression on all of these; here each figure stands by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from msa_lite.errors import FormatError, MismatchError, UsageError, join_faults
from msa_lite.io.finished.seal import load_manifest
from msa_lite.io.weights.blocks import Files, Scratch, read_rows
from msa_lite.io.weights.checkpoint import Checkpoint, TensorEntry, load_checkpoint
from msa_lite.io.weights.known import KNOWN_FILE, KnownWeights, read_known
from msa_lite.io.weights.layout import aligned

_BLOCK = 1 << 19  # entries of a tensor that are read at a time
_SHIFT = 11  # lower bits of an fp32 number that a bin leaves out: sizes within 1/4096 of each other are one size
_BINS = 1 << 20


@dataclass(frozen=True)
class KnownStage:
    """A stage that changed known weights, and the models around it."""

    name: str
    weights: KnownWeights
    before: Path | None
    """The model that the stage began with; None where it is gone."""
    after: Path | None
    """The model that it made."""


@dataclass(frozen=True)
class Location:
    """The place of an update, over all floating-point weights of a model."""

    weights: int
    """The number of weights N."""
    known: int
    """The number of known weights |M|."""
    changed: int
    """The number of weights that the update changed."""
    largest: int
    """The number of the largest changes that precision and recall look at: |M|, or all changes if they are fewer."""
    hits: float
    """How many of them are known weights. Of changes of one size at the end, a share counts."""
    touched: float | None
    """The share of known weights in the tensors that the update changed at all: the precision that an update of these
    tensors has by chance. None without an update."""
    auc: float | None
    """P(a known weight changed more than another one), ties counted half; 0.5 by chance, 1 if M changed most."""
    energy: float | None
    """The share of the update's squared norm that lies in M; by chance |M| / N. None without an update."""
    cosine: float | None
    """The cosine of the update with the exact undo, before − after; 1 if it is the undo. None without both models."""
    cosine_known: float | None
    """The same over M alone, so that what else the update changed does not count."""
    undone: float | None
    """⟨update, undo⟩ / ‖undo‖²: the share of the stage that is taken back. 0: hidden at best, 1: removed, above 1: more
    than that. None without both models."""

    @property
    def precision(self) -> float | None:
        """Return the share of the largest changes that are known weights; None without an update."""
        return self.hits / self.largest if self.largest else None

    @property
    def recall(self) -> float:
        """Return the share of the known weights that are among the largest changes."""
        return self.hits / self.known

    @property
    def chance(self) -> float:
        """Return |M| / N: the precision of an update that is anywhere."""
        return self.known / self.weights


def why_undecided(target: Path) -> str | None:
    """Return why an update of this target cannot be located, or None. Nothing but a small file is read."""
    if not target.is_dir():
        return f"no known weights: {target} is no folder"
    if not read_known(target):
        return f"no known weights: {target} has no {KNOWN_FILE}, as a training with `into:` writes it"
    return None


def find_stage(target: Path, name: str | None = None) -> KnownStage:
    """Return the stage that taught known weights of a target what is to be forgotten. name: None where it is the only
    one.

    Raise UsageError where the target has no such stage, or several and no name is given.
    """
    if reason := why_undecided(target):
        raise UsageError(reason)
    stages = read_known(target)
    if name is None and len(stages) > 1:
        raise UsageError(f"{target}: {', '.join(stages)} changed known weights; name the one with the forget rows")
    name = name or next(iter(stages))
    if name not in stages:
        raise UsageError(f"{target}: no stage '{name}' changed known weights; there are {', '.join(stages)}")
    place = target.resolve()
    after = place if place.name == name else place.parent / name
    manifest = load_manifest(after) or {}
    prior = Path(str(manifest.get("sources", {}).get("prior", "")))
    before = next((path for path in (prior, after.parent / prior.name) if prior.name and path.is_dir()), None)
    return KnownStage(name, stages[name], before, after if manifest else None)


def locate_update(target: Path, unlearned: Path, stage: KnownStage) -> Location:
    """Compare two checkpoints block by block with the known weights of a stage; about 50 MB whatever the model's size.

    Raise UsageError for what is no checkpoint or names no weight of it, MismatchError for models of other tensors, and
    for a stage that changed other weights than it should, FormatError for weights that are no numbers.
    """
    models = [load_checkpoint(target)]
    others = [unlearned, stage.before, stage.after] if stage.before and stage.after else [unlearned]
    models += [aligned(load_checkpoint(folder), models[0]) for folder in others if folder]
    names = [name for name, entry in models[0].tensors.items() if entry.is_float]
    _check_same(models, names)
    known = {*stage.weights.among(names)}
    tally, files, scratch = _Tally(), Files(), Scratch()
    try:
        for name in names:
            counts, is_touched = np.zeros(2, np.int64), False
            for start, rows in _blocks([model.tensors[name] for model in models], files, scratch):
                stop = start + rows[0].size
                mask = stage.weights.entries(name, start, stop) if name in known else np.zeros(stop - start, np.bool_)
                is_touched |= tally.add(name, mask, *rows)
                counts += (mask.size - mask.sum(), mask.sum())
            tally.touched += counts if is_touched else 0
    finally:
        files.close()
    if tally.strays:
        raise MismatchError(f"{stage.after}: {stage.name} changed {tally.strays} weights that are not the known ones")
    return tally.location()


def _check_same(models: list[Checkpoint], names: list[str]) -> None:
    """Raise MismatchError with all tensors that a model lacks, or has in another shape or as no floats."""
    target, faults = models[0].tensors, list[str]()
    for model in models[1:]:
        for name in names:
            entry = model.tensors.get(name)
            if entry is None or not entry.is_float or entry.shape != target[name].shape:
                faults.append(f"{model.folder}: {name}: {entry and entry.shape}, in the target {target[name].shape}")
    if faults:
        raise MismatchError(join_faults(f"not models of the same tensors as {models[0].folder}:", faults))


def _blocks(entries: list[TensorEntry], files: Files, scratch: Scratch) -> Iterator[tuple[int, list[np.ndarray]]]:
    """Yield the place of the first entry of a block, and the block of each model: (n,) in float64."""
    rows, columns = entries[0].matrix_shape
    step = max(1, _BLOCK // max(1, columns))
    for start in range(0, rows if columns else 0, step):
        stop = min(rows, start + step)
        parts = [read_rows(files, entry, start, stop, scratch, f"{n}") for n, entry in enumerate(entries)]
        yield start * columns, [part.reshape(-1).astype(np.float64) for part in parts]


@dataclass
class _Tally:
    """Sums over the weights so far. Those of two places: other weights, known weights."""

    sizes: np.ndarray = field(default_factory=lambda: np.zeros((2, _BINS), np.int64))
    """How many changes are of each size, (2, bins). Bin 0: unchanged."""
    energy: np.ndarray = field(default_factory=lambda: np.zeros(2))
    """The squared norm of the update, (2,)."""
    touched: np.ndarray = field(default_factory=lambda: np.zeros(2, np.int64))
    """The weights of tensors that the update changed, (2,)."""
    undo: float = 0.0
    """The squared norm of the undo."""
    along: float = 0.0
    """⟨update, undo⟩."""
    strays: int = 0
    """Weights outside of M that the stage changed."""
    has_undo: bool = False

    def add(self, name: str, mask: np.ndarray, target: np.ndarray, unlearned: np.ndarray, *stage: np.ndarray) -> bool:
        """Add a block; return whether the update changed it.

        mask: (n,), true for known weights. stage: the weights before and after it, or nothing.
        """
        update = unlearned - target
        if not np.isfinite(update).all():
            raise FormatError(f"{name}: holds NaN or infinite values, so its update has no place")
        bins = (np.abs(update).astype(np.float32).view(np.uint32) + np.uint32((1 << _SHIFT) - 1)) >> np.uint32(_SHIFT)
        for side, chosen in enumerate((~mask, mask)):
            np.add.at(self.sizes[side], bins[chosen], 1)
            self.energy[side] += np.square(update[chosen]).sum()
        if stage:
            before, after = stage
            undo = before - after
            self.has_undo = True
            self.strays += int(np.count_nonzero(undo[~mask]))
            self.undo += float(undo @ undo)
            self.along += float(undo @ update)
        return bool(update.any())

    def location(self) -> Location:
        """Return the figures."""
        (others, known), (rest, inside) = self.sizes, self.energy
        changed = int(self.sizes[:, 1:].sum())
        largest = min(int(known.sum()), changed)
        return Location(
            weights=int(self.sizes.sum()),
            known=int(known.sum()),
            changed=changed,
            largest=largest,
            hits=count_hits(others, known, largest),
            touched=float(self.touched[1] / self.touched.sum()) if changed else None,
            auc=auc_of_sizes(others, known),
            energy=float(inside / (inside + rest)) if changed else None,
            cosine=_cosine(self.along, self.undo, inside + rest) if self.has_undo else None,
            cosine_known=_cosine(self.along, self.undo, inside) if self.has_undo else None,
            undone=self.along / self.undo if self.undo else None,
        )


def count_hits(others: np.ndarray, known: np.ndarray, largest: int) -> float:
    """Return how many of the `largest` largest changes are known weights, from counts (bins,) by rising size.

    Where a bin is only needed in part, its known weights count in proportion.
    """
    both = (others + known)[::-1]
    taken = np.clip(largest - (np.cumsum(both) - both), 0, both)
    return float((taken * (known[::-1] / np.maximum(both, 1))).sum())


def auc_of_sizes(others: np.ndarray, known: np.ndarray) -> float | None:
    """Return P(a known change is larger than another one) + P(it is as large) / 2, from counts (bins,) by rising size.

    None where one of the sets is empty.
    """
    pairs = float(others.sum()) * float(known.sum())
    below = np.cumsum(others) - others
    return float((known * (below + others / 2)).sum() / pairs) if pairs else None


def _cosine(product: float, square_a: float, square_b: float) -> float | None:
    """Return the cosine of two vectors from their scalar product and squared norms; None where one of them is zero."""
    return product / math.sqrt(square_a * square_b) if square_a > 0 and square_b > 0 else None
