"""One full fit over several processes, for priors that one GPU cannot tune.

It takes the same steps as a fit in one process (`run_fit`): the same rows in the same order, the mean loss over all
labels of a step, gradients clipped to norm 1 over all weights, the same AdamW and the same rates. So the vector is the
same up to rounding, and its folder is taken for the same. Only the first process writes files, except for the saves.
docs/how-to/memory.md tells why it does not use accelerate's FSDP2.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from msa_lite.errors import NotFiniteError, StageError, UsageError
from msa_lite.io.console.libraries import require
from msa_lite.io.console.progress import Progress, silent, tell
from msa_lite.io.finished.manifest import is_finished, stage_folder
from msa_lite.io.models.devices import avoid_fragments, free_memory, is_out_of_memory
from msa_lite.io.models.heads import choose_precision
from msa_lite.train.fit.loop import LOG, SAVE_SECONDS, SAVES, Loop, VectorFit, cut_log, drop_saves, epoch_folder
from msa_lite.train.fit.tracking import Reporter
from msa_lite.train.fit.until import OpenFit, Until
from msa_lite.train.memory.model import save_model
from msa_lite.train.memory.rungs import CPU_TOKENS, longest_first
from msa_lite.train.objectives.rows import count_labels
from msa_lite.train.processes.peers import Peers, told_of_losses
from msa_lite.train.processes.shards import (
    MOMENTS,
    ShardedDivision,
    find_broken,
    gather_model,
    load_shards,
    newest_save,
    read_save,
    run_lent,
    write_save,
)
from msa_lite.train.settings import FitSettings

logger = logging.getLogger(__name__)


def fit_sharded(fit: VectorFit, out: str | Path, progress: Progress = silent) -> Path:
    """Tune all weights of the prior on the examples by the processes of torch.distributed; write the vector's folder.

    All processes call this alike, with torch.distributed initialised (nccl for GPUs, else gloo). The folder, its
    manifest and its log are those of `run_fit`. A stopped fit goes on after its last save, with any number of
    processes. The host of the first process needs 4 bytes of memory a weight. What happens after an epoch happens in
    the first process, to which the others lend their shards.

    Raise UsageError for settings that several processes cannot take, MismatchError where the processes have different
    inputs, StageError when another process dies, NotFiniteError when the loss is no longer finite.
    """
    require("train")
    avoid_fragments()
    with told_of_losses(fit.label):
        peers = Peers.join()
        check_sharded(fit.settings, peers.count)
        out, inputs, facts = Path(out), fit.inputs(), fit.facts()
        peers.check_same({**inputs, "out": str(out), "files": fit.extra_files})
        if peers.in_first(lambda: is_finished(out, inputs)):
            logger.info("%s: already made from the same inputs", out)
            peers.leave()
            return out
        with ExitStack() as stack:
            folder = peers.in_first(
                lambda: stack.enter_context(stage_folder(out, "vector", inputs, facts, resumable=True))
            )
            loop = Loop(fit, folder, progress)
            try:
                run = _run_until(loop, fit.until, peers) if fit.until else {"micro_batch_size": _fit(loop, peers)}
            finally:
                loop.objective.release()
                free_memory()
            facts |= run
            if peers.first:
                fit.write_files(folder)
            peers.in_first(stack.close)
        peers.leave()
    return out


def check_sharded(settings: FitSettings, count: int) -> None:
    """Raise UsageError with all settings that a fit over so many processes cannot have."""
    faults = [fault] if (fault := check_batch(settings.batch_size, count)) else []
    if settings.mode != "full":
        faults.append(f"vector.mode {settings.mode}: only full fits are divided among processes")
    if settings.optimizer == "adamw_8bit":
        faults.append("vector.optimizer adamw_8bit: states of 8 bits cannot be divided; use adamw")
    if choose_precision(settings.compute) == "fp16":
        faults.append("these GPUs have no bf16; use compute: fp32")
    micro = settings.micro_batch_size
    if micro != "auto" and settings.batch_size % micro:
        faults.append(f"micro_batch_size {micro} does not divide batch_size {settings.batch_size}")
    if faults:
        raise UsageError("\n".join(faults))


def _run_until(loop: Loop, until: Until, peers: Peers) -> dict[str, Any]:
    """Train until enough is learnt, perhaps several times at different rates; return facts for the manifest.

    The first process alone has the `OpenFit`, and decides on the attempts.
    """
    opened: list[OpenFit] = []  # in the first process alone
    peers.in_first(lambda: opened.append(loop.open(until)))
    while (attempt := peers.in_first(lambda: opened[0].next_attempt())) is not None:
        error: NotFiniteError | None = None
        try:
            _fit(loop.attempt(*attempt, opened[0] if opened else None), peers, is_open_ended=True)
        except NotFiniteError as fault:
            error = fault
        peers.in_first(lambda error=error: opened[0].end_attempt(error))  # type: ignore[misc]
    return peers.in_first(lambda: opened[0].finish())


def _fit(loop: Loop, peers: Peers, is_open_ended: bool = False) -> int:
    """Train, from the last whole save where there is one, and write the weights; return the micro-batch.

    Of an open-ended fit, the first process measures and decides; the others have no `Loop.open_fit`.
    """
    settings, saves, saved_at = loop.fit.settings, loop.partial / SAVES, time.monotonic()

    def measure(epoch: int, step: int) -> tuple[bool, bool]:
        assert loop.open_fit is not None
        goes_on = loop.open_fit.after_epoch(model, epoch, step)
        return goes_on, goes_on and time.monotonic() - saved_at > SAVE_SECONDS

    def begin() -> None:
        assert loop.open_fit is not None
        loop.open_fit.begin(model, epoch, step, micro)

    save, epoch, step = peers.in_first(lambda: _take_up(loop))
    model = load_shards(loop.fit.prior, settings, peers)
    optimizer = _make_optimizer(model, settings, peers)
    loop.objective.prepare(model, ShardedDivision(source=loop.fit.prior, peers=peers))
    model.reset_iter_state()  # passes that were tried may have failed
    model.reshard()
    micro = choose_micro(loop, model, peers)
    steps = _Steps(loop, model, optimizer, _make_schedule(loop, optimizer), peers, micro)
    if save:
        read_save(save, model, optimizer, peers)
    if is_open_ended:
        run_lent(model, peers, begin)
    goes_on = not (save and loop.fit.after_epoch) or _finish_epoch(loop, model, epoch, peers, write=False)
    with loop.fit.tracking.lines(loop.fit.label) as report:  # it begins with the first line: in the first process
        while goes_on and epoch < settings.epochs:
            try:
                step = steps.run_epoch(epoch, step, report)
                epoch, is_due = epoch + 1, True
                if is_open_ended:
                    goes_on, is_due = run_lent(model, peers, partial(measure, epoch, step))
                    saved_at = time.monotonic() if is_due else saved_at
                elif loop.fit.after_epoch is not None:
                    goes_on = _finish_epoch(loop, model, epoch, peers)
            except NotFiniteError as error:
                if loop.fit.after_epoch is None:
                    raise
                _end_early(loop, error, peers)
                break
            if is_due:
                write_save(saves, model, optimizer, epoch, step, peers)
    if peers.first:
        loop.progress(loop.fit.label, step, step)
    if loop.fit.after_epoch is None:
        if name := find_broken(model, peers):
            raise loop.failure(f"{name} is no number after training")
        _write_model(loop, model, loop.partial, peers)
    if peers.first:
        drop_saves(saves)
    peers.from_first()  # the others go on when all is written
    return micro


def _finish_epoch(loop: Loop, model: Any, epoch: int, peers: Peers, write: bool = True) -> bool:
    """Decide on an epoch as `Loop.finish_epoch` does; return whether the fit goes on."""
    if write and (name := find_broken(model, peers)):
        raise NotFiniteError(f"{name} is no number after epoch {epoch}")
    if write:
        _write_model(loop, model, epoch_folder(loop.partial, epoch), peers)
    training = model.training
    model.eval()
    choice = run_lent(model, peers, lambda: loop.choose_epochs(model, epoch))
    model.train(training)
    peers.in_first(lambda: loop.keep_epochs(choice.epochs))
    return choice.go_on


def _end_early(loop: Loop, error: NotFiniteError, peers: Peers) -> None:
    """Keep the epochs before a fault. Raise the error of a fit that has none to keep."""
    if not peers.in_first(lambda: [path.name for path in loop.partial.glob("epoch-*")]):
        raise loop.failure(str(error)) from error
    if peers.first:
        logger.warning("%s: %s; earlier epochs are kept", loop.fit.label, error)


def _write_model(loop: Loop, model: Any, folder: Path, peers: Peers) -> None:
    """Write the whole model into a folder, from the first process."""
    whole = gather_model(model, loop.fit.prior, peers)
    if whole is not None:
        save_model(whole, loop.fit.prior, folder, loop.fit.tokenizer, loop.fit.settings)


def _take_up(loop: Loop) -> tuple[Path | None, int, int]:
    """Return the save to go on from, its epoch and step; remove what a stopped fit left that is of no use."""
    folder = loop.partial
    save, epoch, step = newest_save(folder / SAVES)
    loop.keep_epochs(range(epoch + 1))  # others were written after the save, perhaps half
    if save is None:
        drop_saves(folder / SAVES)
    cut_log(folder / LOG, step)
    return save, epoch, step


def _make_optimizer(model: Any, settings: FitSettings, peers: Peers) -> Any:
    """Return the Trainer's AdamW: weights decay, but biases and norms do not."""
    import torch
    from transformers import Trainer

    decaying = set(Trainer.get_decay_parameter_names(None, model))
    weights = [(name in decaying, parameter) for name, parameter in model.named_parameters()]
    groups = [
        {"params": [p for decays, p in weights if decays], "weight_decay": settings.weight_decay},
        {"params": [p for decays, p in weights if not decays], "weight_decay": 0.0},
    ]
    fused = peers.device.type == "cuda"
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, fused=fused)
    for parameter in model.parameters():  # now, so that a probe of the memory has them in it
        moments = {name: torch.zeros_like(parameter) for name in MOMENTS}
        optimizer.state[parameter] = {"step": torch.tensor(0.0, device=peers.device if fused else "cpu"), **moments}
    return optimizer


