"""Processes that fit one vector together, over gloo on this machine."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import tests.forks  # noqa: F401  # its server has loaded torch and transformers

_LIMIT = 120.0  # seconds after which a process is taken for one that hangs
_context = multiprocessing.get_context("forkserver")


class Outcome(NamedTuple):
    """How one of the processes ended."""

    error: str
    """The name of the class of its error; empty where it had none, "killed" where it was."""
    value: Any
    """What the task returned, or the error's message."""


def run_together(task: Callable[..., Any], *arguments: Any, count: int = 2) -> list[Outcome]:
    """Run task(rank, *arguments) in `count` processes of one torch.distributed group; return how each ended."""
    answers = _context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        processes = [
            _context.Process(target=_work, args=(task, rank, count, meeting, answers, arguments))
            for rank in range(count)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(_LIMIT)
        hangs = [process for process in processes if process.is_alive()]
        for process in hangs:
            process.kill()
    assert not hangs, "a process did not end"
    ended = {}
    while not answers.empty():
        rank, outcome = answers.get()
        ended[rank] = outcome
    return [ended.get(rank, Outcome("killed", None)) for rank in range(count)]


def _work(task: Callable[..., Any], rank: int, count: int, meeting: str, answers: Any, arguments: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=count)
    try:
        outcome = Outcome("", task(rank, *arguments))
    except Exception as error:
        outcome = Outcome(type(error).__name__, str(error))
    answers.put((rank, outcome))
    answers.close()
    answers.join_thread()
    if not outcome.error:
        dist.barrier()
