"""Match names of modules with patterns as PEFT does with rank_pattern and alpha_pattern: the first that fits the end.

Patterns are regular expressions of strangers, and Python's own engine may try exponentially many ways to match one. So
Python only reads them; `_sequence` follows all ways at once, in a number of steps that is counted and limited. Most
patterns are names, and need no engine.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial, reduce
from re import _compiler, _parser  # type: ignore[attr-defined]
from re import _constants as signs  # type: ignore[attr-defined]
from typing import Any

from msa_lite.errors import FormatError, clip

_ENDING = r"(.*\.)?({})$"  # how PEFT uses a pattern
_NAME = re.compile(r"(?:[\w-]|\\[^\w\s])*", re.ASCII)
_DOTTED = re.compile(r"(?:[\w.-]|\\[^\w\s])*", re.ASCII)  # a name with its dots not escaped, each for any character
_LONGEST, _MOST_GROUPS = 1000, 100  # characters of a pattern, and its opening brackets
_MOST = 1000  # regular expressions in a config
_EFFORT = 10**10  # steps, of about a nanosecond
_PART, _COMPARISON = 300, 100  # steps of following one part of an expression; of comparing one character
_ANY = "\0"


class Patterns:
    """Values by pattern. `faults` lists the patterns that cannot be used; `first` needs that there are none."""

    def __init__(self, values: Mapping[str, Any] | None) -> None:
        self._values = list((values or {}).values())
        self._names: dict[str, int] = {}
        # By length, by the places of dots that are not escaped, by the text with `_ANY` at these places.
        self._dotted: dict[int, dict[tuple[int, ...], dict[str, int]]] = {}
        self._expressions: list[tuple[int, _Step]] = []
        self._effort = _EFFORT
        self.faults: list[str] = []
        for number, pattern in enumerate(values or {}):
            if _NAME.fullmatch(pattern):
                self._names.setdefault(re.sub(r"\\(.)", r"\1", pattern), number)
            elif _DOTTED.fullmatch(pattern):
                text = re.sub(r"\\(.)|\.", lambda mark: mark[1] or _ANY, pattern)
                places = tuple(place for place, character in enumerate(text) if character == _ANY)
                self._dotted.setdefault(len(text), {}).setdefault(places, {}).setdefault(text, number)
            elif len(self._expressions) + len(self.faults) < _MOST:
                self._add(number, pattern)
            else:
                self.faults.append(f"more than {_MOST} regular expressions; escape the dots of plain names")
                break

    def _add(self, number: int, pattern: str) -> None:
        """Add a regular expression, or its fault."""
        try:
            self._expressions.append((number, _compile(pattern)))
        except ValueError as error:
            self.faults.append(f"{clip(pattern, 80)!r} is no regular expression that can be matched ({error})")

    def first(self, names: Iterable[str], default: Any) -> Any:
        """Return the value of the first pattern that fits one of the names, else the default.

        Raise FormatError when patterns and names are too many or too long for each other.
        """
        fitting = [number for name in dict.fromkeys(names) for number in self._fitting(name)]
        return self._values[min(fitting)] if fitting else default

    def _fitting(self, name: str) -> Iterator[int]:
        """Yield the numbers of patterns that fit a name, the first one among them."""
        if not self._values:
            return
        for ending in endings(name):
            if ending in self._names:
                yield self._names[ending]
            for places, texts in self._dotted.get(len(ending), {}).items():
                self._spend(_COMPARISON * len(ending), name)
                characters = list(ending)
                for place in places:
                    characters[place] = _ANY
                if (text := "".join(characters)) in texts:
                    yield texts[text]
        for number, expression in self._expressions:
            if expression(name, 1, self._spend):
                yield number
                break

    def _spend(self, steps: int, name: str) -> None:
        """Count steps. Raise FormatError when there are too many."""
        self._effort -= steps
        if self._effort < 0:
            raise FormatError(f"{name}: too many patterns for so many modules; write out names, dots escaped")


def endings(name: str) -> Iterator[str]:
    """Yield a name, then its rest after each of its dots."""
    yield name
    while "." in name:
        name = name.partition(".")[2]
        yield name


# From the places of a name at which a part of an expression may begin, those at which it can end. A set of places is a
# whole number with one bit a place. The last argument counts the effort.
_Step = Callable[[str, int, Callable[[int, str], None]], int]


def _compile(pattern: str) -> _Step:
    """Return the step of a pattern. Raise ValueError if it is none, or cannot be followed."""
    if len(pattern) > _LONGEST or pattern.count("(") > _MOST_GROUPS:
        raise ValueError(f"it has {len(pattern)} characters and {pattern.count('(')} opening brackets")
    try:
        return _sequence(_parser.parse(_ENDING.format(pattern)))
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _sequence(tree: Any) -> _Step:
    """Return the step of parts one after another, as Python's parser gives them."""
    steps = [_step(tree.state, sign, value) for sign, value in tree]

    def follow(name: str, starts: int, spend: Callable[[int, str], None]) -> int:
        for step in steps:
            if not starts:
                break
            spend(_PART + len(name), name)
            starts = step(name, starts, spend)
        return starts

    return follow


def _step(state: Any, sign: Any, value: Any) -> _Step:
    """Return the step of one part. Raise ValueError for look-around, references and flags."""
    match sign:
        case signs.LITERAL | signs.NOT_LITERAL | signs.ANY | signs.IN | signs.AT:
            part, width = _compiler.compile(_parser.SubPattern(state, [(sign, value)])), sign != signs.AT
            return lambda name, starts, _: (starts & _places(part, name)) << width
        case signs.BRANCH:
            steps = [_sequence(tree) for tree in value[1]]
            return lambda *now: reduce(operator.or_, (step(*now) for step in steps))
        case signs.MAX_REPEAT | signs.MIN_REPEAT:
            least, most, part = value
            return partial(_repeat, least, most, _sequence(part))
        case signs.SUBPATTERN if not (value[1] or value[2]):
            return _sequence(value[3])
    raise ValueError(f"{str(sign).lower().replace('_', ' ')} is not supported here")


def _repeat(least: int, most: int, step: _Step, name: str, starts: int, spend: Callable[[int, str], None]) -> int:
    """Return where a repeated part can end. After as many rounds as the name has places, none is new."""
    for _ in range(min(least, len(name) + 1)):
        starts = step(name, starts, spend)
    reached = fresh = starts
    for _ in range(min(most - least, len(name) + 1)):
        if not fresh:
            break
        fresh = step(name, fresh, spend) & ~reached
        reached |= fresh
    return reached


@lru_cache(10_000)
def _places(part: re.Pattern[str], name: str) -> int:
    """Return where a part of one character, or a mark without width, fits a name."""
    return sum(1 << found.start() for found in part.finditer(name))
