"""Filter a forget vector: keep what it changes on forget rows, suppress what it changes on retain rows.

The formula is `formula.Filter`. The result is a vector of the same kind in a folder of its own, so that every merge,
sweep and recipe takes it like any other: an adapter of the same rank, of which only A changes, or a checkpoint, which
changes nothing but linear layers. One pass over the moments serves all strengths λ.

A filtered vector is s D′ with one scalar for all its filtered layers, s = √(Σ tr D C_f Dᵀ ÷ Σ tr D′ C_f D′ᵀ), C_f over
its trace and without its ridge: whatever λ is, the outputs on forget rows change by as much in all. So α means about
the same at each λ. Layers that were not measured lose nothing by the filter, so they are not scaled either.

Dtype policy: fp64 arithmetic, rounded to fp32 on storing. Memory is that of one layer's moments and change, and of an
adapter's filtered A's at each λ, which wait in fp32 until s is known. A checkpoint is gone through twice instead.
"""

from __future__ import annotations

import logging
import math
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from msa_lite.errors import MismatchError, OutputError, UsageError, join_faults
from msa_lite.io.console.progress import Progress, silent
from msa_lite.io.files.writing import check_space
from msa_lite.io.finished.manifest import is_finished, stage_folder
from msa_lite.io.finished.seal import check_unchanged, load_manifest, take_marks
from msa_lite.io.weights.adapter import ADAPTER_CONFIG, ADAPTER_FILE, is_adapter, load_adapter
from msa_lite.io.weights.blocks import Files, Scratch, read_rows, read_whole
from msa_lite.io.weights.checkpoint import Checkpoint, TensorEntry, load_checkpoint, read_shard
from msa_lite.io.weights.factors import LowRank
from msa_lite.io.weights.hub import Source, fetch
from msa_lite.io.weights.matching import find_names
from msa_lite.io.weights.vocabulary import token_tensors
from msa_lite.io.weights.writer import Sink, file_header, output_bytes, shard_header, write_companions
from msa_lite.merger.checks.inputs import ModelLike
from msa_lite.merger.checks.memory import blocks_of
from msa_lite.merger.fidelity import factor_product
from msa_lite.merger.formula import FORGET_RIDGE, RETAIN_RIDGE, Filter
from msa_lite.merger.moments import Moments, load_moments
from msa_lite.merger.vectors.adapter_names import match_adapter
from msa_lite.merger.vectors.deltas import Delta, Difference
from msa_lite.merger.vectors.vector import load_vector

logger = logging.getLogger(__name__)

_POSITIONS = re.compile(r"(wpe|embed\w*)\.weight$")  # embeddings of positions, of GPT-2, OPT and others
_KNOWN = 2  # filters in memory: of queries, keys and values, with those of the output between them in a file
_UNITS = "outputs on forget rows"  # the size that a filtered vector has in common with the one that was fitted


def filter_settings() -> dict[str, Any]:
    """Return what decides every filtered vector besides vector, moments and λ, for manifests."""
    return {"ridges": {"forget": FORGET_RIDGE, "retain": RETAIN_RIDGE}, "units": _UNITS}


def filter_inputs(vector: Source, moments: Mapping[str, Any], strength: float, prior: Source | None) -> dict[str, Any]:
    """Return all that decides a filtered vector, as its manifest records it. The prior decides that of a checkpoint.

    moments: all that decides these, since they may be gone when a run looks again.
    """
    start = {} if prior is None or is_adapter(vector.folder) else {"prior": prior.identity()}
    return {"vector": vector.identity(), "moments": moments, "strength": strength, **filter_settings(), **start}


def filter_vector(
    vector: ModelLike,
    moments: str | Path,
    strength: float,
    target: ModelLike,
    prior: ModelLike | None,
    out: str | Path,
    progress: Progress = silent,
) -> Path:
    """Write s D C_f (C_f + λ C_r)⁻¹ for each layer of a vector to the folder `out`, unless it is there already.

    vector: a PEFT adapter, or a checkpoint, which needs the prior: a folder or `repo[@revision]`, as target and prior.
    moments: a folder of `run --until moments`, measured at this target. strength: λ > 0; a run's search ends at 64.
    Return `out`.

    s is one number for all layers, by which their outputs on forget rows change as much as without the filter. So α
    means about the same at each λ. Layers that were not measured stay as they were fitted, and a warning says so. A
    checkpoint's change of embeddings, head, norms and biases is left out.

    Raise UsageError for another target's moments, MismatchError for those of other rows to forget than the vector has
    learnt, for a vector that changes none of these outputs, for one that the filter cannot keep exact (DoRA, biases,
    whole modules), and where no layer was measured.
    """
    filter_vectors(vector, moments, {strength: Path(out)}, target, prior, progress)
    return Path(out)


