"""Each process's share of a step: which rows it runs in which pass, forward and backward."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from msa_lite.data import Example, group_rows, to_batch
from msa_lite.errors import StageError
from msa_lite.io.models.devices import free_memory, is_out_of_memory
from msa_lite.io.models.heads import Halves
from msa_lite.train.loop import Loop
from msa_lite.train.plain import count_labels, label_states, run_rows
from msa_lite.train.rungs import CPU_TOKENS
from msa_lite.train.shards import Peers

logger = logging.getLogger(__name__)


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
    passes = []
    for rank in range(count):
        hand = by_length[rank::count]
        groups = group_rows([lengths[row] for row in hand], budget, per_pass)
        passes.append([[hand[i] for i in group] for group in groups])
    most = max(1, *map(len, passes))
    return [[*hand, *([] for _ in range(most - len(hand)))] for hand in passes]


def check_batch(batch: int, count: int) -> str | None:
    """Return what is wrong with a batch size for so many processes, or None."""
    if batch % count == 0:
        return None
    below, above = batch // count * count, -(-batch // count) * count
    sizes = " or ".join(str(size) for size in (below, above) if size)
    return f"batch_size {batch} cannot be divided among {count} processes; use {sizes}, or another number of processes"


Loss = Callable[[Sequence[Example], int], Any]
"""A function loss(examples, labels): their summed −log p, divided by the labels of the whole step."""


def make_loss(model: Any, is_split: bool, pad: int) -> Loss:
    """Return the loss of rows of a model in shards.

    is_split: True where logits can be made apart from the model, of labelled positions alone and block by block.
    """
    from torch.distributed.fsdp import register_fsdp_forward_method
    from torch.nn.functional import cross_entropy

    if not is_split:
        return lambda examples, labels: (
            model(**to_batch(examples, pad, model.device), use_cache=False, num_items_in_batch=labels).loss
        )
    halves = Halves(model, model.base_model, model.get_output_embeddings())

    def loss_of_rows(examples: Sequence[Example], labels: int) -> Any:
        states = run_rows(halves, to_batch(examples, pad, model.device))
        losses = halves.map_logits(partial(cross_entropy, reduction="none"), *label_states(states, examples))
        return losses.sum() / labels

    model.loss_of_rows = loss_of_rows
    register_fsdp_forward_method(model, "loss_of_rows")  # the head's weights are gathered around it
    return model.loss_of_rows


def run_passes(loss: Loss, examples: Sequence[Example], passes: Sequence[Sequence[int]], labels: int) -> Any:
    """Run forward and backward passes of these rows; return their detached loss.

    An empty pass runs a short row and counts for nothing, since all processes have to make equally many passes.
    """
    import torch.distributed as dist

    total: Any = 0.0
    for rows in passes:
        value = loss([examples[row] for row in rows] or [_shortest(examples)], max(1, labels))
        value = value if rows else 0 * value
        (value * dist.get_world_size()).backward()  # FSDP takes the mean of the processes' gradients
        total = total + value.detach()
    return total


def _shortest(examples: Sequence[Example]) -> Example:
    """Return the shortest row that has labels."""
    return min((e for e in examples if count_labels(e)), key=lambda e: len(e.ids))


def choose_micro(loop: Loop, model: Any, loss: Loss, peers: Peers) -> int:
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
        if _fits(loop, model, loss, size, peers):
            return size
        logger.info("%s: %d rows at a time do not fit into GPU memory", loop.label, size)
    raise StageError(
        f"{loop.label}: out of memory, even with one row at a time on each of {peers.count} GPUs; try more of them, or "
        "a smaller max_length"
    )


def _fits(loop: Loop, model: Any, loss: Loss, micro: int, peers: Peers) -> bool:
    """Run the longest rows once, forward and backward; return whether all processes had enough memory for it.

    Raise StageError where only some of them had: they wait for the others in the midst of a pass, and cannot go on.
    """
    rows = [row for row, example in enumerate(loop.examples) if count_labels(example)]
    longest = sorted(rows, key=lambda row: -len(loop.examples[row].ids))[:micro]
    is_enough = True
    try:
        run_passes(loss, loop.examples, [longest], 1)
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
