"""Divide retain rows into a validation part, for the choice, and a test part, for the final scores."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from msa_lite.data import Row, sample_rows, split_rows

logger = logging.getLogger(__name__)

ENOUGH = 30  # validation rows of a set
FEWEST = 12  # rows of a set that can be halved; with fewer, a division costs more than it gives
PASSAGE = 120  # words of a passage, into which long texts are cut if there are few
MOST_PASSAGES = 120  # of a set

WHOLE = "all"  # the name of a part that has all rows

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
    """Divide the retain set; all forget and holdout rows are in both parts.

    The vector is fitted to all forget rows, and the promise concerns exactly these, so all of them decide. share: the
    validation part of the retain set's questions (texts). None: `ENOUGH` rows, or half of a set that has no more than
    twice as many; a set of fewer than `FEWEST` is in both parts, whole. Long texts of a set that has few are first cut
    into passages, at most `limit` of them.
    """
    if share is None:
        rows = _as_passages(rows, limit or MOST_PASSAGES, seed)
    validation, test = dict(rows), dict(rows)
    count = len(_units(rows.get("retain", ())))
    if count and (share is not None or count >= FEWEST):
        part = share or min(ENOUGH, count // 2) / count
        validation["retain"], test["retain"] = split_rows(rows["retain"], part, seed)
        return Parts(validation, test)
    if count:
        logger.warning("%d retain rows are too few to divide: choice and final scores are on the same rows", count)
    return Parts(validation, test, (WHOLE, WHOLE))


def _units(rows: Sequence[Row]) -> list[str]:
    """Return the units to draw from: questions, conversations or texts. Rows with the same question stay together."""
    return list(dict.fromkeys(row.thread for row in rows))


def _as_passages(rows: Mapping[str, list[Row]], most: int, seed: int) -> dict[str, list[Row]]:
    """Cut texts into passages in sets that hold few of them, so that one long text is more than one row.

    Holdout texts are cut if the forget texts are, since the two are compared. most: passages of a set; of more, a
    seeded sample is taken.
    """
    cut = {
        name: bool(part) and all(row.text for row in part) and len(_units(part)) < FEWEST for name, part in rows.items()
    }
    cut["holdout"] = cut["forget"] and all(row.text for row in rows.get("holdout", ()))
    return {name: sample_rows(_passages(part), most, seed) if cut[name] else part for name, part in rows.items()}


def _passages(rows: Sequence[Row]) -> list[Row]:
    """Return the passages of texts, of about equal length, numbered through."""
    passages = []
    for row in rows:
        words = re.findall(r"\s*\S+", row.text)
        count = max(1, round(len(words) / PASSAGE))
        ends = [round(number * len(words) / count) for number in range(count + 1)]
        passages += ["".join(words[start:end]) for start, end in pairwise(ends)]
    return [Row(number, text=text) for number, text in enumerate(passages)]
