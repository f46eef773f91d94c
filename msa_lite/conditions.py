"""Conditions on metrics, as a recipe's `select.subject_to` writes them."""

from __future__ import annotations

import math
import re

_CONDITION = re.compile(
    r"\s*([<>]=)\s*(-?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?)\s*(?:\*\s*(target|ideal))?\s*", re.IGNORECASE | re.ASCII
)


def parse_condition(text: str) -> tuple[bool, float, str | None]:
    """(at least, factor, of whom) of ">= 0.95 * target", "<= 0.4" or "<= 1.1 * ideal". Raises ValueError for others.

    at least: otherwise at most. of whom: target or ideal; None where the factor itself is the bound.
    """
    found = _CONDITION.fullmatch(text)
    if found is None or not math.isfinite(float(found[2])):
        raise ValueError("is no condition; write one as '>= 0.95 * target', '<= 0.4' or '<= 1.1 * ideal'")
    sign, factor, of = found.groups()
    return sign == ">=", float(factor), of and of.lower()
