"""Find branches by a number: `tokens=3859B` and `step=928646` are the branch whose name has it.

Models that publish their training keep each checkpoint on a branch whose name says how far training had come:
`stage1-step928646-tokens3896B` (OLMo 2), `step143000` (Pythia).
"""

from __future__ import annotations

from collections.abc import Iterable

from msa_lite.counts import named_progress, parse_count

_UNITS = {"tokens": "tokens", "step": "steps"}
_SHOWN = 8  # branches that an error names


def is_number(revision: str) -> bool:
    """Check whether a revision is a number of tokens or steps."""
    unit, equals, _ = revision.partition("=")
    return bool(equals) and unit in _UNITS


def find_branch(branches: Iterable[str], revision: str) -> str:
    """Return the one branch whose name has the number of `revision` (`tokens=3859B`, `step=928646`).

    Later stages of a training count from their own start (OLMo 2), so their branches do not match. Raise ValueError
    with the branches that have the number, or the nearest below and above.
    """
    unit, _, text = revision.partition("=")
    count = parse_count(text)
    places = {branch: named_progress(branch) for branch in branches}
    numbers = {branch: number for branch, at in places.items() if (number := getattr(at, unit)) is not None}
    matches = sorted(branch for branch, number in numbers.items() if number == count)
    from_start = [branch for branch in matches if places[branch].stage == 1]
    if len(from_start) == 1:
        return from_start[0]
    if len(matches) > 1:
        more = f", … ({len(matches)} in all)" if len(matches) > _SHOWN else ""
        names = ", ".join(matches[:_SHOWN])
        raise ValueError(f"several branches have this number; name the one you mean: {names}{more}")
    if matches:
        raise ValueError(f"only {matches[0]} has this number, from the start of its stage; if you mean it, name it")
    others = sorted((number, branch) for branch, number in numbers.items() if places[branch].stage == 1)
    if not others:
        raise ValueError(f"no branch has a number of {_UNITS[unit]} in its name")
    below = [branch for number, branch in others if number < count][-1:]
    above = [branch for number, branch in others if number > count][:1]
    verb = "are" if below and above else "is"
    raise ValueError(f"no branch has this number; the nearest {verb} {' and '.join([*below, *above])}")
