"""In which weights? The update of an unlearned model beside the weights that the forget rows were trained into.

A training can change known weights M alone (`known_weights`), so "removed or hidden" has a ground truth. An update
that lies elsewhere can silence a row, but the row's place still holds it. The measure of LACUNA (arXiv 2607.02513,
section 4.2) is the ROC AUC by which the size of a weight's change tells M from all other weights: there, 0.91 for an
oracle that is given M, and 0.50 to 0.52 for published methods.

Beside it: precision and recall of the |M| largest changes, the share of the update's squared norm that lies in M, and,
how much of the stage the update takes back. Deviations: LACUNA
also reports the best of several detectors, such as a regression on all of these; here each figure stands by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from known_weights import KnownWeights

from msa_lite.errors import FormatError, MismatchError, UsageError, join_faults
from msa_lite.io.weights.blocks import Files, Scratch, read_rows
from msa_lite.io.weights.checkpoint import Checkpoint, TensorEntry, load_checkpoint
from msa_lite.io.weights.matching import aligned

_BLOCK = 1 << 19  # entries of a tensor that are read at a time
_SHIFT = 11  # lower bits of an fp32 number that a bin leaves out: sizes within 1/4096 of each other are one size
_BINS = 1 << 20


@dataclass(frozen=True)
class Ranking:
    """The changes of some weights by size, with known weights among them."""

    weights: int
    """The number of weights."""
    known: int
    """The number of known weights |M|."""
    changed: int
    """The number of weights that the update changed."""
    hits: float
    """How many of the `largest` largest changes are known weights. Of equal changes at the end, a share counts."""
    auc: float | None
    """P(a known weight changed more than another one), ties counted half; 0.5 by chance, 1 if M changed most. None
    where all weights are known."""

    @property
    def largest(self) -> int:
        """Return the number of changes that precision and recall look at: |M|, or all changes if they are fewer."""
        return min(self.known, self.changed)

    @property
    def precision(self) -> float | None:
        """Return the share of the largest changes that are known weights; None where nothing changed."""
        return self.hits / self.largest if self.largest else None

    @property
    def recall(self) -> float:
        """Return the share of the known weights that are among the largest changes."""
        return self.hits / self.known

    @property
    def chance(self) -> float:
        """Return the share of known weights: the precision of an update that is anywhere."""
        return self.known / self.weights


@dataclass(frozen=True)
class Location:
    """The place of an update."""

    everywhere: Ranking
    """Among all floating-point weights of the model. What trains linear layers alone is above chance by that, if M lies
    in them."""
    within: Ranking
    """Among the weights of the tensors that hold known ones: are the entries right, too?"""
    energy: float | None
    """The share of the update's squared norm that lies in M; by chance |M| / N. None without an update."""
    cosine: float | None
    """The cosine of the update with the exact undo, before − after; 1 if it is the undo."""
    cosine_known: float | None
    """The same over M alone, so that what else the update changed does not count."""
    undone: float | None
    """⟨update, undo⟩ / ‖undo‖²: the share of the stage that is taken back. 0: hidden at best, 1: removed, above 1: more
    than that."""


def locate_update(target: Path, unlearned: Path, before: Path, known_weights: KnownWeights) -> Location:
    """Compare two checkpoints block by block with known weights; about 100 MB whatever the model's size.

    before: the model before the training that changed the known weights and made the target.

    Raise UsageError for what is no checkpoint or names no weight of it, MismatchError for models of other tensors, and
    for a training that changed other weights than it should, FormatError for weights that are no numbers.
    """
    models = [load_checkpoint(target)]
    models += [aligned(load_checkpoint(folder), models[0]) for folder in (unlearned, before)]
    names = [name for name, entry in models[0].tensors.items() if entry.is_float]
    _check_same(models, names)
    known = {*known_weights.among(names)}
    tally, files, scratch = _Tally(), Files(), Scratch()
    try:
        for name in names:
            for start, rows in _blocks([model.tensors[name] for model in models], files, scratch):
                stop = start + rows[0].size
                tally.add(name, known_weights.entries(name, start, stop) if name in known else None, *rows)
    finally:
        files.close()
    if not tally.sizes[2].any():
        raise UsageError(f"{target}: no entry is known with a share of {known_weights.share} of its tensors")
    if tally.strays:
        raise MismatchError(f"{target}: its training changed {tally.strays} weights that are not the known ones")
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
    """Sums over the weights so far."""

    sizes: np.ndarray = field(default_factory=lambda: np.zeros((3, _BINS), np.int64))
    """How many changes are of each size, (3, bins): of other tensors, of other weights in tensors that hold known ones,
    and of known weights. Bin 0: unchanged."""
    energy: np.ndarray = field(default_factory=lambda: np.zeros(3))
    """The squared norm of the update in each of these places, (3,)."""
    undo: float = 0.0
    """The squared norm of the undo."""
    along: float = 0.0
    """⟨update, undo⟩."""
    strays: int = 0
    """Weights outside of M that the stage changed."""

    def add(
        self, name: str, mask: np.ndarray | None, target: np.ndarray, unlearned: np.ndarray, before: np.ndarray
    ) -> None:
        """Add a block. mask: (n,), true for known weights; None in a tensor without any."""
        update, undo = unlearned - target, before - target
        if not np.isfinite(update).all():
            raise FormatError(f"{name}: holds NaN or infinite values, so its update has no place")
        bins = (np.abs(update).astype(np.float32).view(np.uint32) + np.uint32((1 << _SHIFT) - 1)) >> np.uint32(_SHIFT)
        parts = [(0, slice(None))] if mask is None else [(1, ~mask), (2, mask)]
        for place, chosen in parts:
            np.add.at(self.sizes[place], bins[chosen], 1)
            self.energy[place] += np.square(update[chosen]).sum()
        self.strays += int(np.count_nonzero(undo if mask is None else undo[~mask]))
        self.undo += float(undo @ undo)
        self.along += float(undo @ update)

    def location(self) -> Location:
        """Return the figures."""
        elsewhere, beside, known = self.sizes
        inside, norm = float(self.energy[2]), float(self.energy.sum())
        return Location(
            everywhere=rank_changes(elsewhere + beside, known),
            within=rank_changes(beside, known),
            energy=inside / norm if norm else None,
            cosine=_cosine(self.along, self.undo, norm),
            cosine_known=_cosine(self.along, self.undo, inside),
            undone=self.along / self.undo if self.undo else None,
        )


def rank_changes(others: np.ndarray, known: np.ndarray) -> Ranking:
    """Rank changes from counts (bins,) by rising size, unchanged weights first: of other weights, and of known ones.

    Changes of one bin are of one size: where the largest ones end within it, its known weights count in proportion.
    """
    both = others + known
    changed, known_count, other_count = int(both[1:].sum()), int(known.sum()), int(others.sum())
    from_top = both[::-1]
    taken = np.clip(min(known_count, changed) - (np.cumsum(from_top) - from_top), 0, from_top)
    hits = float((taken * (known[::-1] / np.maximum(from_top, 1))).sum())
    below = np.cumsum(others) - others
    pairs = float(known_count) * other_count
    auc = float((known * (below + others / 2)).sum() / pairs) if pairs else None
    return Ranking(known_count + other_count, known_count, changed, hits, auc)


def _cosine(product: float, square_a: float, square_b: float) -> float | None:
    """Return the cosine of two vectors from their scalar product and squared norms; None where one of them is zero."""
    return product / math.sqrt(square_a * square_b) if square_a > 0 and square_b > 0 else None