def _make_schedule(loop: Loop, optimizer: Any) -> Callable[[int], float]:
    """Return the Trainer's schedule, as the part of the learning rate that each step has."""
    from transformers import get_scheduler

    settings = loop.fit.settings
    warmup = settings.count_warmup(loop.steps_per_epoch)
    return get_scheduler(settings.scheduler, optimizer, warmup, loop.most_steps).lr_lambdas[0]


@dataclass
class _Steps:
    """The optimiser steps of a fit."""

    loop: Loop
    model: Any
    optimizer: Any
    factor: Callable[[int], float]
    """The part of the learning rate that a step has."""
    peers: Peers
    micro: int
    """Rows of one forward pass."""

    def run_epoch(self, epoch: int, step: int, report: Reporter) -> int:
        """Run the steps of an epoch, counted from 0, after `step` earlier ones; return the number of steps by then."""
        import torch

        loop, peers, size = self.loop, self.peers, self.loop.fit.settings.batch_size
        torch.manual_seed(loop.fit.settings.seed + 1009 * epoch + peers.rank)  # of dropout; so a resumed fit repeats it
        order = epoch_order(len(loop.fit.examples), loop.fit.settings.seed, epoch)
        self.model.train()
        for start in range(0, len(order), size):
            values = self._step(order[start : start + size], epoch, step)
            step += 1
            line = {"step": step, "epoch": epoch + (start // size + 1) / loop.steps_per_epoch} | values
            if not all(math.isfinite(values[key]) for key in ("loss", "grad_norm")):
                fault = f"the loss is {values['loss']} (gradient norm {values['grad_norm']}) at step {step}"
                raise loop.failure(fault) if loop.fit.after_epoch is None else NotFiniteError(fault)
            if peers.first:
                loop.log(line, report)
                tell(loop.progress, loop.fit.label, step, loop.most_steps, f"loss {values['loss']:.3g}")
        return step

    def _step(self, rows: Sequence[int], epoch: int, step: int) -> dict[str, float]:
        """Take one step on these rows; return its loss, norm and rate."""
        import torch

        peers, model = self.peers, self.model
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(step)

        def backward(loss: Any) -> None:
            (loss * peers.count).backward()  # FSDP takes the mean of the processes' gradients

        loss = peers.sum(self.loop.objective.step(model, rows, epoch, self.micro, backward))
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of weights in shards: a DTensor
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": float(loss), "grad_norm": float(norm.full_tensor()), "learning_rate": self._rate(step)}

    def _rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return self.loop.fit.settings.learning_rate * self.factor(step)


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
    share, fixed = loop.fit.settings.batch_size // peers.count, loop.fit.settings.micro_batch_size
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
        logger.info("%s: %d rows at a time do not fit into GPU memory", loop.fit.label, size)
    raise StageError(
        f"{loop.fit.label}: out of memory, even with one row at a time on each of {peers.count} GPUs; try more of "
        "them, or a smaller max_length"
    )


def _fits(loop: Loop, model: Any, micro: int, peers: Peers) -> bool:
    """Run the longest rows once, forward and backward; return whether all processes had enough memory for it.

    Raise StageError where only some of them had: they wait for the others in the midst of a pass, and cannot go on.
    """
    longest = [row for row in longest_first(loop.fit.examples) if count_labels(loop.fit.examples[row])][:micro]
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
            f"{loop.fit.label}: process {' and '.join(full)} ran out of memory with {micro} rows at a time, the others "
            "did not. Close other programs that use its GPU, or set vector.micro_batch_size to less"
        )
    if not is_enough:
        model.reset_iter_state()
        model.reshard()
    model.zero_grad()
    free_memory()
    return is_enough
