"""Vary what no test may rest on: the weights of tiny models, the order of tests, the order in which folders are listed.

`MSA_VARY=3 pytest …` takes such a world, the third; 0, the default, varies nothing. `PYTHONHASHSEED` is beside it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import pytest

WORLD = int(os.environ.get("MSA_VARY", "0"))


def model_seed(seed: int) -> int:
    """Return the seed of a tiny model's weights in this world."""
    return seed + 1000 * WORLD


def in_other_order(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests with modules, and tests of a module, in another order; what a module has made stays in use."""
    draw = random.Random(WORLD)
    modules = [draw.sample(tests := list(group), len(tests)) for _, group in groupby(items, lambda item: item.path)]
    return [item for module in draw.sample(modules, len(modules)) for item in module]


class Listing:
    """The entries of `os.scandir` in another order."""

    def __init__(self, entries: Any, order: Callable[[list[Any]], list[Any]]) -> None:
        with entries:
            self._entries = iter(order(list(entries)))

    def __iter__(self) -> Iterator[os.DirEntry[Any]]:
        return self._entries

    def __next__(self) -> os.DirEntry[Any]:
        return next(self._entries)

    def __enter__(self) -> Listing:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def close(self) -> None:
        """Do nothing: the entries are read."""


@contextmanager
def other_listings() -> Iterator[None]:
    """List folders in another order, by os.listdir, os.scandir, and so by pathlib, glob and os.walk."""
    draw, listdir, scandir = random.Random(WORLD), os.listdir, os.scandir

    def shuffled(entries: list[Any]) -> list[Any]:
        return draw.sample(entries, len(entries))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "listdir", lambda *place: shuffled(listdir(*place)))
        patch.setattr(os, "scandir", lambda *place: Listing(scandir(*place), shuffled))
        yield
