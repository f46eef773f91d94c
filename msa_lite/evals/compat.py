"""Resolve the names of deviations that published numbers depend on. They are off by default, and reports list them.

Without them, msa-lite does what the papers describe. Each switch says what published code does instead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from msa_lite.benchmarks import BENCHMARKS
from msa_lite.errors import UsageError, nearest
from msa_lite.evals.benchmark import benchmark_class

COMMON = {
    "mask_eq_pad": "tokens equal to the padding token are hidden wherever they stand, so that with pad = end of turn "
    "the prompt's own ends of turn are hidden too",
    "es_floor": "extraction strength of a text without a right token is 1/N, not 0",
    "drop_last_token": "extraction strength, exact memorization and Min-K leave out the last token of texts that have "
    "no end token, a token of their content",
    "second_end": "answers keep what a chat template puts behind its end token (ChatML: a newline) and get a second "
    "end token; all of that is scored",
    "trailing_blank": "plain prompts end in a blank after 'Answer:', which many tokenizers merge into the answer",
}
"""The switches of open-unlearning, whose code evaluates several benchmarks; each benchmark adds its own."""


def known_switches() -> list[str]:
    """Return the names of all switches."""
    return [*COMMON, *(switch for name in BENCHMARKS for switch in benchmark_class(name).switches)]


def known_presets() -> dict[str, Collection[str]]:
    """Return the switches of each preset: open-unlearning's, and those of each benchmark's own code."""
    presets = {name: benchmark_class(name).preset for name in BENCHMARKS}
    return {"open-unlearning": tuple(COMMON), **{name: switches for name, switches in presets.items() if switches}}


def switches_of(benchmark: str) -> set[str]:
    """Return the switches that change something in a benchmark."""
    kind = benchmark_class(benchmark)
    return {*kind.reads, *kind.switches}


def resolve_compat(names: Iterable[str], benchmark: str) -> frozenset[str]:
    """Return the switches of a benchmark that names of switches and presets stand for.

    Raise UsageError for an unknown name, and for one that changes nothing in the benchmark.
    """
    switches: set[str] = set()
    presets, choices = known_presets(), [*known_presets(), *known_switches()]
    for name in names:
        if name not in choices:
            raise UsageError(f"compat: unknown '{name}'{nearest(name, choices)}; choose from {', '.join(choices)}")
        meant = switches_of(benchmark).intersection(presets.get(name, (name,)))
        if not meant:
            raise UsageError(f"compat: '{name}' changes nothing in {benchmark}; leave it out")
        switches |= meant
    return frozenset(switches)
