"""Errors that a user can cause or meet, one class for each kind, each with its exit code.

The library raises them with what is wrong, where, and what to try. Only the command line turns them into a message and
an exit status.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

_LONGEST = 4000  # characters of a fault; a value of a stranger's file may have millions


class MsaError(Exception):
    """Base of all errors of msa-lite."""

    exit_code = 4
    """The exit status of the command line."""
    keeps_partial = True
    """True where a stage that raised it leaves its partial folder for a rerun."""
    retries: Mapping[str, Sequence[str]] = {}
    """Ways out: words to add to the command line (options, or keys with values), by what they are for."""


_Error = TypeVar("_Error", bound=MsaError)
ALL_THE_SAME = "to go on all the same"


def with_retries(error: _Error, retries: Mapping[str, Sequence[str]]) -> _Error:
    """Give an error its ways out, which the command line shows as whole commands."""
    error.retries = retries
    return error


def allowed_by(error: _Error, option: str) -> _Error:
    """Give an error the option of the command line that goes on all the same."""
    return with_retries(error, {ALL_THE_SAME: [option]})


def discarded(error: MsaError) -> MsaError:
    """Mark an error after which a stage's partial folder is worth nothing and is removed."""
    error.keeps_partial = False
    return error


class UsageError(MsaError):
    """A wrong argument, an unknown name, a path that is not there."""

    exit_code = 2


class RecipeError(UsageError):
    """A recipe that does not fit the schema; the message has one line for each fault."""


class DataError(MsaError):
    """A data set that cannot be used: empty, a column missing, unreadable."""

    exit_code = 3


class ColumnsError(DataError):
    """A data set with unknown column names."""

    def __init__(self, message: str, columns: list[str] | None = None) -> None:
        super().__init__(message)
        self.columns = columns or []
        """The columns that it has."""


class FormatError(MsaError):
    """A checkpoint or adapter on disk that is broken, or of a kind that msa-lite does not read."""

    exit_code = 3


class NoTokenizerError(FormatError):
    """A model that was saved without a tokenizer."""


class MismatchError(MsaError):
    """Inputs that are each valid but do not fit each other (shapes, names, vocabularies)."""

    exit_code = 3


class OutputError(MsaError):
    """The output folder holds something else, or its disk is too small."""

    exit_code = 3


class BusyError(OutputError):
    """Another process works in the folder."""


class StageError(MsaError):
    """A stage failed during its work; finished stages stay, and a rerun resumes."""


class NotFiniteError(StageError):
    """A model's loss, weights or outputs are NaN or infinite: it was changed too much."""


def causes(error: BaseException | None, by_chance: bool = False) -> Iterator[BaseException]:
    """Yield an error and those that it was raised from on purpose; with `by_chance`, also those that it came after."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (error.__context__ if by_chance else None)


def clip(text: str, most: int) -> str:
    """Return a text, cut to `most` characters and an ellipsis where it is longer."""
    return text if len(text) <= most else f"{text[:most]}…"


def at_most(lines: Sequence[str], most: int) -> list[str]:
    """Return the first lines, at most `most`, and one more that says how many are left out."""
    return [*lines[:most], *([f"… and {len(lines) - most} more"] if len(lines) > most else [])]


def join_faults(headline: str, faults: Iterable[str], limit: int = 10) -> str:
    """Join faults to one message: a headline and an indented line for each, at most `limit` of them."""
    lines = (clip(fault, _LONGEST) for fault in at_most(list(faults), limit))
    return "\n  ".join([headline, *lines])


class Faults(list[MsaError]):
    """Errors of several parts, raised as one error of the first one's class."""

    @contextmanager
    def gathered(self, where: str = "") -> Iterator[None]:
        """Keep an error that the block raises, with `where` before its message."""
        try:
            yield
        except MsaError as error:
            self.append(with_retries(type(error)(f"{where}{error}"), error.retries))

    def check(self) -> None:
        """Raise the errors that were gathered, if there are any."""
        if len(self) > 1:
            whole = type(self[0])(join_faults(f"{len(self)} faults:", (str(f).replace("\n", "\n  ") for f in self)))
            words = dict.fromkeys(word for fault in self for word in fault.retries.get(ALL_THE_SAME, ()))
            can_go_on = all(ALL_THE_SAME in fault.retries for fault in self)
            raise with_retries(whole, {ALL_THE_SAME: [*words]} if can_go_on else {})
        if self:
            raise self[0]


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return " (did you mean 'X'?)" for the choice that is most like `name`; an empty text if none is."""
    if len(name) > _LONGEST:
        return ""
    matches = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.6)
    return f" (did you mean '{matches[0]}'?)" if matches else ""
