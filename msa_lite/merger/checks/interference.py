"""Compare the vectors of several requests, pair by pair, before they are merged into one sum; and whole models.

The cosine of two vectors says how far one request does what another does, or undoes it. Deltas of LoRA are compared by
their factors, and their product is never formed; other deltas are read in blocks of rows, as the merge reads them.

A run compares the vectors of its own request with all others. Those of earlier requests were compared when the later of
them was new, and all pairs of n requests would be n² many. Of the pairs, the most alike are kept.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import combinations
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from msa_lite.errors import MismatchError
from msa_lite.io.console.progress import notices
from msa_lite.io.weights.blocks import Files, Scratch, read_rows
from msa_lite.io.weights.checkpoint import Checkpoint
from msa_lite.io.weights.matching import aligned
from msa_lite.io.weights.tied_head import as_used, ties_head
from msa_lite.io.weights.vocabulary import differ_in_tokens
from msa_lite.merger.checks.checked import CheckedMerge
from msa_lite.merger.checks.memory import blocks_of
from msa_lite.merger.fidelity import Change, cosine, measure, measure_deltas, measure_factors
from msa_lite.merger.formula import Term
from msa_lite.merger.vectors.deltas import Loaded

logger = logging.getLogger(__name__)

# From here on, more than a quarter of the (squared) length of one update lies along the other, so that a strength that
# was chosen for one request alone is too much, or too little, beside the other. In the quickstart, requests that share
# half of their rows have 0.57, requests on different people 0.01, and forget and retain vectors 0.02.
HIGH_COSINE = 0.5
_SHOWN = 10  # pairs in the log
_KEPT = 20  # pairs in the manifest, and in reports


def tell_interference(checked: CheckedMerge, folders: Collection[Path] | None = None) -> list[dict[str, Any]]:
    """Measure and log how the vectors of several requests interfere, with a warning for pairs that are much alike.

    folders: of vectors, each of which is compared with all others; None: all pairs. Return the pairs that are most
    alike as a manifest has them, {"one": name, "other": name, "cosine": …}; nothing for one request.
    """
    if len({term.side for term in checked.terms}) == len(checked.terms):
        return []
    cosines = measure_interference(checked, folders)
    places = {term.name: str(term.vector.folder) for term in checked.terms}
    notices.info("one merge of %s", ", ".join(f"{name} ({folder})" for name, folder in places.items()))
    for (one, other), value in [*cosines.items()][:_SHOWN]:
        notices.info("  %s and %s: cosine %.2f", one, other, value or 0.0)
    if len(cosines) > _SHOWN:
        notices.info("  … and %d pairs that are less alike", len(cosines) - _SHOWN)
    for (one, other), value in cosines.items():
        # Retain vectors often share rows, which is no fault.
        if abs(value or 0.0) >= HIGH_COSINE and not (one.startswith("retain") and other.startswith("retain")):
            logger.warning(
                "%s (%s) and %s (%s) are much alike, or opposed (cosine %.2f); strengths that were chosen without the "
                "other may no longer fit: choose alpha and beta anew, on all together",
                one, places[one], other, places[other], value,
            )  # fmt: skip
    return [{"one": one, "other": other, "cosine": value} for (one, other), value in [*cosines.items()][:_KEPT]]


def measure_interference(
    checked: CheckedMerge, folders: Collection[Path] | None = None
) -> dict[tuple[str, str], float | None]:
    """Return the cosine of each two vectors of a merge by their names, the largest absolute one first.

    folders: those of which one is in each pair; None: all pairs. None for the cosine with a vector of zeros.
    """
    wanted = None if folders is None else {folder.resolve() for folder in folders}
    own = {term.name for term in checked.terms if wanted is None or term.vector.folder.resolve() in wanted}
    names = [term.name for term in checked.terms]
    sums = {pair: Change() for pair in combinations(names, 2) if own.intersection(pair)}
    files = Files()
    with threadpool_limits(1, user_api="blas"), np.errstate(over="ignore", invalid="ignore"):
        for name in checked.touched:
            for terms in _parts(files, checked, name):
                measure = measure_deltas if isinstance(terms[0].vector, np.ndarray) else measure_factors
                for pair, change in sums.items():
                    change.add(measure([term for term in terms if term.name in pair]))
    cosines = {
        pair: cosine(change.cross, *(change.vectors.get(name, 0.0) for name in pair)) for pair, change in sums.items()
    }
    return dict(sorted(cosines.items(), key=lambda item: -abs(item[1] or 0.0)))


def _parts(files: Files, checked: CheckedMerge, name: str) -> Iterator[list[Term[Any]]]:
    """Yield the deltas of a tensor: once as factors, where all are products, or else in blocks of rows."""
    entry = checked.target.tensors[name]
    work = checked.precision.work(entry)
    deltas = [term.with_vector(term.vector.load(files, work)) for term in checked.deltas(name)]
    factors = [term.with_vector((d.left, d.right)) for term in deltas if isinstance(d := term.vector, Loaded)]
    if len(factors) == len(deltas):
        yield factors
        return
    common = Scratch()
    buffers = [Scratch(common) for _ in deltas]
    for start, stop in blocks_of(entry):
        yield [
            term.with_vector(term.vector.rows(files, start, stop, work, scratch))
            for term, scratch in zip(deltas, buffers, strict=True)
        ]


def measure_model(target: Checkpoint, model: Checkpoint, name: str) -> dict[str, Change]:
    """Return the changes of a model beside the target, by tensor; of those that changed alone.

    A head of the model's own is compared with the embedding that the target has for it. Rows of tokens that only one
    of the two has count as changed, and in no norm. Tensors of codes, and masks of another shape, are left out. Raise
    MismatchError for NaN or infinities in the model. name: of the model, for the message.
    """
    files, changes, model = Files(), dict[str, Change](), aligned(model, target)
    if ties_head(target) and not ties_head(model):
        target = replace(target, tensors={**target.tensors, **as_used(target, model).tensors})
    theirs = as_used(model, target)
    for tensor, entry in target.tensors.items():
        other = theirs.tensors.get(tensor)
        is_resized = differ_in_tokens(target, theirs, tensor)
        if other is None or not (entry.is_float and other.is_float) or not (entry.shape == other.shape or is_resized):
            continue
        extra = abs(math.prod(entry.shape) - math.prod(other.shape))
        change = Change(weights=extra, changed=extra)
        for start, stop in blocks_of(min(entry, other, key=attrgetter("shape"))):
            before, after = (read_rows(files, e, start, stop).astype(np.float64) for e in (entry, other))
            if not np.isfinite(after).all():
                raise MismatchError(f"{name} holds NaN or infinities ({tensor})")
            change.add(measure(before, after - before, after, np.empty(before.shape, bool)))
        changes |= {tensor: change} if change.changed else {}
    return changes
