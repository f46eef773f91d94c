"""The areas of the fuzzer: a strategy of cases each, its share of all cases, and the modules that it needs."""

from __future__ import annotations

import importlib
from typing import Any

from tests.tools.fuzz import handed_on, merges, moments, runs, texts, web

AREAS: dict[str, Any] = merges.MERGES | texts.TEXTUAL | moments.MOMENTS | handed_on.HANDED_ON | runs.RUNS | web.WEB
WEIGHTS = {
    "merge": 10, "merge --as adapter": 4, "recipe": 5, "mergekit": 2, "moments": 4, "handed on": 8, "run folder": 5,
    "web": 4,
}  # fmt: skip
_LIGHT = ("cli.merge", "cli.recipes", "cli.handing_on", "merger", "merger.mergekit.reader", "recipe")
_HEAVY = ("torch", "transformers", "peft", "datasets", "accelerate", "transformers.trainer")


def preload(name: str) -> None:
    """Import what the commands of an area need, once, for all the processes that are forked."""
    is_heavy = name in ("run", "run folder", "handed on")
    ours = (*_LIGHT, *(("evals", "pipeline") if is_heavy else ()))
    for module in (*(_HEAVY if is_heavy else ()), *(f"msa_lite.{room}" for room in ours)):
        importlib.import_module(module)
