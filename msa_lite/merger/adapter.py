"""The same update as one PEFT adapter on the target: factors side by side, so nothing is rounded and ranks add up.

Model plus adapter is as good as the merged model, in a hundredth of the space, and can be switched off again: a way to
deliver and to try, but no removal where that is the aim.

Dtype policy: fp64 arithmetic, rounded once to fp32 on storing. All shapes are known from headers, so that factors are
computed and written module by module: memory is that of the largest module, whatever their number.
"""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from threadpoolctl import threadpool_limits

from msa_lite.errors import MismatchError, UsageError, join_faults
from msa_lite.io.adapter import ADAPTER_CONFIG, ADAPTER_FILE, LowRank, unwrapped
from msa_lite.io.blocks import Files, read_whole
from msa_lite.io.disk import check_space, disk_faults
from msa_lite.io.files import write_json
from msa_lite.io.hub import Source
from msa_lite.io.manifest import stage_folder
from msa_lite.io.progress import Progress, silent
from msa_lite.io.reading import read_object
from msa_lite.io.sink import Sink
from msa_lite.io.writer import file_header
from msa_lite.merger.formula import Factors, combine_factors
from msa_lite.merger.inputs import find_inputs
from msa_lite.merger.plan import RESERVED, MergePlan, Precision, check_arguments, make_plan, parse_size
from msa_lite.merger.vectors import CommonRows, Delta, Difference, Dora, Product, Shift, TokenRows, Vector

logger = logging.getLogger(__name__)

_KINDS: dict[type[Delta], str] = {
    Dora: "DoRA",
    Difference: "a full new value",
    Shift: "a bias of LoRA's own",
    TokenRows: "new token rows",
}
_KEYS = {False: "base_model.model.{}.lora_{}.weight", True: "base_model.model.{}.lora_embedding_{}"}


