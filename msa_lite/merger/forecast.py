"""Forecast whether an update outlives quantisation, while blocks are merged: no second pass, no GPU.

Two figures. The share of weights whose code changes: all others are the target's again once the unlearned model is
quantised, up to the scale of their group. And the part of the update that is left, ⟨Q(θ_u) − Q(θ_D), θ_u − θ_D⟩ / ‖θ_u
− θ_D‖², Q the rounded weights. The first alone says little: a code that changes moves its weight by a whole step, so
that few of them hold an update that is spread over many weights, on average. The second falls where an update is
rounded away: where the target's weights lie on the values of the form already (a model that was dequantised), or where
the update was made to stay between two codes. On SmolLM2-135M and TOFU, 1.4 % of the codes changed under NF4, 99 % of
the update was left, and nothing came back. With the same target after NF4 and `dequantize()`, the same update was gone
but for 2 %, and 97 % of the lost extraction strength came back. On such targets, both rank what comes back (Spearman's
ρ 0.7 for extraction strength, 0.9 for probability, 29 and 27 points of tests/benchmarks/forecast_recovery.py). On usual
ones next to nothing did, with up to 76 % of the codes unchanged; the part left was above 99 % there. Only a score after
quantisation is evidence (`msa-lite attack`).

Counted are the linear weights of the numbered layers that a vector touches: bitsandbytes quantises neither embeddings
nor norms nor the output head. They are known by name and shape. GPT-2 stores its linear weights transposed, so there
the groups run along the other side than in the quantised model.

Of large tensors a sample is counted, every 257th group at most (of int8, whose groups are rows, 64 rows at least). So
NF4 adds 7 % to a merge's CPU time on two busy cores (tests/benchmarks/bench_forecast.py). A tensor's sample has more
than 10,000 weights, so that the standard error of its share is at most 0.5 percentage points, where weights of a group
do not change alike. Tensors of up to 32,767 weights count whole. The sample depends on the tensor alone, not on threads
or memory. The exception is NF4 where the length of a row is no multiple of 64: groups at the seams of blocks are left
out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from msa_lite.errors import UsageError, nearest
from msa_lite.io.checkpoint import TensorEntry
from msa_lite.io.codes import QUANTISATIONS, Quantisation, Recoded
from msa_lite.merger.fidelity import Change
from msa_lite.report.update import place_of

_ENOUGH, _ROWS = 1 << 14, 64  # weights of a tensor, and rows where they are groups
_SPARSEST = 257  # odd, as all steps are: one that divides the size of an attention head would miss most places
_BYTES = 48  # of memory for each weight that is counted at a time: both models' weights, copies, codes, rounded ones


def check_forms(forms: Sequence[str]) -> tuple[str, ...]:
    """Return forms of quantisation in the order of `QUANTISATIONS`, each once. Raise UsageError for unknown ones."""
    unknown = [f"'{form}'{nearest(form, QUANTISATIONS)}" for form in forms if form not in QUANTISATIONS]
    if unknown:
        raise UsageError(f"forecast {', '.join(unknown)}: choose from {', '.join(QUANTISATIONS)}")
    return tuple(form for form in QUANTISATIONS if form in forms)


def is_quantised(entry: TensorEntry) -> bool:
    """Check whether a tensor is a linear weight of a layer, which quantisation rounds."""
    return len(entry.shape) == 2 and entry.name.endswith(".weight") and place_of(entry.name)[0] is not None


def count_block(
    forms: Sequence[str], entry: TensorEntry, start: int, before: np.ndarray, after: np.ndarray
) -> dict[str, Recoded]:
    """Return what rounding leaves of the update by form, in rows of a tensor from `start` on.

    before, after: the rows in the target and in the unlearned model, as they are stored, in fp32 or fp64.
    """
    counts = {}
    for name in forms:
        counts[name] = Recoded()
        samples = (_sample(QUANTISATIONS[name], entry, start, rows) for rows in (before, after))
        for pair in zip(*samples, strict=True):
            counts[name] = counts[name].plus(QUANTISATIONS[name].compare(*pair))
    return counts


def _sample(form: Quantisation, entry: TensorEntry, start: int, rows: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the groups to count of rows of a tensor from `start` on, in fp32."""
    pick = _of_tensor if form.crosses_rows else _of_rows
    for part in pick(form, entry, start, rows):
        if part.size:
            yield np.ascontiguousarray(part, np.float32)


def _of_rows(form: Quantisation, entry: TensorEntry, start: int, rows: np.ndarray) -> Iterator[np.ndarray]:
    """Yield every n-th group of rows, then the shorter group at the end of every n-th row."""
    step, columns = _step(form, entry), entry.shape[1]
    width = form.width or columns
    count = columns // width  # groups of a row
    if count:
        numbers = np.arange(-start * count % step, len(rows) * count, step)
        yield rows[:, : count * width].reshape(-1, count, width)[numbers // count, numbers % count]
    yield rows[-start % step :: step, count * width :]


def _of_tensor(form: Quantisation, entry: TensorEntry, start: int, rows: np.ndarray) -> Iterator[np.ndarray]:
    """Yield every n-th group of a tensor whose groups run on from row to row.

    Groups that begin before these rows, or end behind them, are left out. There are none where the length of a row is a
    multiple of a group's, as in all models that we know.
    """
    step, place = _step(form, entry), start * entry.shape[1]
    skipped = -place % form.width
    first = (place + skipped) // form.width
    for part in form.groups(rows.reshape(1, -1)[:, skipped:]):
        if part.shape[1] == form.width or start + len(rows) == entry.shape[0]:
            yield part[-first % step :: step]
        first += len(part)


def _step(form: Quantisation, entry: TensorEntry) -> int:
    """Return which of a tensor's groups are counted: every n-th."""
    step = min(_SPARSEST, math.prod(entry.shape) // _ENOUGH | 1)
    return step if form.width else min(step, entry.shape[0] // _ROWS | 1)


def forecast_bytes(forms: Sequence[str], entry: TensorEntry, rows: int) -> int:
    """Return the memory that a forecast takes for one block of rows of a tensor."""
    if not is_quantised(entry):
        return 0
    return max(math.ceil(rows / _step(QUANTISATIONS[form], entry)) for form in forms) * entry.shape[1] * _BYTES


def forecast_fact(changes: Mapping[str, Change], forms: Sequence[str]) -> dict[str, Any]:
    """Return the manifest's figures by form: in total, and the share by layer; empty where nothing was counted.

    changed: the weights counted whose code differs. weights: all that were counted. share: changed / weights. layers:
    that share by layer. kept: the part of the update that is left after rounding; None for an update of zeros.
    """
    fact: dict[str, dict[str, Any]] = {}
    for form in forms:
        whole, layers = Recoded(), dict[str, Recoded]()
        for name, change in changes.items():
            if form in change.codes and change.codes[form].weights:
                layer = str(place_of(name)[0])
                layers[layer] = layers.get(layer, Recoded()).plus(change.codes[form])
                whole = whole.plus(change.codes[form])
        if whole.weights:
            shares = {layer: layers[layer].changed / layers[layer].weights for layer in sorted(layers, key=int)}
            fact[form] = {
                "changed": whole.changed,
                "weights": whole.weights,
                "share": whole.changed / whole.weights,
                "kept": whole.along / whole.update if whole.update else None,
                "layers": shares,
            }
    return fact
