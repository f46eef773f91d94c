"""The order of the rows in an epoch, and how many of them a process runs at a time."""

from __future__ import annotations

import logging
from typing import Any

from msa_lite.errors import StageError
from msa_lite.io.models.devices import free_memory, is_out_of_memory
from msa_lite.train.loop import Loop
from msa_lite.train.peers import Peers
from msa_lite.train.plain import count_labels
from msa_lite.train.rungs import CPU_TOKENS, longest_first

logger = logging.getLogger(__name__)


def epoch_order(rows: int, seed: int, epoch: int) -> list[int]:
    """Return the order of the rows in an epoch, counted from 0, as the Trainer of a single process has it."""
    from accelerate.data_loader import SeedableRandomSampler

    sampler = SeedableRandomSampler(range(rows), data_seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)


def check_batch(batch: int, count: int) -> str | None:
    """Return what is wrong with a batch size for so many processes, or None."""
    if batch % count == 0:
        return None
    below, above = batch // count * count, -(-batch // count) * count
    sizes = " or ".join(str(size) for size in (below, above) if size)
    return f"batch_size {batch} cannot be divided among {count} processes; use {sizes}, or another number of processes"


def choose_micro(loop: Loop, model: Any, peers: Peers) -> int:
    """Return the rows of a forward pass: on GPUs, as many as fit into memory when they are the longest rows.

    All processes try the same rows, so they run out of memory alike. Raise StageError where not even one row fits.
    """
    share, fixed = loop.settings.batch_size // peers.count, loop.settings.micro_batch_size
    if fixed != "auto":
        return min(fixed, share)
    on_cpu = peers.device.type == "cpu"
    limit = max(1, CPU_TOKENS // loop.objective.longest) if on_cpu else share
    sizes = [size for size in range(share, 0, -1) if share % size == 0 and size <= limit]
    if on_cpu:
        return sizes[0]
    for size in sizes:
        if _fits(loop, model, size, peers):
            return size
        logger.info("%s: %d rows at a time do not fit into GPU memory", loop.label, size)
    raise StageError(
        f"{loop.label}: out of memory, even with one row at a time on each of {peers.count} GPUs; try more of them, or "
        "a smaller max_length"
    )


def _fits(loop: Loop, model: Any, micro: int, peers: Peers) -> bool:
    """Run the longest rows once, forward and backward; return whether all processes had enough memory for it.

    Raise StageError where only some of them had: they wait for the others in the midst of a pass, and cannot go on.
    """
    longest = [row for row in longest_first(loop.examples) if count_labels(loop.examples[row])][:micro]
    rows = [row for row in longest for _ in range(peers.count)]  # each process runs all of them
    is_enough = True
    try:
        model.train()
        loop.objective.step(model, rows, 0, micro, lambda loss: loss.backward())
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        is_enough = False
    outcomes = peers.collect(is_enough)
    if any(outcomes) and not all(outcomes):
        full = [str(rank) for rank, fits in enumerate(outcomes) if not fits]
        raise StageError(
            f"{loop.label}: process {' and '.join(full)} ran out of memory with {micro} rows at a time, the others did "
            "not. Close other programs that use its GPU, or set vector.micro_batch_size to less"
        )
    if not is_enough:
        model.reset_iter_state()
        model.reshard()
    model.zero_grad()
    free_memory()
    return is_enough
