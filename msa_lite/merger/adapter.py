"""The same update as one PEFT adapter on the target: factors side by side, so nothing is rounded and ranks add up.

Model plus adapter is as good as the merged model, in a hundredth of the space, and can be switched off again: a way to
deliver and to try, but no removal where that is the aim.
"""

from __future__ import annotations

import json
import logging
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from msa_lite.errors import MismatchError, OutputError, UsageError, join_faults
from msa_lite.io.adapter import ADAPTER_CONFIG, ADAPTER_FILE, LowRank, unwrapped
from msa_lite.io.blocks import Files, read_whole
from msa_lite.io.hub import Source
from msa_lite.io.manifest import (
    check_free,
    check_space,
    disk_faults,
    is_finished,
    load_manifest,
    stage_folder,
    write_json,
)
from msa_lite.io.progress import Progress, silent
from msa_lite.merger.formula import Factors, combine_factors
from msa_lite.merger.plan import Plan, Precision, check_arguments, find_sources, make_plan
from msa_lite.vectors import Delta, Difference, Dora, Product, Shift, TokenRows, Vector

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
    replace: bool = False,
    progress: Progress = silent,
) -> MergedAdapter:
    """Write −α · forget + β · retain as one fp32 LoRA adapter on the target; arguments and checks as for `merge`.

    max_rank: keep at most so many ranks a module, the best ones in the Frobenius norm (Eckart and Young), found by QR
    of the factors and the SVD of their small core; what that loses is in the result. Raises as `merge` does, and
    MismatchError for vectors that are no product of factors: checkpoints, DoRA, modules_to_save, biases.
    """
    out = Path(out)
    check_arguments({"forget": (forget, alpha), "retain": (retain, beta)}, "same", "nearest")
    if max_rank is not None and max_rank < 1:
        raise UsageError(f"max_rank is {max_rank}; at least 1 is needed")
    beta = beta or 0.0
    check_free(out, "adapter")
    sources = find_sources(out, target, (forget, alpha), (retain, beta), prior)
    if len(sources) == 1:
        raise UsageError("an adapter that changes nothing is no use: give a vector and a strength above 0")
    inputs = {
        **{name: source.identity() for name, source in sources.items()},
        "alpha": float(alpha),
        "beta": float(beta),
        "max_rank": max_rank,
    }
    if is_finished(out, inputs):
        return MergedAdapter(folder=out, **(load_manifest(out) or {})["change"])
    if load_manifest(out) and not replace:
        raise OutputError(f"{out}: holds an adapter made from other inputs; remove it or choose another folder")
    plan = make_plan(sources, alpha, beta, Precision())
    _check_products(plan)
    needed = sum(plan.factor_bytes(name) for name in plan.touched)
    check_space(out, needed)
    facts: dict[str, Any] = {"sources": {name: source.pinned() for name, source in sources.items()}}
    with disk_faults(out, needed), stage_folder(out, "adapter", inputs, facts) as partial:
        merged = _write(plan, sources["target"], out, partial, max_rank, progress)
        facts["change"] = {key: value for key, value in merged.as_dict().items() if key != "out"}
    if merged.truncation_loss > 0.01:
        logger.warning("truncation to rank %s lost %.1f%% of the update", max_rank, 100 * merged.truncation_loss)
    return merged


def _check_products(plan: Plan) -> None:
    def faults(which: str, vector: Vector) -> list[str]:
        if not vector.is_adapter:
            return [f"{vector.folder}: the {which} vector is a full checkpoint"]
        return [
            f"{name}: {_KINDS[type(delta)]} in the {which} vector"
            for name, delta in vector.deltas.items()
            if not isinstance(delta, Product)
        ]

    vectors = (("forget", plan.forget), ("retain", plan.retain))
    found = [fault for which, vector in vectors if vector for fault in faults(which, vector)]
    if found:
        raise MismatchError(
            join_faults("what is no product of factors makes no LoRA adapter; merge to a model:", found)
        )


def _write(
    plan: Plan, target: Source, out: Path, partial: Path, max_rank: int | None, progress: Progress
) -> MergedAdapter:
    from safetensors.numpy import save_file

    files = Files()
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    whole = parts = lost = 0.0  # squared norms
    transposed = False
    for number, name in enumerate(plan.touched):
        lows = [delta.low if isinstance(delta, Product) else None for delta in plan.deltas(name)]
        low = next(low for low in lows if low)
        forget, retain = (_factors(files, each, low.transposed) for each in lows)
        b, a = combine_factors(forget, plan.alpha, retain, plan.beta)
        whole += _square(b, a)
        parts += sum(s**2 * _square(*f) for s, f in ((plan.alpha, forget), (plan.beta, retain)) if f)
        if max_rank is not None and a.shape[0] > max_rank:
            b, a, tail = truncate(b, a, max_rank)
            lost += tail
        module = unwrapped(low.module)
        for half, factor in (("A", a), ("B", b)):
            tensors[_KEYS[low.is_embedding].format(module, half)] = np.ascontiguousarray(factor, np.float32)
        ranks[module] = a.shape[0]
        transposed = transposed or (low.transposed and not low.is_embedding)
        progress("merge", number + 1, len(plan.touched))
    if whole <= 1e-12 * parts:
        raise MismatchError(
            f"{out}: the vectors are zero or cancel each other out, so the adapter would change nothing"
        )
    config = _config(plan, target, ranks, transposed)
    save_file(tensors, partial / ADAPTER_FILE, {"format": "pt"})
    write_json(partial / ADAPTER_CONFIG, config)
    return MergedAdapter(out, len(ranks), max(ranks.values()), math.sqrt(lost / whole))


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


def _config(plan: Plan, target: Source, ranks: dict[str, int], transposed: bool) -> dict[str, Any]:
    """PEFT's config: every scale is 1, since strengths and scales are in the factors."""
    rank = max(ranks.values())
    vector = plan.forget or plan.retain
    assert vector is not None
    theirs = json.loads((vector.folder / ADAPTER_CONFIG).read_text())
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
        "fan_in_fan_out": transposed,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }
