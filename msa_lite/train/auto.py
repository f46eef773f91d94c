"""Settings of a fit that nobody has chosen: batch, number of passes and learning rate, by rows, model and mode."""

from __future__ import annotations

import math
from typing import Literal

LEAST_BATCH, MOST_BATCH = 4, 32
_STEPS = 5  # of an epoch that a batch should leave at least

WARMUP_STEPS = 4  # of an open-ended fit
TRIES = 3  # of an open-ended fit whose rate is chosen here
EPOCHS = 5  # of a fit that is not open-ended: a baseline's

_MOST_PASSES, _LEAST_PASSES = 60, 5
_MOST_STEPS = 600
_ONE_PASS = 200  # steps of a retain vector; more of them only where a single pass takes more


def auto_batch(rows: int) -> int:
    """Return the rows of one step: the largest power of two from 4 to 32 that leaves five steps an epoch, or 4."""
    sizes = [size for size in (32, 16, 8) if math.ceil(rows / size) >= _STEPS]
    return sizes[0] if sizes else LEAST_BATCH


def most_epochs(rows: int, batch: int, retain: bool = False) -> int:
    """Return the epochs after which an open-ended fit ends in any case.

    60 passes, or as many as 600 steps make, but five at least. Of a retain set as many as 200 steps make, but one at
    least: where there are many rows to keep, to have seen each once is enough.
    """
    steps = math.ceil(rows / batch)
    if retain:
        return max(1, min(_MOST_PASSES, _ONE_PASS // steps))
    return max(_LEAST_PASSES, min(_MOST_PASSES, _MOST_STEPS // steps))


def auto_rate(mode: Literal["lora", "qlora", "full"], weights: int) -> float:
    """Return the rate for a model of so many weights: 1e-4 · (1.8M / weights)^¼, for adapters ten times that."""
    rate = 1e-4 * (1.8e6 / weights) ** 0.25 * (1 if mode == "full" else 10)
    return float(f"{rate:.1e}")
