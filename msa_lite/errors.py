"""Every error that a user can cause or meet, one class a kind, each with its exit code.

The library raises these with what is wrong, where, and what to try; only the command line turns them into a
message and an exit status.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class MsaError(Exception):
    """Base of all errors of msa-lite; `exit_code` is what the command line returns."""

    exit_code = 4
    keeps_partial = True  # whether a stage that raised it leaves its partial folder for a rerun


class UsageError(MsaError):
    """A wrong argument, an unknown name, a path that is not there."""

    exit_code = 2


class RecipeError(UsageError):
    """A recipe that does not fit the schema; the message holds one line a fault."""


class DataError(MsaError):
    """A data set that cannot be used: empty, a column missing, unreadable."""

    exit_code = 3


class FormatError(MsaError):
    """A checkpoint or adapter on disk that is broken or of a kind that is not handled."""

    exit_code = 3


class NoTokenizerError(FormatError):
    """A model that was saved without a tokenizer. offer: another model whose tokenizer may be the right one."""

    def __init__(self, message: str, offer: str | None = None) -> None:
        super().__init__(message)
        self.offer = offer


class MismatchError(MsaError):
    """Inputs that are fine alone but do not fit each other (shapes, names, vocabularies)."""

    exit_code = 3


class OutputError(MsaError):
    """The place to write to is occupied by something else, or too small."""

    exit_code = 3


class StageError(MsaError):
    """A stage failed while it worked; finished stages stay and a rerun resumes."""

    exit_code = 4


class NotFiniteError(StageError):
    """A model's loss, weights or outputs are no numbers: it was driven too far."""


def join_faults(headline: str, faults: Iterable[str], limit: int = 10) -> str:
    """One message of many faults: a headline and an indented line for each, at most `limit` of them."""
    faults = list(faults)
    lines = [headline, *(f"  {fault}" for fault in faults[:limit])]
    if len(faults) > limit:
        lines.append(f"  … and {len(faults) - limit} more")
    return "\n".join(lines)


class Faults(list[MsaError]):
    """Errors of several parts, to be raised as one, of the first one's class."""

    @contextmanager
    def gathered(self, where: str = "") -> Iterator[None]:
        """Keep an error that is raised inside, with `where` before what it says."""
        try:
            yield
        except MsaError as error:
            self.append(type(error)(f"{where}{error}"))

    def check(self) -> None:
        """Raise what was gathered, if anything was."""
        if len(self) > 1:
            raise type(self[0])(join_faults(f"{len(self)} faults:", (str(f).replace("\n", "\n  ") for f in self)))
        if self:
            raise self[0]


def nearest(name: str, choices: Iterable[str]) -> str:
    """' (did you mean X?)' where one of `choices` is like `name`, otherwise an empty string."""
    found = difflib.get_close_matches(name[:100], list(choices), n=1, cutoff=0.6)
    return f" (did you mean '{found[0]}'?)" if found else ""