def filter_vectors(
    vector: ModelLike,
    moments: str | Path,
    folders: Mapping[float, Path],
    target: ModelLike,
    prior: ModelLike | None,
    progress: Progress = silent,
    label: str = "filter",
) -> None:
    """Write a vector as `filter_vector` does, at each strength λ into a folder of its own, unless it is there already.

    All that are missing are made in one pass, and are bit for bit as if made alone. label: the step of progress.
    """
    if odd := [strength for strength in folders if not 0 < strength < math.inf]:
        raise UsageError(f"the filter's strength is {odd[0]:g}; it must be above 0 and finite")
    marks = take_marks(Path(moments), ["*.safetensors"])
    measured, goal, source = load_moments(Path(moments)), _find(target), _find(vector)
    if measured.target != goal.revision:
        raise UsageError(
            f"{moments}: measured at another model ({measured.target}), not at {goal.name} ({goal.revision}); measure "
            "the moments of this one"
        )
    learnt = (load_manifest(source.folder) or {"inputs": {}})["inputs"].get("examples", measured.rows)
    if measured.rows and learnt != measured.rows:
        raise MismatchError(
            f"{moments}: measured on other rows to forget, or in another prompt, than {source.name} has learnt; "
            "measure the moments by the recipe that fitted it"
        )
    start = None if prior is None else _find(prior)
    inputs = {strength: filter_inputs(source, measured.inputs, strength, start) for strength in folders}
    if not (missing := {λ: folder for λ, folder in folders.items() if not is_finished(folder, inputs[λ])}):
        return
    is_low_rank = is_adapter(source.folder)
    if start is None and not is_low_rank:
        raise UsageError(f"{source.name}: a full checkpoint; the filter needs the model it was tuned from (--prior)")
    for strength, folder in missing.items():
        if "moments" not in (load_manifest(folder) or {"inputs": inputs[strength]})["inputs"]:
            raise OutputError(f"{folder}: holds another vector, which was fitted; choose another output folder")
    facts: dict[float, dict[str, Any]] = {strength: {} for strength in missing}
    after, filters = load_checkpoint(goal.folder), _Filters(measured, [*missing], partial(progress, label))
    with ExitStack() as stack:
        places = {
            λ: stack.enter_context(stage_folder(folder, "vector", inputs[λ], facts[λ], private=True))
            for λ, folder in missing.items()
        }
        if start is None or is_low_rank:
            scales = _filter_adapter(source.folder, after, places, filters)
        else:
            scales = _filter_checkpoint(source.folder, after, load_checkpoint(start.folder), places, filters)
        check_unchanged(marks)
        for strength, scale in scales.items():
            facts[strength]["filter"] = {"strength": strength, "scale": scale, "layers": filters.layers}
            facts[strength] |= {"unseen": measured.unseen_at(strength)}


def _find(name: ModelLike) -> Source:
    return fetch(name) if isinstance(name, str) else name


class _Filters:
    """The filters of a target's layers. The latest ones are kept, since several layers have the same inputs."""

    def __init__(self, moments: Moments, strengths: Sequence[float], progress: Callable[[int, int], None]) -> None:
        self.moments, self.strengths, self._progress = moments, strengths, progress
        self.files = Files()
        self._known: dict[str, Filter] = {}  # the latest, by the names of their roots
        self._count = 0
        self.layers, self.passes = 0, 1
        """The layers that are filtered, each expert's own, and how often all are gone through."""
        self._energies = np.zeros(1 + len(strengths))  # Σ tr D C_f Dᵀ, and Σ tr D′ C_f D′ᵀ by λ

    def of(self, name: str, root: str, inputs: int) -> Filter:
        """Return the filter of a layer with so many inputs, else raise MismatchError."""
        if root not in self._known:
            self._known = dict([*self._known.items()][1 - _KNOWN :])
            self._known[root] = self.moments.filter_of(root, self.files)
        measured = self._known[root].inputs
        if measured != inputs:
            raise MismatchError(f"{name}: {inputs} inputs in the vector, {measured} in {self.moments.folder}")
        self._count += 1
        self._progress(self._count, self.passes * self.layers)
        return self._known[root]

    def measure(self, energies: Sequence[float]) -> None:
        """Add a layer's tr D C_f Dᵀ, and its tr D′ C_f D′ᵀ at each λ."""
        self._energies += energies

    def scales(self, vector: Path) -> dict[float, float]:
        """Return s by λ. Raise MismatchError where an energy is 0 or not finite."""
        before, *after = self._energies.tolist()
        if not (np.isfinite(self._energies).all() and self._energies.all()):
            sizes = ", ".join(f"{energy:.3g}" for energy in self._energies)
            raise MismatchError(
                f"{vector}: its change of the outputs on the rows to forget is 0 or no number, before the filter or "
                f"after it ({sizes}), so it cannot be filtered; fit the vector again, or take a smaller λ"
            )
        return {strength: math.sqrt(before / size) for strength, size in zip(self.strengths, after, strict=True)}

    def check(self, folder: Path, known: Collection[str], others: Sequence[str]) -> None:
        """Raise MismatchError where no layer was measured. Warn of others that the vector changes."""
        if not known:
            raise MismatchError(f"{self.moments.folder}: measured no layer that {folder} changes; measure again")
        if others:
            count, first = len(others), others[0]
            logger.warning("%d layers were not measured and stay as they were fitted, among them %s", count, first)


def _filter_adapter(
    folder: Path, target: Checkpoint, places: Mapping[float, Path], filters: _Filters
) -> dict[float, float]:
    """Write an adapter with its A's filtered to a place for each λ; all else is copied. Return s by λ."""
    matched, layers = match_adapter(load_adapter(folder), target), filters.moments.layers
    faults = [f"{name}: {kind}" for kind in ("values", "shifts", "tokens") for name in getattr(matched, kind)]
    faults += [f"{name}: DoRA" for name, low in matched.modules.items() if low.magnitude is not None]
    if faults:
        raise MismatchError(join_faults(f"{folder}: the filter changes LoRA factors and nothing else:", faults))
    names = {name: (low,) for name, low in matched.modules.items()} | matched.stacks
    filters.check(folder, names.keys() & layers, [name for name in names if name not in layers])
    # By the name of A and by expert, the factors that were measured: a gate and an up share an expert's rows of A.
    parts: dict[str, dict[int, dict[tuple[str, str], LowRank]]] = {}
    for name, lows in names.items():
        for root, low in zip(filters.moments.roots_of(name, len(lows)), lows, strict=False):
            expert = low.share.expert if low.share else 0
            parts.setdefault(low.a.name, {}).setdefault(expert, {})[name, root] = low
    filters.layers = sum(map(len, parts.values()))
    shard = read_shard(folder / ADAPTER_FILE)
    filtered: dict[str, list[tuple[slice, list[np.ndarray]]]] = {}  # by the name of A: rows of it at each λ
    for entry in shard.tensors:
        for expert, lows_of in parts.get(entry.name, {}).items():
            (name, root), low = next(iter(lows_of.items()))
            layer, (_, fitted) = filters.of(name, root, entry.shape[1]), low.read(filters.files, np.float64)
            changes = [*layer.apply(fitted, filters.strengths)]
            for low in lows_of.values():
                filters.measure([_energy(low, filters.files, layer, right) for right in (fitted, *changes)])
            rows = slice(expert * low.rank, (expert + 1) * low.rank)
            filtered.setdefault(entry.name, []).append((rows, [change.astype(np.float32) for change in changes]))
    scales = filters.scales(folder)
    tensors = [(e.name, "F32", e.shape, 4 * math.prod(e.shape)) for e in shard.tensors]
    header = file_header(tensors, shard.metadata)
    for number, (strength, out) in enumerate(places.items()):
        with Sink(out / ADAPTER_FILE, len(header) + sum(size for *_, size in tensors)) as sink:
            sink.append(header)
            for entry in shard.tensors:
                values = read_whole(filters.files, entry, np.float64)
                for rows, changes in filtered.get(entry.name, ()):
                    values[rows] = scales[strength] * changes[number].astype(np.float64)
                sink.append(_stored(values))
            sink.close()
        shutil.copyfile(folder / ADAPTER_CONFIG, out / ADAPTER_CONFIG)
    return scales


