"""Write the update as one PEFT adapter on the target: factors side by side, so nothing is rounded and ranks add up.

Target and adapter together are as good as the merged model. The adapter takes a hundredth of the space and can be
switched off again. It is a way to deliver and to try the update; it removes nothing from the model.

Dtype policy: fp64 arithmetic, rounded once to fp32 on storing. Headers tell all shapes, so factors are
computed and written module by module. Memory is that of the largest module, however many there are.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from threadpoolctl import threadpool_limits

from msa_lite.errors import MismatchError, UsageError
from msa_lite.io.console.progress import Progress, readable, silent
from msa_lite.io.files.reading import read_object
from msa_lite.io.files.writing import check_space, write_json
from msa_lite.io.weights.adapter import ADAPTER_CONFIG, ADAPTER_FILE
from msa_lite.io.weights.blocks import Files
from msa_lite.io.weights.hub import Source
from msa_lite.io.weights.writer import Sink, file_header
from msa_lite.merger.adapters.modules import Module, find_modules, update_rows
from msa_lite.merger.checks.checked import CheckedMerge, Precision, check_merge, msa_terms
from msa_lite.merger.checks.inputs import ModelLike, find_inputs
from msa_lite.merger.checks.interference import tell_interference
from msa_lite.merger.checks.memory import MAX_MEMORY, RESERVED, parse_size
from msa_lite.merger.formula import OneOrSeveral, Term

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MergedAdapter:
    """The result of a merge to an adapter."""

    folder: Path
    """The adapter."""
    modules: int
    """The number of modules that it adapts."""
    rank: int
    """The largest rank of a module."""
    truncation_loss: float
    """The share of the update that truncation to `max_rank` lost."""
    interference: Sequence[dict[str, Any]] = ()
    """The interference of the vectors of several requests, pair by pair."""

    json_keys: ClassVar = {"out": "folder", "**": "change", "interference?": "interference"}
    notes: ClassVar[tuple[str, ...]] = ()  # nothing is rounded

    @property
    def change(self) -> dict[str, Any]:
        """Return the figures for the manifest."""
        return {"modules": self.modules, "rank": self.rank, "truncation_loss": self.truncation_loss}

    def describe(self) -> str:
        """Say in a line what was written."""
        lost = f"; truncation lost {self.truncation_loss:.2%} of the update" if self.truncation_loss else ""
        return f"one adapter on {self.modules} modules, rank {self.rank}{lost}"


def merge_adapters(
    target: ModelLike,
    out: str | Path,
    *,
    forget: OneOrSeveral[ModelLike] | None = None,
    alpha: OneOrSeveral[float] = 1.0,
    retain: OneOrSeveral[ModelLike] | None = None,
    beta: OneOrSeveral[float] | None = None,
    prior: ModelLike | None = None,
    max_rank: int | None = None,
    max_memory: str | int = MAX_MEMORY,
    replace: bool = False,
    progress: Progress = silent,
) -> MergedAdapter:
    """Write −α · forget + β · retain as one fp32 LoRA adapter on the target; arguments and checks as for `merge`.

    max_rank: truncate each module's update to at most this rank, the best one in the Frobenius norm (Eckart and Young),
    by QR of the factors and the SVD of their small core; linear layers that full checkpoints, DoRA or modules_to_save
    change, too (`approximate`). The result says how much that loses. Raise as `merge` does, UsageError when the factors
    of one module do not fit into `max_memory`, and, without max_rank, MismatchError for vectors that are no product of
    factors. A failed attempt leaves nothing to resume.
    """
    terms: list[Term[ModelLike]] = msa_terms(forget, alpha, retain, beta)
    limits: dict[str, Any] = {"max_memory": max_memory, "replace": replace, "progress": progress}
    return merge_terms_to_adapter(target, out, terms, prior, max_rank, **limits)


def merge_terms_to_adapter(
    target: ModelLike,
    out: str | Path,
    terms: Sequence[Term[ModelLike]],
    prior: ModelLike | None,
    max_rank: int | None = None,
    *,
    max_memory: str | int = MAX_MEMORY,
    replace: bool = False,
    compare: Collection[Path] | None = None,
    progress: Progress = silent,
) -> MergedAdapter:
    """Write Σ weight · vector as one adapter, as `merge_adapters` does, for the terms of MSA or of a baseline.

    compare: folders of vectors, to tell only how far each of these interferes with all others.
    """
    parse_size(max_memory)
    if max_rank is not None and max_rank < 1:
        raise UsageError(f"max_rank is {max_rank}; at least 1 is needed")
    if not any(term.weight for term in terms):
        raise UsageError("this adapter would change nothing; give a vector and a strength above 0")
    inputs = find_inputs(out, "adapter", target, terms, prior, {"max_rank": max_rank}, replace)
    if manifest := inputs.finished:
        return MergedAdapter(inputs.out, **manifest["change"], interference=manifest.get("interference", []))
    # PEFT adapts embedding and head apart, also where they are one matrix.
    checked = check_merge(inputs.target, inputs.terms, inputs.prior, Precision(), untie=None, writes=False)
    modules, left_out = find_modules(checked, max_rank)
    if not modules:
        raise MismatchError(
            "no linear layer changes, so an adapter would hold nothing of this update; merge to a model"
        )
    _check_memory(modules, max_memory)
    needed = sum(module.nbytes for module in modules)
    check_space(inputs.out, needed)
    checked.check_factors()
    for line in checked.tell_forms(writes=False):
        logger.info("%s", line)
    pairs = tell_interference(checked, compare)
    with inputs.stage(needed) as (partial, facts, hashes):
        outside = _lost_outside(checked, left_out)
        hashes[ADAPTER_FILE], loss, kept = _write_factors(modules, outside, partial / ADAPTER_FILE, progress)
        write_json(partial / ADAPTER_CONFIG, _config(checked, inputs.target, modules))
        merged = MergedAdapter(inputs.out, len(modules), max(module.rank for module in modules), loss, pairs)
        facts |= {"change": merged.change} | ({"kept": kept} if max_rank else {})
        facts |= {"interference": pairs} if pairs else {}
    if merged.truncation_loss > 0.01:
        logger.warning("truncation to rank %s lost %.1f%% of the update", max_rank, 100 * merged.truncation_loss)
    if left_out:
        logger.warning(
            "%d tensors are no linear layers and stay the target's, among them %s", len(left_out), left_out[0]
        )
    return merged


def _lost_outside(checked: CheckedMerge, names: Sequence[str]) -> float:
    """Return the squared norm of the changes of tensors that the adapter leaves out."""
    files = Files()
    return sum(
        float(np.sum(rows * rows))
        for name in names
        for _, rows in update_rows(files, checked.target.tensors[name], checked.deltas(name))
    )


def _check_memory(modules: Sequence[Module], max_memory: str | int) -> None:
    """Raise UsageError with the memory needed when the largest module does not fit."""
    largest = max(modules, key=lambda module: module.memory)
    needed = RESERVED + largest.memory
    if needed > parse_size(max_memory):
        raise UsageError(
            f"{max_memory} of memory is too little: this adapter needs at least {math.ceil(needed / 1e6)}MB "
            f"({largest.stacked} ranks of {largest.path})"
        )
    written = sum(module.nbytes for module in modules)
    logger.info("%s to write, up to %s of memory, one thread", readable(written), readable(needed))


def _write_factors(
    modules: Sequence[Module], outside: float, path: Path, progress: Progress
) -> tuple[str, float, dict[str, float]]:
    """Write the factors, module by module.

    outside: the squared norm of what no module holds. Return the file's hash, the share of the update that was cut, and
    the share of each module's squared norm that is kept.
    """
    files = Files()
    sums, kept = np.full(3, float(outside)), dict[str, float]()
    header = file_header((tensor for module in modules for tensor in module.tensors), {"format": "pt"})
    size = len(header) + sum(module.nbytes for module in modules)
    ignored = np.errstate(over="ignore", invalid="ignore")  # what is not finite is looked at on its own
    with threadpool_limits(1, user_api="blas"), Sink(path, size) as sink, ignored:
        sink.append(header)
        for number, module in enumerate(modules):
            a, b, (whole, of_terms, lost) = module.compute(files)
            for stored in (a, b):
                if not np.isfinite(stored).all():
                    raise MismatchError(
                        f"{module.path}: the merged factors do not fit fp32; try a smaller alpha or beta"
                    )
                sink.append(np.ascontiguousarray(stored).reshape(-1).view(np.uint8).data)
            kept[module.path] = 1 - lost / whole if whole else 1.0
            sums += whole, of_terms, lost
            progress("merge", number + 1, len(modules))
        update, terms, lost = sums
        if update <= 1e-12 * terms:
            raise MismatchError(
                f"{path.parent}: the vectors are zero or cancel each other out, so the adapter would change nothing"
            )
        return sink.close(), math.sqrt(lost / update), kept


def _config(checked: CheckedMerge, target: Source, modules: Sequence[Module]) -> dict[str, Any]:
    """Return PEFT's config: every scale is 1, since strengths and scales are in the factors."""
    ranks = {module.path: module.rank for module in modules}
    parameters = {module.path for module in modules if module.is_parameter}
    rank = max(ranks.values())
    adapters = [vector.folder for vector in checked.vectors if vector.is_adapter]
    task = read_object(adapters[0] / ADAPTER_CONFIG).get("task_type") if adapters else "CAUSAL_LM"
    # Keys are regular expressions to PEFT, so that dots have to be escaped.
    pattern = {re.escape(module): number for module, number in ranks.items() if number != rank}
    return {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": str(target.folder.resolve()) if target.is_folder else target.name.partition("@")[0],
        "revision": None if target.is_folder else target.revision,
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": pattern,
        "alpha_pattern": pattern,
        "target_modules": sorted(ranks.keys() - parameters),
        **({"target_parameters": sorted(parameters)} if parameters else {}),
        "fan_in_fan_out": any(module.is_turned for module in modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }
