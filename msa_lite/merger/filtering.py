"""Filter a forget vector: keep what it changes on forget rows, suppress what it changes on retain rows.

The formula is `formula.layer_filter`. The result is a vector of the same kind in a folder of its own, so that every
merge, sweep and recipe takes it like any other: an adapter of the same rank, of which only A changes, or a checkpoint,
which changes nothing but linear layers.

Dtype policy: fp64 arithmetic, rounded once to fp32 on storing. Memory is that of one layer's moments and factors.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from msa_lite.errors import FormatError, MismatchError, OutputError, UsageError, join_faults
from msa_lite.io.console.progress import Progress, silent
from msa_lite.io.files.writing import check_space
from msa_lite.io.finished.manifest import is_finished, stage_folder
from msa_lite.io.finished.seal import MANIFEST, check_unchanged, load_manifest, take_marks, verify_folder
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
from msa_lite.merger.formula import FORGET_RIDGE, RETAIN_RIDGE, Filter, layer_filter
from msa_lite.merger.vectors.adapter_names import match_adapter
from msa_lite.merger.vectors.deltas import Delta, Difference
from msa_lite.merger.vectors.vector import load_vector

logger = logging.getLogger(__name__)

MOMENTS_FOLDER = "moments"  # the kind of folder, and its name in a run
SIDES = ("forget", "retain")
_POSITIONS = re.compile(r"(wpe|embed\w*)\.weight$")  # embeddings of positions, of GPT-2, OPT and others
_LARGE = 3.0  # times its norm; a filtered vector beyond that changes what it was not measured on
_KNOWN = 2  # filters in memory: of queries, keys and values, with those of the output between them in a file


Rows = Callable[[int, int], np.ndarray]
"""A function rows(start, stop) of a tensor's matrix."""


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
    json_keys: ClassVar = {"out": "folder", "layers": "count"}

    @property
    def count(self) -> int:
        """Return the number of layers."""
        return len(self.layers)

    def filter_of(self, root: str, strength: float, files: Files) -> Filter:
        """Return the filter of the layers with these roots."""
        try:
            forget, retain = (read_whole(files, self.roots[f"{side}.{root}"], np.float64) for side in SIDES)
        except FormatError as error:
            raise FormatError(f"{self.folder}: the moments of {root} are damaged; measure them again") from error
        if forget.shape[1] != retain.shape[1]:
            raise FormatError(
                f"{self.folder}: the moments of {root} are of {forget.shape[1]} inputs on forget rows and of "
                f"{retain.shape[1]} on retain rows; measure them again"
            )
        return layer_filter(forget, retain, strength)

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
    return Moments(folder, manifest["inputs"], target, rows, layers, entries)


def _layer(roots: str | list[str], transposed: bool) -> Layer:
    """Return a layer from a manifest. Raise TypeError for what is none."""
    roots = [roots] if isinstance(roots, str) else roots
    if not (isinstance(roots, list) and roots and all(isinstance(root, str) for root in roots)):
        raise TypeError(f"{roots}: no names of roots")
    return Layer(tuple(roots), bool(transposed))


def _is_root(entry: TensorEntry | None) -> bool:
    return entry is not None and entry.dtype == "F32" and len(entry.shape) == 2 and 0 not in entry.shape


def filter_inputs(vector: Source, moments: Mapping[str, Any], strength: float, prior: Source | None) -> dict[str, Any]:
    """Return all that decides a filtered vector, as its manifest records it. The prior decides that of a checkpoint.

    moments: all that decides these, since they may be gone when a run looks again.
    """
    start = {} if prior is None or is_adapter(vector.folder) else {"prior": prior.identity()}
    ridges = {"forget": FORGET_RIDGE, "retain": RETAIN_RIDGE}
    return {"vector": vector.identity(), "moments": moments, "strength": strength, "ridges": ridges, **start}