@dataclass(frozen=True)
class MergedAdapter:
    """Result: the folder, the modules adapted, the largest rank, and the share of the update that truncation lost."""

    folder: Path
    modules: int
    rank: int
    truncation_loss: float

    notes: ClassVar[tuple[str, ...]] = ()  # nothing is rounded

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form, for `--json` and the manifest."""
        values = {key: value for key, value in vars(self).items() if key not in ("folder", "notes")}
        return {"out": str(self.folder), **values}

    def describe(self) -> str:
        """What was written, in a line."""
        lost = f"; truncation lost {self.truncation_loss:.2%} of the update" if self.truncation_loss else ""
        return f"one adapter on {self.modules} modules, rank {self.rank}{lost}"


def merge_adapters(
    target: str | Source,
    out: str | Path,
    *,
    forget: str | Source | None = None,
    alpha: float = 1.0,
    retain: str | Source | None = None,
    beta: float | None = None,
    prior: str | Source | None = None,
    max_rank: int | None = None,
    max_memory: str | int = "512MB",
    replace: bool = False,
    progress: Progress = silent,
) -> MergedAdapter:
    """Write −α · forget + β · retain as one fp32 LoRA adapter on the target; arguments and checks as for `merge`.

    max_rank: keep at most so many ranks a module, the best ones in the Frobenius norm (Eckart and Young), found by QR
    of the factors and the SVD of their small core; what that loses is in the result. Raises as `merge` does, UsageError
    when the factors of one module do not fit into `max_memory`, and MismatchError for vectors that are no product of
    factors: checkpoints, DoRA, modules_to_save, biases. There is nothing to resume: a failed attempt leaves nothing.
    """
    vectors = {"forget": (forget, alpha), "retain": (retain, beta)}
    check_arguments(vectors, "same", "nearest")
    parse_size(max_memory)
    if max_rank is not None and max_rank < 1:
        raise UsageError(f"max_rank is {max_rank}; at least 1 is needed")
    if not any(vector is not None and strength for vector, strength in vectors.values()):
        raise UsageError("an adapter that changes nothing is no use: give a vector and a strength above 0")
    inputs = find_inputs(out, "adapter", target, vectors, prior, {"max_rank": max_rank}, replace)
    if (change := inputs.finished) is not None:
        return MergedAdapter(folder=inputs.out, **change)
    plan = make_plan(inputs.sources, inputs.alpha, inputs.beta, Precision())
    _check_products(plan)
    modules = [_Module(_lows(plan, name), max_rank) for name in plan.touched]
    _check_memory(modules, max_memory)
    needed = sum(module.nbytes for module in modules)
    check_space(inputs.out, needed)
    plan.check_factors()
    facts, hashes = inputs.facts(), dict[str, str]()
    with (
        disk_faults(inputs.out, needed),
        stage_folder(inputs.out, "adapter", inputs.record, facts, hashes=hashes, check=inputs.check_output) as partial,
        inputs.unchanged(),
    ):
        hashes[ADAPTER_FILE], merged = _write(plan, modules, inputs.out, partial / ADAPTER_FILE, progress)
        write_json(partial / ADAPTER_CONFIG, _config(plan, inputs.sources["target"], modules))
        facts["change"] = {key: value for key, value in merged.as_dict().items() if key != "out"}
    if merged.truncation_loss > 0.01:
        logger.warning("truncation to rank %s lost %.1f%% of the update", max_rank, 100 * merged.truncation_loss)
    return merged


def _kind(delta: Delta) -> str:
    if isinstance(delta, CommonRows):
        return _kind(delta.delta)
    return "of more or fewer tokens than the target" if isinstance(delta, Product) else _KINDS[type(delta)]


def _check_products(plan: MergePlan) -> None:
    def faults(which: str, vector: Vector) -> list[str]:
        if not vector.is_adapter:
            return [f"{vector.folder}: the {which} vector is a full checkpoint"]
        return [
            f"{name}: {_kind(delta)} in the {which} vector"
            for name, delta in vector.deltas.items()
            if not isinstance(delta, Product) or delta.count is not None
        ]

    vectors = (("forget", plan.forget), ("retain", plan.retain))
    found = [fault for which, vector in vectors if vector for fault in faults(which, vector)]
    if found:
        raise MismatchError(
            join_faults("what is no product of factors makes no LoRA adapter; merge to a model:", found)
        )


@dataclass(frozen=True)
class _Module:
    """A module of the output, by headers: the factors of both vectors side by side, cut to `max_rank` if that is less.

    lows: of forget and retain vector, at least one of the two.
    """

    lows: tuple[LowRank | None, LowRank | None]
    max_rank: int | None

    @property
    def low(self) -> LowRank:
        """The one that says how the output's factors are named and turned."""
        return next(low for low in self.lows if low)

    @property
    def name(self) -> str:
        return unwrapped(self.low.module)

    @property
    def stacked(self) -> int:
        """Ranks of both vectors together."""
        return sum(low.rank for low in self.lows if low)

    @property
    def is_cut(self) -> bool:
        return self.max_rank is not None and self.stacked > self.max_rank

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the delta as PEFT's module has it."""
        return self.low.b.shape[0], self.low.a.shape[1]

    @property
    def rank(self) -> int:
        """Ranks in the output; after a cut no more than the matrix can have."""
        return min(self.max_rank or 0, *self.shape) if self.is_cut else self.stacked

    @property
    def tensors(self) -> list[tuple[str, str, tuple[int, int], int]]:
        """Name, dtype, shape and bytes of A and B in the output."""
        (out, into), key = self.shape, _KEYS[self.low.is_embedding]
        shapes = {"A": (self.rank, into), "B": (out, self.rank)}
        return [(key.format(self.name, half), "F32", shape, 4 * math.prod(shape)) for half, shape in shapes.items()]

    @property
    def nbytes(self) -> int:
        return sum(size for *_, size in self.tensors)

    @property
    def memory(self) -> int:
        """Bytes that its arrays take at most at a time."""
        (out, into), rank = self.shape, self.stacked
        whole, core = rank * (out + into), rank * rank
        needed = 3 * whole + 4 * core  # as read, with strengths, stacked; ranks by ranks for the norms
        if self.is_cut:  # QR holds four copies of a factor, the core's SVD many of the core
            needed = max(needed, whole + rank * out + 4 * rank * max(out, into) + 2 * core, 2 * whole + 16 * core)
        return 8 * needed


def _lows(plan: MergePlan, name: str) -> tuple[LowRank | None, LowRank | None]:
    forget, retain = (delta.low if isinstance(delta, Product) else None for delta in plan.deltas(name))
    return forget, retain


def _check_memory(modules: list[_Module], max_memory: str | int) -> None:
    """Raise UsageError when the module that takes most does not fit, with what is needed."""
    largest = max(modules, key=lambda module: module.memory)
    needed = RESERVED + largest.memory
    if needed > parse_size(max_memory):
        raise UsageError(
            f"{max_memory} of memory are too little: this adapter needs at least {math.ceil(needed / 1e6)}MB "
            f"({largest.stacked} ranks of {largest.name})"
        )
    written = sum(module.nbytes for module in modules)
    logger.info("%.2f GB to write, up to %.0f MB of memory, one thread", written / 1e9, needed / 1e6)


