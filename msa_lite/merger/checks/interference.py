"""Compare the vectors of several requests, pair by pair, before they are merged into one sum.

The cosine of two vectors says how far one request does what another does, or undoes it. Deltas of LoRA are compared by
their factors, and their product is never formed; other deltas are read in blocks of rows. Everything is in fp64.

A run compares the vectors of its own request with all others. Those of earlier requests were compared when the later of
them was new, and all pairs of n requests would be n² many. Of the pairs, the most alike are kept.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from msa_lite.io.console.progress import notices, readable
from msa_lite.io.weights.blocks import Files, Scratch
from msa_lite.merger.checks.checked import CheckedMerge
from msa_lite.merger.checks.memory import RESERVED, block_rows, blocks_of, parse_size
from msa_lite.merger.fidelity import cosine, factor_product
from msa_lite.merger.vectors.deltas import Loaded

logger = logging.getLogger(__name__)

# From here on, more than a quarter of the (squared) length of one update lies along the other, so that a strength that
# was chosen for one request alone is too much, or too little, beside the other. In the quickstart, requests that share
# half of their rows have 0.57, requests on different people 0.01, and forget and retain vectors 0.02.
HIGH_COSINE = 0.5
_SHOWN = 10  # pairs in the log
_KEPT = 20  # pairs in the manifest, and in reports

Pair = tuple[str, str]


@dataclass(frozen=True)
class Interference:
    """The likeness of two vectors of a merge."""

    one: str
    """The name of a vector ("forget 1")."""
    other: str
    """The name of another."""
    cosine: float | None
    """The cosine of the two, −1 to 1; None where one of them is zero."""

    @property
    def size(self) -> float:
        """Return the absolute cosine; 0 where there is none."""
        return abs(self.cosine or 0.0)


def tell_interference(
    checked: CheckedMerge, max_memory: str | int, folders: Collection[Path] | None = None
) -> list[Interference]:
    """Measure and log how the vectors of several requests interfere, with a warning for pairs that are much alike.

    folders: of vectors, each of which is compared with all others; None: all pairs. Return the pairs that are most
    alike, the first of them first; nothing for one request, or where the factors do not fit into the memory.
    """
    if len({term.side for term in checked.terms}) == len(checked.terms):
        return []
    needed = RESERVED + max((_memory(checked, name) for name in checked.touched), default=0)
    if needed > parse_size(max_memory):
        logger.warning(
            "how far the requests interfere was not measured: that takes %s of memory, allowed are %s (--max-memory)",
            readable(needed), max_memory,
        )  # fmt: skip
        return []
    pairs = measure_interference(checked, folders)
    places = {term.name: str(term.vector.folder) for term in checked.terms}
    notices.info("one merge of %s", ", ".join(f"{name} ({folder})" for name, folder in places.items()))
    for pair in pairs[:_SHOWN]:
        notices.info("  %s and %s: cosine %.2f", pair.one, pair.other, pair.cosine or 0.0)
    if len(pairs) > _SHOWN:
        notices.info("  … and %d pairs that are less alike", len(pairs) - _SHOWN)
    for pair in pairs:
        if pair.size >= HIGH_COSINE and (effect := _effect(pair)):
            logger.warning(
                "%s (%s) and %s (%s) %s (cosine %.2f); strengths that were chosen without the other may no longer "
                "fit: choose alpha and beta anew, on all together",
                pair.one, places[pair.one], pair.other, places[pair.other], effect, pair.cosine,
            )  # fmt: skip
    return pairs[:_KEPT]


def _effect(pair: Interference) -> str | None:
    """Return what a large cosine means for the sum. Retain vectors alone often share rows, and are not warned of."""
    sides, alike = {name.partition(" ")[0] for name in (pair.one, pair.other)}, (pair.cosine or 0.0) > 0
    if sides == {"retain"}:
        return None
    if len(sides) == 1:
        return "do much the same, so together they may go too far" if alike else "undo much of each other"
    return "are much alike, so one puts back what the other removes" if alike else "push the same way"


def measure_interference(checked: CheckedMerge, folders: Collection[Path] | None = None) -> list[Interference]:
    """Return the cosine of each two vectors of a merge, the largest absolute one first.

    folders: those of which one is in each pair; None: all pairs.
    """
    wanted = None if folders is None else {folder.resolve() for folder in folders}
    own = {term.name for term in checked.terms if wanted is None or term.vector.folder.resolve() in wanted}
    pairs = [pair for pair in combinations([term.name for term in checked.terms], 2) if own.intersection(pair)]
    sums, files = defaultdict[Pair, float](float), Files()
    with threadpool_limits(1, user_api="blas"), np.errstate(over="ignore", invalid="ignore"):
        for name in checked.touched:
            for pair, product in _products(files, checked, name, pairs):
                sums[pair] += product
    found = [Interference(a, b, cosine(sums[a, b], sums[a, a], sums[b, b])) for a, b in pairs]
    return sorted(found, key=lambda pair: -pair.size)


def _products(files: Files, checked: CheckedMerge, name: str, pairs: Sequence[Pair]) -> Iterator[tuple[Pair, float]]:
    """Yield the scalar products of the vectors' deltas of one tensor, and their squared norms."""
    deltas = {term.name: term.vector.load(files, np.float64) for term in checked.deltas(name)}
    products = [*((a, b) for a, b in pairs if a in deltas and b in deltas), *((a, a) for a in deltas)]
    factors = {name: (delta.left, delta.right) for name, delta in deltas.items() if isinstance(delta, Loaded)}
    if len(factors) == len(deltas):
        for a, b in products:
            yield (a, b), factor_product(factors[a], factors[b])
        return
    common = Scratch()
    buffers = {name: Scratch(common) for name in deltas}
    for start, stop in blocks_of(checked.target.tensors[name]):
        rows = {n: d.rows(files, start, stop, np.float64, buffers[n]).reshape(-1) for n, d in deltas.items()}
        for a, b in products:
            yield (a, b), float(np.dot(rows[a], rows[b]))


def _memory(checked: CheckedMerge, name: str) -> int:
    """Return the bytes that comparing a tensor takes: factors in fp64 with their stored ones, or blocks of rows."""
    entry, factors = checked.target.tensors[name], checked.factor_bytes(name)
    in_fp64 = factors if checked.precision.work(entry) is np.float64 else 2 * factors
    block = 0 if checked.is_low_rank(name) else 32 * block_rows(entry) * entry.matrix_shape[1]
    return 4 * in_fp64 + block * len(checked.deltas(name))