def _energy(low: LowRank, files: Files, layer: Filter, right: np.ndarray) -> float:
    """Return tr D C_f Dᵀ of D = scale · B · right, without D."""
    factors = low.read(files, np.float64)[0], layer.outputs(right)
    return low.scale**2 * factor_product(factors, factors)


def _filter_checkpoint(
    folder: Path, target: Checkpoint, prior: Checkpoint, places: Mapping[float, Path], filters: _Filters
) -> dict[float, float]:
    """Write θ_0 + s D′ in fp32, in the prior's layout, to a place for each λ. Return s by λ.

    Embeddings, heads, norms and biases are the prior's.
    """
    deltas, layers, files = load_vector(folder, target, prior).deltas, filters.moments.layers, filters.files
    known = {name: delta for name, delta in deltas.items() if name in layers and isinstance(delta, Difference)}
    tokens = token_tensors(target)
    others = [
        name
        for name in deltas
        if not (name in known or name in tokens or _POSITIONS.search(name)) and len(target.tensors[name].shape) > 1
    ]
    filters.check(folder, known, others)
    filters.layers, filters.passes = sum(len(layers[name].roots) for name in known), 2
    check_space(next(iter(places.values())), len(places) * output_bytes(prior.tensors.values(), "F32"))
    for name, delta in known.items():
        for _, layer, change in _changes(name, delta, filters):
            outputs = [layer.outputs(change), *layer.apply(change, filters.strengths, outputs=True)]
            filters.measure([float(np.sum(values**2)) for values in outputs])
    scales = filters.scales(folder)
    names = find_names(prior, target.tensors)
    for shard in prior.shards:
        header = shard_header(shard, "F32")
        size = len(header) + output_bytes(shard.tensors, "F32")
        with ExitStack() as stack:
            sinks = [stack.enter_context(Sink(place / shard.path.name, size)) for place in places.values()]
            for sink in sinks:
                sink.append(header)
            for entry in shard.tensors:
                name = names.get(entry.name, entry.name)
                if not entry.is_float:
                    for sink in sinks:
                        sink.append_from(files[shard.path], entry.start, entry.nbytes, shard.path)
                elif name in known:
                    for before, layer, change in _changes(name, known[name], filters):
                        filtered = layer.apply(change, filters.strengths)
                        for sink, scale, rows in zip(sinks, scales.values(), filtered, strict=True):
                            sink.append(_stored(before + scale * (rows.T if layers[name].transposed else rows)))
                else:
                    for rows in _fitted(files, entry, deltas[name] if name in others else None):
                        for sink in sinks:
                            sink.append(_stored(rows))
            for sink in sinks:
                sink.close()
    for place in places.values():
        write_companions(prior, place, "F32")
    return scales


def _changes(name: str, delta: Difference, filters: _Filters) -> Iterator[tuple[np.ndarray, Filter, np.ndarray]]:
    """Yield θ_0 as it is stored, the filter and D (out, in) of a matrix, or of each one in a tensor of experts."""
    is_transposed, parts = filters.moments.layers[name].transposed, [*map(_slices, (delta.prior, delta.tuned))]
    for root, *entries in zip(filters.moments.roots_of(name, len(parts[0])), *parts, strict=True):
        prior, tuned = (read_whole(filters.files, entry, np.float64) for entry in entries)
        change = (tuned - prior).T if is_transposed else tuned - prior
        yield prior, filters.of(name, root, change.shape[1]), change


def _fitted(files: Files, entry: TensorEntry, delta: Delta | None) -> Iterator[np.ndarray]:
    """Yield blocks of θ_0, or of θ_1 where there is a change."""
    scratch = Scratch()
    for start, stop in blocks_of(entry):
        rows = read_rows(files, entry, start, stop).astype(np.float64)
        yield rows if delta is None else rows + delta.rows(files, start, stop, np.float64, scratch)


def _slices(entry: TensorEntry) -> list[TensorEntry]:
    """Return the matrices of a tensor of three dimensions; a matrix is its only one."""
    if len(entry.shape) == 2:
        return [entry]
    size = entry.nbytes // entry.shape[0]
    places = range(entry.start, entry.start + entry.nbytes, size)
    return [replace(entry, shape=entry.shape[1:], start=start, nbytes=size) for start in places]


def _stored(values: np.ndarray) -> memoryview:
    """Return the bytes of values in fp32."""
    return np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8).data
