"""The part of a process that follows: it prepares the same run, and does what the first process orders."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from msa_lite.io.console.progress import notices, silent
from msa_lite.io.launch.crew import Crew
from msa_lite.io.launch.gathering import PREPARE
from msa_lite.pipeline.prepare.run import Run, Scope, prepare
from msa_lite.pipeline.run.choice import CHOOSE, help_sweep
from msa_lite.pipeline.run.folder import run_inputs
from msa_lite.pipeline.run.scores import COLLECT, help_collect
from msa_lite.pipeline.run.vectors import FIT, fit_with_all
from msa_lite.recipe import Recipe


def follow_run(
    crew: Crew, recipe: Recipe, scope: Scope, more: Mapping[str, Callable[..., None]] = MappingProxyType({})
) -> None:
    """Do what the first process orders for the run of a recipe, until it has ended it.

    Followers do not repeat the first process's warnings. more: tasks that the first process does, too, by name; each
    takes the run and its arguments.
    """
    runs: list[Run] = []

    def do(task: str, arguments: Mapping[str, Any]) -> Any:
        with muted() if task in {*_ALIKE, *more} else nullcontext():
            if task != PREPARE:
                return {**_TASKS, **more}[task](runs[0], **arguments)
            runs.append(replace(prepare(recipe, scope), crew=crew))
            return run_inputs(runs[0])

    crew.follow(do)


def _fit(run: Run, name: str) -> None:
    fit_with_all(run, name, silent)


@contextmanager
def muted() -> Iterator[None]:
    """Leave out warnings and notices in the block: the first process has the same ones, and shows them."""
    logger = logging.getLogger("msa_lite")
    levels = [(each, each.level) for each in (logger, notices)]
    for each, _ in levels:
        each.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for each, level in levels:
            each.setLevel(level)


_TASKS: dict[str, Callable[..., None]] = {
    COLLECT: help_collect,
    FIT: _fit,
    CHOOSE: help_sweep,
}
_ALIKE = {PREPARE, COLLECT, FIT}  # tasks that the first process does, too, with the same warnings
