"""Which rows several processes run in which step, so that together they take the steps of a single one."""

from __future__ import annotations

import math
from collections.abc import Sequence


def epoch_order(rows: int, seed: int, epoch: int) -> list[int]:
    """Return the order of the rows in an epoch, counted from 0: the one in which the Trainer of one process has them."""
    from accelerate.data_loader import SeedableRandomSampler

    sampler = SeedableRandomSampler(range(rows), data_seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)


def deal(rows: Sequence[int], lengths: Sequence[int], rank: int, count: int, micro: int) -> list[list[int]]:
    """Return the forward passes, of at most `micro` rows each, that a process runs of a step's rows.

    lengths: tokens of each row of the data. Every process has equally many passes; an empty one stands for a row without
    labels. The longest rows come first, and each goes to the next process, so that all have about the same work.
    """
    passes = math.ceil(math.ceil(len(rows) / count) / micro)
    own = sorted(rows, key=lambda row: -lengths[row])[rank::count]
    return [own[i * micro : (i + 1) * micro] for i in range(passes)]


def check_batch(batch: int, count: int) -> str | None:
    """Return what is wrong with a batch size for so many processes, or None."""
    if batch % count == 0:
        return None
    below, above = batch // count * count, -(-batch // count) * count
    sizes = " or ".join(str(size) for size in (below, above) if size)
    return f"batch_size {batch} cannot be divided among {count} processes; use {sizes}, or another number of processes"
