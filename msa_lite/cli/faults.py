"""What went wrong, in words and as an exit status: the one place where errors become messages."""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Iterator

import click

from msa_lite.errors import MsaError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# How libraries that do not pass on the system's error say the same: safetensors, tokenizers and Arrow with the system's
# words or number, torch.save with words of its own.
_FULL_WORDS = re.compile(
    r"no space left on device|disk quota exceeded|file too large|os error (28|122|27)\b|errno (28|122|27)\b"
    r"|PytorchStreamWriter failed writing",
    re.IGNORECASE,
)
_RESUME = "finished stages stay, the same command resumes"


def report_error(error: BaseException, verbose: bool) -> int:
    """Print what a command raised on stderr; return the exit status."""
    if isinstance(error, click.ClickException):
        _print_usage(error)
        return _say(error.format_message(), 2)
    if isinstance(error, MsaError):
        return _say(str(error), error.exit_code)
    if isinstance(error, (click.Abort, KeyboardInterrupt)):
        click.echo(f"interrupted; {_RESUME}", err=True)
        return 130
    if isinstance(error, MemoryError):
        return _say(f"out of memory; {_RESUME} (merge: --threads 1)", 4)
    full = disk_fault(error)
    if full is None or verbose:
        traceback.print_exception(error)
    if full is not None:
        return _say(f"{full} (the disk is full, or a limit on it is reached; make room); {_RESUME}", 4)
    return _say(f"{error} (this was not expected and may be a bug); {_RESUME}", 4)


def disk_fault(error: BaseException) -> str | None:
    """What the disk said where an error comes from a full one, whatever library has wrapped it; None otherwise."""
    for cause in _causes(error):
        if (isinstance(cause, OSError) and cause.errno in _FULL) or _FULL_WORDS.search(str(cause)):
            return " ".join(str(cause).split())
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what it was raised from, and what was being handled when it was raised."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _print_usage(error: click.ClickException) -> None:
    context = getattr(error, "ctx", None)
    if context is not None:
        click.echo(f"{context.get_usage()}\nTry '{context.command_path} --help' for help.\n", err=True)


def _say(message: str, status: int) -> int:
    click.echo(f"error: {message}", err=True)
    return status
