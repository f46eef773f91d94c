"""Settings of a fit that the user left open: batch, number of passes and learning rate, by rows, model and mode.

The evidence for the rates comes from `tests/benchmarks/bench_rates.py`: a Llama of 1.8M weights, 24 rows of fictional
people to forget, a constant rate, until 95 % of the gap to the target's loss was closed; the forget vector alone:

    mode  rank  rate    steps   norm   rows recited after unlearning, forget / retain, at a few α
    full        5e-5      192    5.7   α .7: .54 / .98   α .8: .17 / .88   α 1: .00 / .70
    full        1e-4      108    6.2   α .7: .50 / .97   α .8: .25 / .86   α 1: .00 / .66
    full        3e-4       54    8.1   α .6: .33 / .95   α .8: .08 / .66   α 1: .00 / .33
    full        3e-3       42   32     nothing is left of either at α .5
    full        1e-2    never
    lora  32    3e-4      342   12.5   α .5: .67 / .97                     α 1: .00 / .16
    lora  32    5e-4      228   13.4   α .6: .33 / .78   α .7: .12 / .59   α .8: .00 / .45
    lora  32    1e-3      156   16.0   α .5: .62 / .91   α .6: .21 / .75   α .7: .04 / .48
    lora  32    2e-3      126   20.6   α .5: .29 / .80   α .6: .08 / .70   α .7: .04 / .44
    lora  32    3e-3      120   24.6   α .5: .21 / .64                     α 1: .00 / .00
    lora  32    1e-2    never
    lora  8     1e-3      324   17.5   α .6: .50 / .88   α .7: .33 / .67   α .8: .12 / .38
    lora  8     3e-3      198   23.1   α .6: .38 / .66   α .7: .04 / .42   α .8: .00 / .19
    lora  128   3e-4      156   11.6   α .6: .38 / .94   α .7: .17 / .81   α .8: .08 / .55
    lora  128   1e-3       96   17.8   α .6: .12 / .61   α .7: .00 / .41   α .8: .00 / .12

A lower rate reaches the same loss with a smaller vector, which spares more of the retain rows. It takes more steps: a
third of the rate about twice as many. Below the rates taken here the gain is small. Adapters (lora_alpha is twice the
rank here) learn equally fast where lora_alpha times the rate is equal: the first steps of all r rows of B add up, so
the change is lora_alpha / r times r times the rate. Batches of 4 and 8 differ little.

A model of 135M learns 40 rows of TOFU at 1e-4 (full) in 25 steps; the MSA paper tunes models of 1B to 8B at 1e-5
(full); adapters of such models usually have 1e-4 to 2e-4. The fourth root goes through all of these: 1.8M 1e-4, 135M
3.4e-5, 1.2B 2e-5, 8B 1.2e-5, and ten times that for adapters with a lora_alpha of 64. SmolLM2-135M-Instruct learnt 40
rows of TOFU at 3.4e-4 (lora, rank 32) in 40 steps, 97 % of the gap, and the run passed. There, neither 1e-4 nor 1e-3
came surely nearer to the ideal, nor did ranks 8 and 128 (examples/real_model, seed 0). At other sizes between 1.8M and
1B the rate is interpolated, not measured.
"""

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
    """Return the most epochs of an open-ended fit.

    That is 60, or as many as 600 steps make, but at least 5. For a retain set it is as many as 200 steps make, but at
    least 1: in a large retain set, seeing each row once is enough.
    """
    steps = math.ceil(rows / batch)
    if retain:
        return max(1, min(_MOST_PASSES, _ONE_PASS // steps))
    return max(_LEAST_PASSES, min(_MOST_PASSES, _MOST_STEPS // steps))


def auto_rate(mode: Literal["lora", "qlora", "full"], weights: int, lora_alpha: float = 64) -> float:
    """Return the learning rate for a model with this many weights, to two digits.

    1e-4 · (1.8M / weights)^¼ in full mode; for adapters ten times that, times 64 / lora_alpha.
    """
    rate = 1e-4 * (1.8e6 / weights) ** 0.25 * (1 if mode == "full" else 10 * 64 / lora_alpha)
    return float(f"{rate:.1e}")