def _write(
    plan: MergePlan, modules: list[_Module], out: Path, path: Path, progress: Progress
) -> tuple[str, MergedAdapter]:
    """Write the factors, module by module; the file's hash, and the result for `out`."""
    files = Files()
    whole = parts = lost = 0.0  # squared norms
    header = file_header((tensor for module in modules for tensor in module.tensors), {"format": "pt"})
    size = len(header) + sum(module.nbytes for module in modules)
    ignored = np.errstate(over="ignore", invalid="ignore")  # what is not finite is looked at on its own
    with threadpool_limits(1, user_api="blas"), Sink(path, size) as sink, ignored:
        sink.append(header)
        for number, module in enumerate(modules):
            squares = _append(sink, files, plan, module)
            whole, parts, lost = whole + squares[0], parts + squares[1], lost + squares[2]
            progress("merge", number + 1, len(modules))
        if whole <= 1e-12 * parts:
            raise MismatchError(
                f"{out}: the vectors are zero or cancel each other out, so the adapter would change nothing"
            )
        sha256 = sink.close()
    rank = max(module.rank for module in modules)
    return sha256, MergedAdapter(out, len(modules), rank, math.sqrt(lost / whole))


def _append(sink: Sink, files: Files, plan: MergePlan, module: _Module) -> tuple[float, float, float]:
    """Write A and B of a module; squared norms of its update, of what the vectors give to it, of what a cut lost."""
    b, a, parts = _combined(files, plan, module)
    whole, lost = _square(b, a), 0.0
    if module.is_cut:
        b, a, lost = truncate(b, a, module.rank)
    for factor in (a, b):
        stored = np.ascontiguousarray(factor, np.float32)
        if not np.isfinite(stored).all():
            raise MismatchError(f"{module.name}: the merged factors do not fit fp32; try a smaller alpha or beta")
        sink.append(stored.view(np.uint8).data)
    return whole, parts, lost


def _combined(files: Files, plan: MergePlan, module: _Module) -> tuple[np.ndarray, np.ndarray, float]:
    """B and A of the update in fp64, and the squared norms of what it is the sum of."""
    forget, retain = (_factors(files, low, module.low.transposed) for low in module.lows)
    parts = sum(s * s * _square(*f) for s, f in ((plan.alpha, forget), (plan.beta, retain)) if f)
    return *combine_factors(forget, plan.alpha, retain, plan.beta), parts


def _factors(files: Files, low: LowRank | None, transposed: bool) -> Factors | None:
    """(scale · B, A) in fp64, in PEFT's orientation for a weight that is stored as (in, out) or not."""
    if low is None:
        return None
    b, a = read_whole(files, low.b, np.float64) * low.scale, read_whole(files, low.a, np.float64)
    return (b, a) if low.transposed == transposed else (a.T, b.T)


def _square(b: np.ndarray, a: np.ndarray) -> float:
    """‖B A‖², without the product."""
    return float(np.sum((b.T @ b) * (a @ a.T)))


def truncate(b: np.ndarray, a: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray, float]:
    """The best approximation of B A by `rank` ranks, never forming the product; and its squared error.

    b: (out, r), a: (r, in). With B = Q_b R_b and Aᵀ = Q_a R_a the singular values are those of R_b R_aᵀ, which is
    at most (r, r).
    """
    left, core_left = np.linalg.qr(b)
    right, core_right = np.linalg.qr(a.T)
    u, s, v = np.linalg.svd(core_left @ core_right.T, full_matrices=False)
    root = np.sqrt(s[:rank])
    return left @ (u[:, :rank] * root), (root[:, None] * v[:rank]) @ right.T, float(np.sum(s[rank:] ** 2))


def _config(plan: MergePlan, target: Source, modules: list[_Module]) -> dict[str, Any]:
    """PEFT's config: every scale is 1, since strengths and scales are in the factors."""
    ranks = {module.name: module.rank for module in modules}
    rank = max(ranks.values())
    vector = plan.forget or plan.retain
    assert vector is not None
    theirs = read_object(vector.folder / ADAPTER_CONFIG)
    # Keys are regular expressions to PEFT, so that dots have to be escaped.
    pattern = {re.escape(module): number for module, number in ranks.items() if number != rank}
    return {
        "peft_type": "LORA",
        "task_type": theirs.get("task_type"),
        "base_model_name_or_path": str(target.folder.resolve()) if target.is_folder else target.name.partition("@")[0],
        "revision": None if target.is_folder else target.revision,
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": pattern,
        "alpha_pattern": pattern,
        "target_modules": sorted(ranks),
        "fan_in_fan_out": any(m.low.transposed and not m.low.is_embedding for m in modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }
