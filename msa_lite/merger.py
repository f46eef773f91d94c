"""The merge: θ_u = θ_D − α (θ_1 − θ_0) + β (θ_2 − θ_0), streamed through a target one block of rows at a time.

Memory does not grow with the model: a few blocks of `_BLOCK_BYTES` and the factors of one tensor. The output has the
target's files, names, order and, unless another dtype is asked for, its very headers. Dtype policy: LoRA deltas are
added in fp32, differences of checkpoints in fp64; the result is rounded once, to nearest, on writing.
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from msa_lite.errors import FormatError, MismatchError, OutputError, StageError, UsageError, join_faults, nearest
from msa_lite.io.checkpoint import Checkpoint, TensorEntry, load_checkpoint, read_rows
from msa_lite.io.hub import Source, fetch
from msa_lite.io.manifest import check_free, check_space, is_finished, load_manifest, stage_folder
from msa_lite.io.progress import Progress, silent
from msa_lite.io.writer import (
    copy_range,
    output_bytes,
    output_dtype,
    round_once,
    shard_header,
    write_all,
    write_companions,
)
from msa_lite.vectors import Vector, load_vector

logger = logging.getLogger(__name__)

DTYPES = {"same": None, "bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_BLOCK_BYTES = 8 << 20


def combine(
    weight: np.ndarray, forget: np.ndarray | None, alpha: float, retain: np.ndarray | None, beta: float
) -> np.ndarray:
    """The formula on one block: w − α Δ_forget + β Δ_retain (paper §3).

    weight, forget, retain: arrays of one shape and dtype, fp32 or fp64; None for a vector that does not touch the
    tensor. Returns a new array of the same dtype.
    """
    result = weight.copy()
    if forget is not None:
        result -= alpha * forget
    if retain is not None:
        result += beta * retain
    return result


@dataclass
class _Change:
    """What a merge did to the weights it touched, summed over blocks."""

    touched: int = 0
    changed: int = 0
    wanted: float = 0.0  # Σ (wanted update)²
    lost: float = 0.0  # Σ (wanted update − stored update)²
    effective: set[str] = field(default_factory=set)  # vectors with a delta that is not zero

    def add(self, before: np.ndarray, wanted: np.ndarray, stored: np.ndarray, unmerged: np.ndarray) -> None:
        """stored, unmerged: the block with and without the update, both rounded to the output dtype."""
        self.touched += before.size
        self.changed += int(np.count_nonzero(stored != unmerged))
        update = np.subtract(wanted, before, dtype=np.float64)
        self.wanted += float(np.sum(np.square(update)))
        self.lost += float(np.sum(np.square(update - np.subtract(stored, unmerged, dtype=np.float64))))

    @property
    def rounding_loss(self) -> float:
        """‖stored − wanted‖ / ‖wanted update‖: the share of the update that the output dtype could not hold."""
        return math.sqrt(self.lost / self.wanted) if self.wanted else 0.0


@dataclass(frozen=True)
class Merged:
    """Result of a merge: its folder and what happened to the weights."""

    folder: Path
    tensors_touched: int
    weights_touched: int
    weights_changed: int
    rounding_loss: float

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form, for `--json` and the manifest."""
        return {
            "out": str(self.folder),
            "tensors_touched": self.tensors_touched,
            "weights_touched": self.weights_touched,
            "weights_changed": self.weights_changed,
            "rounding_loss": self.rounding_loss,
        }


