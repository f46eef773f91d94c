"""The areas of the fuzzer: a strategy of cases each, its share of all cases, and the modules that it needs."""

from __future__ import annotations

import importlib
from typing import Any

from tests.tools.fuzz import folders, handed_on, merges, moments, runs, texts, web

AREAS: dict[str, Any] = {
    **merges.MERGES,
    **texts.TEXTUAL,
    **folders.VERIFY,
    **moments.MOMENTS,
    **handed_on.HANDED_ON,
    **runs.RUNS,
    **web.WEB,
}
WEIGHTS = {
    "merge": 10,
    "merge --as adapter": 4,
    "recipe": 5,
    "mergekit": 2,
    "verify": 4,
    "moments": 4,
    "handed on": 4,
    "run folder": 5,
    "web": 4,
}
_LIGHT = (
    "msa_lite.cli.merge",
    "msa_lite.cli.recipes",
    "msa_lite.cli.handing_on",
    "msa_lite.merger",
    "msa_lite.merger.mergekit.reader",
    "msa_lite.recipe",
)
_HEAVY = (
    "torch",
    "transformers",
    "peft",
    "datasets",
    "accelerate",
    "transformers.trainer",
    "msa_lite.evals",
    "msa_lite.pipeline",
)


def preload(name: str) -> None:
    """Import what the commands of an area need, once, for all the processes that are forked."""
    for module in (*_LIGHT, *(_HEAVY if name in ("run", "run folder", "handed on") else ())):
        importlib.import_module(module)
