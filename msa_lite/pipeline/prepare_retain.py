"""Keep the retain rows that a vector learns apart from those that are scored, as far as there are enough."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from msa_lite.choose.division import FEWEST
from msa_lite.data import Row, sample_rows
from msa_lite.recipe import Recipe

logger = logging.getLogger(__name__)


def divide_retain(recipe: Recipe, rows: Mapping[str, list[Row]]) -> tuple[list[Row], list[Row]]:
    """Return the retain rows that MSA's vector learns, and those of the same set that may be scored.

    rows: all rows by their place in the recipe; "retain" and "forget" are needed. Without `retain.data.sample`, the
    vector learns all of them, and all may be scored. A sample is drawn from rows that `evaluate.retain` does not name,
    if there are enough. The rows that it leaves may be scored; all rows, if it leaves fewer than `FEWEST`. The vector's
    own rows are kept much better than others, so strengths that are chosen by them are too large.
    """
    retain = rows["retain"]
    assert recipe.retain is not None
    if recipe.retain.data.sample is None:
        return retain, retain
    count = len(rows["forget"])
    apart = _without(retain, rows.get("evaluate.retain", ()))
    learnt = sample_rows(apart if len(apart) >= count else retain, count, recipe.seed)
    left = _without(retain, learnt)
    return learnt, left if len({row.subject for row in left}) >= FEWEST else retain


def warn_of_learnt(learnt: Iterable[Row], scored: list[Row]) -> None:
    """Warn where most of the retain rows that are scored are learnt by the retain vector."""
    if len(_without(scored, learnt)) < len(scored) / 2:
        logger.warning(
            "the retain scores are on rows that the retain vector learns, and others are kept less well. For scores on "
            "others, give more rows and retain.data.sample: match_forget, or others in evaluate.retain"
        )


def _without(rows: Iterable[Row], others: Iterable[Row]) -> list[Row]:
    subjects = {row.subject for row in others}
    return [row for row in rows if row.subject not in subjects]