@dataclass(frozen=True)
class _Plan:
    target: Checkpoint
    forget: Vector | None
    alpha: float
    retain: Vector | None
    beta: float
    dtype: str | None
    touched: set[str] = field(default_factory=set)

    def block_rows(self, entry: TensorEntry) -> int:
        return max(1, _BLOCK_BYTES // (8 * entry.matrix_shape[1]))


def merge(
    target: str | Source,
    out: str | Path,
    *,
    forget: str | Source | None = None,
    alpha: float = 1.0,
    retain: str | Source | None = None,
    beta: float = 0.0,
    prior: str | Source | None = None,
    dtype: str = "same",
    replace: bool = False,
    progress: Progress = silent,
) -> Merged:
    """Subtract α times the forget vector from the target, add β times the retain vector, write the result to `out`.

    target, prior: folder or `repo[@revision]`; forget, retain: PEFT adapter folders, or full checkpoints, which need
    the prior. alpha, beta ≥ 0; a vector whose strength is 0 is not opened. dtype: "same" or a name in `DTYPES`. An
    `out` that was made from the same inputs is left as it is; one that msa-lite made from others is only overwritten
    with `replace`.

    Raises before anything is written: UsageError, MismatchError (tensors that do not fit, all named), FormatError
    (broken files, quantised targets), OutputError (`out` is taken or the disk is too small). While it works:
    StageError when a merged value overflows, MismatchError when the vectors turn out to change nothing.
    """
    out = Path(out)
    _check_arguments(forget, alpha, retain, beta, dtype)
    places = [v.folder if isinstance(v, Source) else Path(v) for v in (target, forget, retain, prior) if v]
    if any(out.resolve() == place.resolve() for place in places):
        raise OutputError(f"{out}: is one of the inputs; a merge never overwrites what it reads")
    check_free(out, "model")
    sources = {"target": _source(target)}
    for name, value, strength in (("forget", forget, alpha), ("retain", retain, beta)):
        if strength > 0 and value is not None:
            sources[name] = _source(value)
    if prior is not None and len(sources) > 1:
        sources["prior"] = _source(prior)
    inputs = {
        **{name: source.identity() for name, source in sources.items()},
        "alpha": float(alpha),
        "beta": float(beta),
        "dtype": dtype,
    }
    if is_finished(out, inputs):
        return Merged(folder=out, **(load_manifest(out) or {})["change"])
    if load_manifest(out) and not replace:
        raise OutputError(f"{out}: holds a model made from other inputs; remove it or choose another folder")
    plan = _plan(sources, alpha, beta, DTYPES[dtype])
    check_space(out, output_bytes(plan.target.tensors.values(), plan.dtype))
    facts: dict[str, Any] = {"sources": {name: source.pinned() for name, source in sources.items()}}
    with stage_folder(out, "model", inputs, facts) as partial:
        merged = _write(plan, partial, out, progress)
        facts["change"] = {key: value for key, value in merged.as_dict().items() if key != "out"}
    return merged


def _check_arguments(
    forget: str | Source | None, alpha: float, retain: str | Source | None, beta: float, dtype: str
) -> None:
    """What can be said without looking at a file or the network."""
    for name, vector, strength in (("alpha", forget, alpha), ("beta", retain, beta)):
        if not (math.isfinite(strength) and strength >= 0):
            raise UsageError(f"{name} is {strength}; it must be a number ≥ 0")
        if strength > 0 and vector is None:
            raise UsageError(
                f"{name} is {strength}, but there is no {'forget' if name == 'alpha' else 'retain'} vector"
            )
    if dtype not in DTYPES:
        raise UsageError(f"dtype '{dtype}'{nearest(dtype, DTYPES)}: choose from {', '.join(DTYPES)}")


def _source(value: str | Source) -> Source:
    return value if isinstance(value, Source) else fetch(str(value))


def _plan(sources: dict[str, Source], alpha: float, beta: float, dtype: str | None) -> _Plan:
    target = load_checkpoint(sources["target"].folder)
    check_mergeable(target)
    prior = load_checkpoint(sources["prior"].folder) if "prior" in sources else None
    vectors = {
        name: load_vector(sources[name].folder, target, prior) if name in sources else None
        for name in ("forget", "retain")
    }
    touched = set().union(*(vector.names for vector in vectors.values() if vector)) & set(target.tensors)
    faults = [
        f"{name}: stored as {target.tensors[name].dtype}, which is not a plain float"
        for name in sorted(touched)
        if not target.tensors[name].is_float
    ]
    if faults:
        raise FormatError(join_faults(f"{target.folder}: tensors that a vector changes cannot be merged:", faults))
    return _Plan(target, vectors["forget"], alpha, vectors["retain"], beta, dtype, touched)


def check_mergeable(target: Checkpoint) -> None:
    """Raise FormatError for a quantised target, whose stored codes are no weights that a delta could be added to."""
    method = target.config.get("quantization_config")
    if method:
        kind = method.get("quant_method", "unknown") if isinstance(method, dict) else method
        raise FormatError(
            f"{target.folder}: the target is quantised (quantization_config: {kind}); merge into the unquantised "
            "checkpoint and quantise the result"
        )


def _write(plan: _Plan, partial: Path, out: Path, progress: Progress) -> Merged:
    change = _Change()
    total = sum(entry.nbytes for entry in plan.target.tensors.values())
    done = 0
    for shard in plan.target.shards:
        path = partial / shard.path.name
        source = os.open(shard.path, os.O_RDONLY)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            write_all(handle, shard_header(shard, plan.dtype))
            for entry in shard.tensors:
                _write_tensor(plan, entry, source, handle, change)
                done += entry.nbytes
                progress("merge", done, total)
            os.fsync(handle)
        finally:
            os.close(handle)
            os.close(source)
    idle = [n for n, v in (("forget", plan.forget), ("retain", plan.retain)) if v and n not in change.effective]
    if idle:
        raise MismatchError(
            f"{out}: the {' and the '.join(idle)} vector is all zeros and changes nothing; fit it again"
        )
    if (plan.forget or plan.retain) and not change.changed:
        raise MismatchError(
            f"{out}: the vectors change none of the {change.touched} weights they touch: they are too small for this "
            "dtype (try --dtype float32); nothing was written"
        )
    write_companions(plan.target, partial, plan.dtype)
    logger.info(
        "%d of %d touched weights changed; rounding loss %.2g", change.changed, change.touched, change.rounding_loss
    )
    return Merged(out, len(plan.touched), change.touched, change.changed, change.rounding_loss)


def _write_tensor(plan: _Plan, entry: TensorEntry, source: int, handle: int, change: _Change) -> None:
    """Append one tensor: copied where nothing changes, otherwise combined (or cast) block by block."""
    dtype = output_dtype(entry, plan.dtype)
    if not entry.nbytes or (entry.name not in plan.touched and dtype == entry.dtype):
        copy_range(source, handle, entry.start, entry.nbytes)
        return
    vectors = [v if v and entry.name in v.names else None for v in (plan.forget, plan.retain)]
    work = np.float64 if any(v.is_exact for v in vectors if v) or entry.dtype == "F64" else np.float32
    rows, step = entry.matrix_shape[0], plan.block_rows(entry)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        before = read_rows(source, entry, start, stop).astype(work)
        deltas = [v.delta(entry.name, start, stop) if v else None for v in vectors]
        wanted = combine(before, deltas[0], plan.alpha, deltas[1], plan.beta)
        stored = round_once(wanted, dtype)
        if (np.isfinite(before) & ~np.isfinite(stored)).any():
            raise StageError(
                f"{entry.name}: merged values do not fit {dtype}; try a smaller alpha or beta, or --dtype float32"
            )
        if any(vectors):
            change.add(before, wanted, stored.astype(work), round_once(before, dtype).astype(work))
            change.effective.update(
                n for n, d in zip(("forget", "retain"), deltas, strict=True) if d is not None and d.any()
            )
        write_all(handle, stored.view(np.uint8).data.cast("B"))
