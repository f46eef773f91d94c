"""The rules by which comparisons and claims are answered, in code and in words.

The page of results repeats the words. What was changed in them after test rows had been scored stands in `changes.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from measures import KEEP, LEAST, MARGIN, Difference

YES, NO, PARTLY, UNCLEAR, UNKNOWN = "yes", "no", "partly", "unclear", "not enough data"
RULES = (
    "A forget distance is the mean of |model − ideal| over ROUGE-L, probability, extraction strength and accuracy on "
    "the forget set. A retain distance is the same on the retain set. The distance is the mean of the two",
    "The forget side is the mean of model − ideal on the forget set; below 0 means over-unlearning",
    "Kept is the share of the target's own retain scores that is left, as the tool's rule counts it: the mean over "
    "probability (twice), ROUGE-L and accuracy, none above 1",
    "Further: yes if the distance is larger in every seed and the 95 % interval of the difference excludes 0; no if it "
    "is smaller in every seed and the interval excludes 0; else partly if its mean is larger, and unclear if it is not",
    f"Matches: yes if the upper end of the interval of the difference is at most {MARGIN}; no if the lower end is more "
    "than that; else partly if the mean is at most that, and unclear if it is not",
    f"Keeps enough: yes if at least {KEEP:.0%} is kept in the mean and {LEAST:.0%} in every seed; partly if "
    f"{LEAST:.0%} is kept in the mean; else no",
    f"Works: the forget distance is at most half of the target's, and at least {LEAST:.0%} is kept. Yes if in every "
    "seed, partly if in some, else no",
    "A claim is answered yes if all of its parts are; no if all parts that it rests on are; unclear if none of these "
    "is even partly so; else partly. A part without runs does not count and is named",
    "Claim 1 is also answered no if a baseline is surely nearer to the ideal. Claim 7 is about the tool's default rank "
    "and rate: partly if only others match. Claim 10 compares the best points of the grid, of which more have β > 0. "
    "Claim 11 compares on the test rows that the grid was scored on, nearly all",
    "Claim 12: yes if the probe warned of each run that does not work and of no other; no if it warned of none of "
    "them. Signs are a warning; cannot tell is none. Runs with the same prior are not independent",
    "Intervals: with two seeds or more, the t-interval of the paired differences over seeds; with one seed, the "
    "bootstrap interval over its test rows, which does not tell how much another seed would differ. Such an answer is "
    "marked: one seed. The rows are of a few people, and not independent. About thirty intervals are not "
    "corrected for their number: one or two may be wrong by chance",
)


@dataclass(frozen=True)
class Part:
    """One comparison that a claim rests on."""

    label: str
    answer: str
    difference: Difference | None = None
    """The numbers; None where `text` has them."""
    text: str = ""
    core: bool = True
    """False for a condition beside the claim: alone it does not make the answer better than no."""


@dataclass(frozen=True)
class Claim:
    """A claim with its answer."""

    number: str
    text: str
    answer: str
    numbers: str
    """The answer in numbers, short."""
    experiments: tuple[str, ...]
    """The experiments that it rests on."""
    parts: tuple[Part, ...]
    complete: bool = True
    """False while some seed lacks some of the experiments."""


def further(difference: Difference) -> str:
    """Answer whether a measure is surely larger for the first method: the rule "further" of `RULES`."""
    if difference.mean is None:
        return UNKNOWN
    if difference.is_sure:
        return YES
    if difference.turned().is_sure:
        return NO
    return PARTLY if difference.mean > 0 else UNCLEAR


def matches(difference: Difference) -> str:
    """Answer whether the first method is no further from the ideal than the second, within `MARGIN`."""
    if difference.mean is None:
        return UNKNOWN
    if difference.high is not None and difference.high <= MARGIN:
        return YES
    if difference.low is not None and difference.low > MARGIN:
        return NO
    return PARTLY if difference.mean <= MARGIN else UNCLEAR


def combine(parts: Sequence[Part]) -> str:
    """Answer a claim by its parts."""
    known = [part for part in parts if part.answer != UNKNOWN]
    core = [part for part in known if part.core]
    if not core:
        return UNKNOWN
    if all(part.answer == YES for part in known):
        return YES
    answers = {part.answer for part in core}
    if answers == {NO}:
        return NO
    return UNCLEAR if answers <= {NO, UNCLEAR} else PARTLY


def mark(*differences: Difference | None) -> str:
    """Return a mark to go behind an answer that rests, or rests in part, on one seed; "" if it does not."""
    sources = {one.source for one in differences if one is not None and one.mean is not None}
    if "rows" not in sources:
        return ""
    return ", one seed" if sources == {"rows"} else ", in part one seed"