def filter_vector(
    vector: ModelLike,
    moments: str | Path,
    strength: float,
    target: ModelLike,
    prior: ModelLike | None,
    out: str | Path,
    progress: Progress = silent,
    label: str = "filter",
) -> Path:
    """Write D C_f (C_f + λ C_r)⁻¹ for each layer of a vector to the folder `out`, unless it is there already.

    vector: a PEFT adapter, or a checkpoint, which needs the prior: a folder or `repo[@revision]`, as target and prior.
    moments: a folder of `run --until moments`, measured at this target. strength: λ > 0. label: the step of progress.
    Return `out`.

    Layers that were not measured stay as they were fitted, and a warning says so. A checkpoint's change of embeddings,
    head, norms and biases is left out.

    Raise UsageError for another target's moments, MismatchError for those of other rows to forget than the vector has
    learnt, and for a vector that the filter cannot keep exact (DoRA, biases, whole modules), or of which no layer was
    measured.
    """
    if not 0 < strength < math.inf:
        raise UsageError(f"the filter's strength is {strength:g}; it must be above 0 and finite")
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
    start, folder = None if prior is None else _find(prior), Path(out)
    inputs = filter_inputs(source, measured.inputs, strength, start)
    if is_finished(folder, inputs):
        return folder
    is_low_rank = is_adapter(source.folder)
    if start is None and not is_low_rank:
        raise UsageError(f"{source.name}: a full checkpoint; the filter needs the model it was tuned from (--prior)")
    if "moments" not in (load_manifest(folder) or {"inputs": inputs})["inputs"]:
        raise OutputError(f"{folder}: holds another vector, which was fitted; choose another output folder")
    after, filters = load_checkpoint(goal.folder), _Filters(measured, strength, partial(progress, label))
    facts: dict[str, Any] = {}
    with stage_folder(folder, "vector", inputs, facts, private=True) as place:
        growth = {}
        if start is None or is_low_rank:
            growth["growth"] = _filter_adapter(source.folder, after, place, filters)
        else:
            _filter_checkpoint(source.folder, after, load_checkpoint(start.folder), place, filters)
        check_unchanged(marks)
        facts["filter"] = {"strength": strength, "layers": filters.count, **growth}
    return folder


def _find(name: ModelLike) -> Source:
    return fetch(name) if isinstance(name, str) else name


class _Filters:
    """The filters of a target's layers. The latest ones are kept, since several layers have the same inputs."""

    def __init__(self, moments: Moments, strength: float, progress: Callable[[int, int], None]) -> None:
        self.moments, self._strength, self._progress = moments, strength, progress
        self.files = Files()
        self._known: dict[str, Filter] = {}  # the latest, by the names of their roots
        self.count, self.total = 0, 0
        """The filters that were used, and those that will be."""

    def of(self, name: str, root: str, inputs: int, solve: bool = False) -> Filter:
        """Return the filter of a layer with so many inputs, else raise MismatchError.

        solve: True where it is for more rows than a LoRA factor has.
        """
        if root not in self._known:
            self._known = dict([*self._known.items()][1 - _KNOWN :])
            known = self.moments.filter_of(root, self._strength, self.files)
            self._known[root] = known.solved() if solve else known
        measured = len(self._known[root].left)
        if measured != inputs:
            raise MismatchError(f"{name}: {inputs} inputs in the vector, {measured} in {self.moments.folder}")
        self.count += 1
        self._progress(self.count, self.total)
        return self._known[root]

    def check(self, folder: Path, known: Collection[str], others: Sequence[str]) -> None:
        """Raise MismatchError where no layer was measured. Warn of others that the vector changes."""
        if not known:
            raise MismatchError(f"{self.moments.folder}: measured no layer that {folder} changes; measure again")
        if others:
            count, first = len(others), others[0]
            logger.warning("%d layers were not measured and stay as they were fitted, among them %s", count, first)


