"""Keep the retain rows that a vector learns apart from those that are scored, as far as there are enough."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from msa_lite.choose.division import FEWEST
from msa_lite.data import Row, sample_rows
from msa_lite.recipe import Recipe


class RetainRows(NamedTuple):
    """The rows of a retain set by their use."""

    whole: list[Row]
    """Those that baselines learn, and MSA's vector without a sample."""
    sample: list[Row]
    """Those that MSA's vector learns."""
    scored: list[Row]
    """Those that may be scored, where the recipe names no others."""


def divide_retain(recipe: Recipe, rows: Mapping[str, list[Row]]) -> RetainRows:
    """Divide the retain set by use. Rows that are learnt are kept much better than others, and mislead a choice.

    rows: all rows by their place in the recipe; "retain" and "forget" are needed. Rows that `evaluate.retain` names are
    not learnt, if there are as many others as forget rows. Of a set that is sampled, the rows that the sample leaves
    may be scored; all rows, if it leaves fewer than `FEWEST`. Without a sample all may be.
    """
    retain, count = rows["retain"], len(rows["forget"])
    assert recipe.retain is not None
    apart = _without(retain, rows.get("evaluate.retain", ()))
    whole = apart if len(apart) >= count else retain
    if recipe.retain.data.sample is None:
        return RetainRows(whole, whole, retain)
    sample = sample_rows(whole, count, recipe.seed)
    left = _without(retain, sample)
    return RetainRows(whole, sample, left if len({row.thread for row in left}) >= FEWEST else retain)


def _without(rows: Iterable[Row], others: Iterable[Row]) -> list[Row]:
    threads = {row.thread for row in others}
    return [row for row in rows if row.thread not in threads]
