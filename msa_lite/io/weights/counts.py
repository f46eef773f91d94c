"""Read and write numbers of tokens and steps, as people and the names of checkpoints write them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

_SCALES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_MOST = 10**18
_COUNT = re.compile(r"(\d+(?:\.\d+)?(?:e\+?\d{1,2})?)([kmbt]?)", re.IGNORECASE)
_NAMED = re.compile(r"(?<![a-z0-9])(tokens|step|stage)[=-]?(\d+(?:\.\d+)?[kmbt]?)(?![a-z0-9.])", re.IGNORECASE)


@dataclass(frozen=True)
class TrainingProgress:
    """A checkpoint's place in training, as its name gives it. None: the name does not say."""

    tokens: int | None = None
    """Counted from the start of the stage."""
    step: int | None = None
    """Counted from the start of the stage."""
    stage: int = 1


def parse_count(value: object) -> int:
    """Read a whole number ≥ 0: a number, or a text such as 3859B, 1.5T, 20M, 500k. Raise ValueError for others."""
    match = _COUNT.fullmatch(str(value).strip()) if isinstance(value, int | float | str) and value is not True else None
    count = Decimal(match[1]) * _SCALES[match[2].lower()] if match else None
    if count is not None and count > _MOST:
        raise ValueError("that is more than any training has")
    if count is None or count != int(count):
        raise ValueError("a whole number is wanted, or a text such as 3859B, 1.5T, 20M or 500k")
    return int(count)


def format_count(count: int) -> str:
    """Write a count with the largest of k, M, B and T that leaves a whole number: 3859B, 20M, 1234."""
    letters = [letter for letter, scale in _SCALES.items() if count % scale == 0] if count else [""]
    return f"{count // _SCALES[letters[-1]]}{letters[-1].upper().replace('K', 'k')}"


def named_progress(name: str) -> TrainingProgress:
    """Read tokens, step and stage from the revision of `repo@revision`, or from the last part of a path.

    Names look like stage1-step928646-tokens3896B (OLMo) or step1000 (Pythia); `tokens=3859B` and `step=1000` work, too.
    """
    text = name.partition("@")[2] or name.rstrip("/").rpartition("/")[2]
    counts: dict[str, int] = {}
    for key, number in _NAMED.findall(text):
        try:
            counts.setdefault(key.lower(), parse_count(number))
        except ValueError:  # tokens2.5: part of a name, but no count
            continue
    return TrainingProgress(**counts)