def _filter_adapter(folder: Path, target: Checkpoint, out: Path, filters: _Filters) -> float:
    """Write an adapter whose A's are filtered; all else is copied. Return how many times as large the vector became."""
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
    filters.total = sum(map(len, parts.values()))
    before, after = 0.0, 0.0  # squared norms of the vector
    shard = read_shard(folder / ADAPTER_FILE)
    tensors = [(e.name, "F32", e.shape, 4 * math.prod(e.shape)) for e in shard.tensors]
    header = file_header(tensors, shard.metadata)
    with Sink(out / ADAPTER_FILE, len(header) + sum(size for *_, size in tensors)) as sink:
        sink.append(header)
        for entry in shard.tensors:
            values = read_whole(filters.files, entry, np.float64)
            for expert, lows_of in parts.get(entry.name, {}).items():
                (name, root), low = next(iter(lows_of.items()))
                rows = slice(expert * low.rank, (expert + 1) * low.rank)
                fitted = values[rows].copy()
                values[rows] = filters.of(name, root, values.shape[1]).apply(fitted)
                for low in lows_of.values():
                    b, _ = low.read(filters.files, np.float64)
                    before += factor_product((b, fitted), (b, fitted))
                    after += factor_product((b, values[rows]), (b, values[rows]))
            sink.append(_stored(values))
        sink.close()
    shutil.copyfile(folder / ADAPTER_CONFIG, out / ADAPTER_CONFIG)
    growth = math.sqrt(after / before) if before else 1.0
    if growth > _LARGE:
        logger.warning(
            "%s: the filter made the vector %.1f times as large, so texts unlike the measured rows may suffer; score "
            "the result on others, and give more and other rows to keep",
            folder,
            growth,
        )
    return growth


def _filter_checkpoint(folder: Path, target: Checkpoint, prior: Checkpoint, out: Path, filters: _Filters) -> None:
    """Write θ_0 + D′ in fp32, in the prior's layout. Embeddings, heads, norms and biases are the prior's."""
    deltas, layers, files = load_vector(folder, target, prior).deltas, filters.moments.layers, filters.files
    known = {name: delta for name, delta in deltas.items() if name in layers and isinstance(delta, Difference)}
    tokens = token_tensors(target)
    others = [
        name
        for name in deltas
        if not (name in known or name in tokens or _POSITIONS.search(name)) and len(target.tensors[name].shape) > 1
    ]
    filters.check(folder, known, others)
    filters.total = sum(len(layers[name].roots) for name in known)
    check_space(out, output_bytes(prior.tensors.values(), "F32"))
    names = find_names(prior, target.tensors)
    for shard in prior.shards:
        header = shard_header(shard, "F32")
        with Sink(out / shard.path.name, len(header) + output_bytes(shard.tensors, "F32")) as sink:
            sink.append(header)
            for entry in shard.tensors:
                if not entry.is_float:
                    sink.append_from(files[shard.path], entry.start, entry.nbytes, shard.path)
                    continue
                parts: Iterable[tuple[TensorEntry, Rows | None]] = [(entry, None)]
                name = names.get(entry.name, entry.name)
                if name in known:
                    parts = _changes(replace(entry, name=name), known[name], filters)
                elif name in others:
                    parts = [(entry, _rows_of(files, deltas[name]))]
                for part, change in parts:
                    for start, stop in blocks_of(part):
                        rows = read_rows(files, part, start, stop).astype(np.float64)
                        sink.append(_stored(rows if change is None else rows + change(start, stop)))
            sink.close()
    write_companions(prior, out, "F32")


def _rows_of(files: Files, delta: Delta) -> Rows:
    scratch = Scratch()
    return lambda start, stop: delta.rows(files, start, stop, np.float64, scratch)


def _changes(entry: TensorEntry, delta: Difference, filters: _Filters) -> Iterator[tuple[TensorEntry, Rows]]:
    """Yield a matrix, or each slice of a tensor of experts, and a function that gives rows [start, stop) of its D′,
    as it is stored."""
    layer, slices = filters.moments.layers[entry.name], [*map(_slices, (entry, delta.tuned, delta.prior))]
    roots = filters.moments.roots_of(entry.name, len(slices[0]))
    for root, part, tuned, prior in zip(roots, *slices, strict=True):
        rows = _rows_of(filters.files, Difference(tuned, prior))
        filtering = filters.of(entry.name, root, part.shape[0 if layer.transposed else 1], solve=True)
        yield part, _filtered_rows(part, rows, filtering, layer.transposed)


def _filtered_rows(part: TensorEntry, rows: Rows, filtering: Filter, is_transposed: bool) -> Rows:
    """Return a function that gives rows [start, stop) of a matrix's D′, as it is stored. rows: gives those of D."""
    if not is_transposed:
        return lambda start, stop: filtering.apply(rows(start, stop))
    outer = sum(filtering.left[start:stop].T @ rows(start, stop) for start, stop in blocks_of(part))  # leftᵀ Dᵀ
    return lambda start, stop: filtering.share * rows(start, stop) + filtering.right[:, start:stop].T @ outer


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
