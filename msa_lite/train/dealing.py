"""Which rows several processes run in which pass, so that together they take the steps of a single one."""

from __future__ import annotations

from collections.abc import Sequence

from msa_lite.data import group_rows


def epoch_order(rows: int, seed: int, epoch: int) -> list[int]:
    """Return the order of the rows in an epoch, counted from 0, as the Trainer of a single process has it."""
    from accelerate.data_loader import SeedableRandomSampler

    sampler = SeedableRandomSampler(range(rows), data_seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)


def deal(
    rows: Sequence[int], lengths: Sequence[int], count: int, budget: int, per_pass: int = 0
) -> list[list[list[int]]]:
    """Return the passes of each process for a step's rows, equally many for all; an empty one has no row to run.

    lengths: tokens of each row of the data. budget, per_pass: as in `group_rows`. The rows go round the processes by
    length, so that all have about the same work.
    """
    by_length = sorted(rows, key=lambda row: -lengths[row])
    dealt = [by_length[rank::count] for rank in range(count)]
    passes = [
        [[own[i] for i in part] for part in group_rows([lengths[row] for row in own], budget, per_pass)]
        for own in dealt
    ]
    most = max(1, *(len(parts) for parts in passes))
    return [[*parts, *([] for _ in range(most - len(parts)))] for parts in passes]


def check_batch(batch: int, count: int) -> str | None:
    """Return what is wrong with a batch size for so many processes, or None."""
    if batch % count == 0:
        return None
    below, above = batch // count * count, -(-batch // count) * count
    sizes = " or ".join(str(size) for size in (below, above) if size)
    return f"batch_size {batch} cannot be divided among {count} processes; use {sizes}, or another number of processes"
