"""Match names of modules with patterns as PEFT does with rank_pattern and alpha_pattern: the first that fits the end.

Patterns are regular expressions of strangers. Python's own engine may try exponentially many ways, so RE2 matches them,
in a time that grows with the name alone. Most patterns are names, and need no engine.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msa_lite.errors import FormatError, clip

_ENDING = r"(.*\.)?({})$"  # how PEFT uses a pattern
_NAME = re.compile(r"(?:[\w-]|\\[^\w\s])*", re.ASCII)
_DOTTED = re.compile(r"(?:[\w.-]|\\[^\w\s])*", re.ASCII)  # a name with its dots not escaped, each for any character
_OTHERWISE_READ = re.compile(r"\{,|\[[:.=]")  # RE2 reads them in another way than Python
_LONGEST = 1000  # characters of a pattern
_MOST = 5000  # regular expressions in a config
_EFFORT = 5 * 10**9  # steps, of about a nanosecond
_MATCH, _COMPARISON = 5000, 100  # steps of a match besides instructions × characters; of comparing one character
_ANY = "\0"


class Patterns:
    """Values by pattern. `faults` lists the patterns that cannot be used; `first` needs that there are none."""

    def __init__(self, values: Mapping[str, Any] | None) -> None:
        self._values = list((values or {}).values())
        self._names: dict[str, int] = {}
        # By length, by the places of dots that are not escaped, by the text with `_ANY` at these places.
        self._dotted: dict[int, dict[tuple[int, ...], dict[str, int]]] = {}
        self._expressions: list[tuple[int, Any]] = []
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
            if not name.isascii():
                raise FormatError(f"{name}: regular expressions are only matched with names of ASCII characters")
            self._spend(_MATCH + expression.programsize * len(name), name)
            if expression.match(name):
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


def _compile(pattern: str) -> Any:
    """Compile a pattern for RE2. Raise ValueError unless it is one to Python too, and of the same meaning."""
    import re2

    if len(pattern) > _LONGEST:
        raise ValueError(f"it has {len(pattern)} characters")
    if not (pattern.isascii() and pattern.isprintable()):
        raise ValueError("it has characters other than printable ASCII")
    if _OTHERWISE_READ.search(pattern):
        raise ValueError("write {0,n} for {,n}, and no classes of POSIX")
    options = re2.Options()
    options.log_errors = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            re.compile(_ENDING.format(pattern))
        return re2.compile(_ENDING.format(pattern), options)
    except (re.error, re2.error, OverflowError, RecursionError) as error:
        reason = error.args[0] if error.args else error
        raise ValueError(reason.decode() if isinstance(reason, bytes) else str(reason)) from error
