"""Deviations that published numbers depend on: named, off by default, and written into the report.

What msa-lite does without them is what the papers describe; each switch says what a peer's code does instead.
"""

from __future__ import annotations

from collections.abc import Iterable

from msa_lite.errors import UsageError, nearest

SWITCHES = {
    "mask_eq_pad": "tokens equal to the padding token are hidden wherever they stand, so that with pad = end of turn "
    "the prompt's own ends of turn are hidden too (open-unlearning)",
    "es_floor": "extraction strength of a text of which nothing is right is 1/N, not 0 (open-unlearning)",
    "drop_last_token": "extraction strength, exact memorization and Min-K leave out the last token of texts that have "
    "no end token, a token of their content (open-unlearning)",
    "trailing_blank": "plain prompts end in a blank after 'Answer:', which many tokenizers merge into the answer "
    "(open-unlearning, muse_bench)",
    "arithmetic_truth_ratio": "truth ratios take the arithmetic mean of the wrong answers' probabilities, not the "
    "geometric one (tofu)",
    "no_stemmer": "ROUGE-L of MUSE without stemming (muse_bench)",
    "short_reference": "VerbMem's references are cut to their first 128 tokens, as many as are generated, the "
    "beginning-of-sequence token counted (muse_bench)",
    "sampling": "RESTOR's answers are drawn with the model's own sampling settings, three times, prompt and answer of "
    "at most 200 tokens together; a resumed run draws others (restor)",
}
PRESETS = {
    "open-unlearning": ("mask_eq_pad", "es_floor", "drop_last_token", "trailing_blank"),
    "tofu": ("arithmetic_truth_ratio",),
    "muse": ("no_stemmer", "short_reference", "trailing_blank"),
    "restor": ("sampling",),
}


_PROMPTS = {"mask_eq_pad", "trailing_blank"}
READS = {  # benchmark → the switches that change something in it
    "tofu": _PROMPTS | {"es_floor", "arithmetic_truth_ratio"},
    "restor": {"mask_eq_pad", "sampling"},
    "muse": _PROMPTS | {"es_floor", "drop_last_token", "no_stemmer", "short_reference"},
}


def resolve_compat(names: Iterable[str], benchmark: str) -> frozenset[str]:
    """The switches that names of switches and presets stand for in a benchmark.

    Raises UsageError for an unknown name, and for one that changes nothing in it.
    """
    found: set[str] = set()
    reads = READS.get(benchmark, set())
    for name in names:
        if name not in SWITCHES and name not in PRESETS:
            choices = [*PRESETS, *SWITCHES]
            raise UsageError(f"compat: unknown '{name}'{nearest(name, choices)}; choose from {', '.join(choices)}")
        meant = reads.intersection(PRESETS.get(name, (name,)))
        if not meant:
            raise UsageError(f"compat: '{name}' changes nothing in {benchmark}; leave it out")
        found |= meant
    return frozenset(found)
