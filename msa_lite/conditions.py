"""Parse conditions on metrics, as a recipe's `select.subject_to` writes them."""

from __future__ import annotations

import math
import re

_CONDITION = re.compile(
    r"([<>]=)\s*(-?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?)(?:\s*\*\s*(target|ideal))?", re.IGNORECASE | re.ASCII
)


def parse_condition(text: str) -> tuple[bool, float, str | None]:
    """Split ">= 0.95 * target", "<= 0.4" or "<= 1.1 * ideal" into (at least, factor, model).

    at least: True for ">=", False for "<=". model: target or ideal; None where the factor itself is the bound. Raises
    ValueError for any other text.
    """
    match = _CONDITION.fullmatch(text.strip())
    if match is None or not math.isfinite(float(match[2])):
        raise ValueError("is no condition; write one as '>= 0.95 * target', '<= 0.4' or '<= 1.1 * ideal'")
    sign, factor, model = match.groups()
    return sign == ">=", float(factor), model and model.lower()
