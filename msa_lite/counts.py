"""How far training had come: numbers of tokens and steps, as people and the names of checkpoints write them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

_SCALES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_MOST = 10**18
_COUNT = re.compile(r"(\d+(?:\.\d+)?(?:e\+?\d{1,2})?)([kmbt]?)", re.IGNORECASE)
_SAID = re.compile(r"(?<![a-z0-9])(tokens|step|stage)[=-]?(\d+(?:\.\d+)?[kmbt]?)(?![a-z0-9.])", re.IGNORECASE)


@dataclass(frozen=True)
class TrainingProgress:
    """What a checkpoint's name says of its place in training; None is what it does not say.

    stage: training is in stages, and `tokens` and `step` count from the start of this one.
    """

    tokens: int | None = None
    step: int | None = None
    stage: int = 1


def parse_count(value: object) -> int:
    """A whole number ≥ 0, from a number or from a text such as 3859B, 1.5T, 20M, 500k. Raises ValueError for others."""
    match = _COUNT.fullmatch(str(value).strip()) if isinstance(value, int | float | str) and value is not True else None
    count = Decimal(match[1]) * _SCALES[match[2].lower()] if match else None
    if count is not None and count > _MOST:
        raise ValueError("that is more than any training has")
    if count is None or count != int(count):
        raise ValueError("a whole number is wanted, or a text such as 3859B, 1.5T, 20M or 500k")
    return int(count)


def format_count(count: int) -> str:
    """A count with the largest of k, M, B and T that leaves a whole number: 3859B, 20M, 1234."""
    letters = [letter for letter, scale in _SCALES.items() if count % scale == 0] if count else [""]
    return f"{count // _SCALES[letters[-1]]}{letters[-1].upper().replace('K', 'k')}"


def named_progress(name: str) -> TrainingProgress:
    """What `repo@revision`, or the last part of a path, says: stage1-step928646-tokens3896B (OLMo), step1000 (Pythia).

    `tokens=3859B` and `step=1000` are read in the same way.
    """
    text = name.partition("@")[2] or name.rstrip("/").rpartition("/")[2]
    said: dict[str, int] = {}
    for key, number in _SAID.findall(text):
        try:
            said.setdefault(key.lower(), parse_count(number))
        except ValueError:  # tokens2.5: part of a name, but no count
            continue
    return TrainingProgress(**said)
