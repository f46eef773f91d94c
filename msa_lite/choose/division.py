"""Rows divided in two: some to choose by, the others for the scores."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from msa_lite.data import Row, sample_rows, split_rows

logger = logging.getLogger(__name__)

ENOUGH = 30  # rows of a set to choose by
FEWEST = 12  # of which half is not too few to choose by; of fewer, a division costs more than it gives
PASSAGE = 120  # words of a long text that are one row, where there are few texts
MOST_PASSAGES = 120  # of a set

RowsBySet = Mapping[str, list[Row]]


@dataclass(frozen=True)
class Parts:
    """Rows by set."""

    validation: dict[str, list[Row]]
    """The rows that the choice is made on."""
    test: dict[str, list[Row]]
    """The rows of the final scores."""
    names: tuple[str, str] = ("validation", "test")
    """The names of the two parts; "all" where a part has all rows."""


def divide_rows(rows: RowsBySet, share: float | None, seed: int, limit: int | None = None) -> Parts:
    """Divide the forget and retain set, each by itself; holdout rows are in both parts, whole.

    share: of the questions (texts) of a set that the choice is made on. None: `ENOUGH`, or half of a set that has no
    more than twice as many, and a retain set of fewer than `FEWEST` is in both parts, whole. Where the forget set has
    so few, nothing is divided: the scores are on all rows, and the choice is made on all of the forget set. Long texts
    of a set that has few are cut into passages first, at most `limit` of them.
    """
    if share is None:
        rows = _as_passages(rows, limit or MOST_PASSAGES, seed)
    validation, test = dict(rows), dict(rows)
    counts = {name: len(_units(rows[name])) for name in ("forget", "retain") if name in rows}
    whole = share is None and counts["forget"] < FEWEST
    for name, count in counts.items():
        part = share or min(ENOUGH, count if whole else count // 2) / count
        if share is None and count < FEWEST:  # whole in both parts
            continue
        validation[name], rest = split_rows(rows[name], part, seed)
        test[name] = rows[name] if whole else rest
    if not whole:
        return Parts(validation, test)
    logger.warning(
        "%d forget rows are too few to divide: alpha, beta or epochs are chosen on the same rows that are scored",
        counts["forget"],
    )
    return Parts(validation, test, ("all" if validation == test else "validation", "all"))


def _units(rows: Sequence[Row]) -> list[str]:
    """Return what can be drawn: questions, conversations or texts; rows that ask the same stay together."""
    return list(dict.fromkeys(row.subject for row in rows))


def _as_passages(rows: Mapping[str, list[Row]], most: int, seed: int) -> dict[str, list[Row]]:
    """Texts cut into passages in sets that hold few of them, so that one long text is more than one row.

    Holdout texts are cut where the forget texts are, as the two are held against each other. most: of a set that is
    cut, a seeded sample of so many passages.
    """
    cut = {
        name: bool(found) and all(row.text for row in found) and len(_units(found)) < FEWEST
        for name, found in rows.items()
    }
    cut["holdout"] = cut["forget"] and all(row.text for row in rows.get("holdout", ()))
    return {name: sample_rows(_passages(found), most, seed) if cut[name] else found for name, found in rows.items()}


def _passages(rows: Sequence[Row]) -> list[Row]:
    """The passages of texts, of about equal length, numbered through."""
    passages = []
    for row in rows:
        words = re.findall(r"\s*\S+", row.text)
        count = max(1, round(len(words) / PASSAGE))
        ends = [round(number * len(words) / count) for number in range(count + 1)]
        passages += ["".join(words[start:end]) for start, end in pairwise(ends)]
    return [Row(number, text=text) for number, text in enumerate(passages)]
