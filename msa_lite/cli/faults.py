"""Turn errors into messages and exit statuses, in one place; print the user's own command with a way out."""

from __future__ import annotations

import errno
import shlex
import time
import traceback
from collections.abc import Iterator, Sequence
from difflib import get_close_matches

import click

from msa_lite.errors import MsaError, UsageError
from msa_lite.io.files.writing import disk_fault
from msa_lite.io.launch.crew import Ranks
from msa_lite.io.models.devices import is_out_of_memory, memory_fault

_RESUME = "finished stages stay, the same command resumes"
_NEARLY = 0.8  # difflib's ratio: --gpus is nearly --gpu, and --lr is not --help
_PATIENCE = 20.0  # seconds; the first process may take that long to end
_CLOSED = dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "you need the right to read and write there")
_ODD = dict.fromkeys((errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP), "choose another place")
_FAILED = dict.fromkeys((errno.EIO, errno.ESTALE), "the disk, or the way to it, fails; check it")
_ADVICE = _CLOSED | _ODD | _FAILED  # by the system's error about a place


_TYPED: list[str] = []  # the words of this process's command
_OPTIONS: set[str] = set()  # those of that command
_CLASHES = {"--accept": "--until"}  # by an option: the one that a command refuses beside it


def remember(args: Sequence[str]) -> None:
    """Take the words that the user typed after `msa-lite`."""
    _TYPED[:] = args
    _OPTIONS.clear()


def remember_options(command: click.Command | None) -> None:
    """Take the options of the command that the words call."""
    _OPTIONS.update(name for parameter in (command.params if command else ()) for name in parameter.opts)


def again(*words: str) -> str:
    """Return the user's command with some words more, quoted for a shell.

    Of a launcher's command, only the words after it are known.
    """
    end = _TYPED.index("--") if "--" in _TYPED else len(_TYPED)
    command = shlex.join(["msa-lite", *_TYPED[:end], *words, *_TYPED[end:]])
    return f"{command} (after your launcher)" if Ranks.current().count > 1 else command


def offers(error: MsaError) -> Iterator[str]:
    """Yield a line for each way out that an error offers and the command knows: "to …: msa-lite …"."""
    typed = {word.partition("=")[0] for word in _TYPED}
    options = _OPTIONS - {name for name, other in _CLASHES.items() if other in typed}
    for purpose, words in error.retries.items():
        known = all(word in options for word in words if word.startswith("--"))
        if known and not set(words) <= set(_TYPED):
            yield f"{purpose}: {again(*words)}"


def report_error(error: BaseException, verbose: bool, rank: int = 0) -> int:
    """Print what a command raised on stderr, with the commands that go on; return the exit status.

    rank: the number of the process. The first one of a launcher prints the errors that all have, and the launcher then
    ends the others. One that is still there after some seconds has an error of its own.
    """
    if rank:
        if isinstance(error, KeyboardInterrupt):
            return 130
        time.sleep(_PATIENCE)
        click.echo(f"process {rank}: ", err=True, nl=False)
    if isinstance(error, click.ClickException):
        if type(error).__name__ == "NoArgsIsHelpError":  # click 8.2 and later; its message is the whole help
            error.show()
            return error.exit_code
        _print_usage(error)
        return _say(_key_as_option(error) or error.format_message(), 2)
    if isinstance(error, MsaError):
        return _say("\n".join([str(error), *offers(error)]), error.exit_code)
    if isinstance(error, (click.Abort, KeyboardInterrupt)):
        click.echo(f"interrupted; {_RESUME}", err=True)
        return 130
    if isinstance(error, MemoryError):
        return _say(f"out of memory; {_RESUME} (merge: a smaller --max-memory)", 4)
    if is_out_of_memory(error):
        if verbose:
            traceback.print_exception(error)
        change = "close other programs that use the GPU, or take a smaller model or a larger GPU"
        return _say(f"{memory_fault(error)}; {change}; {_RESUME}", 4)
    full = disk_fault(error)
    place = error.filename if isinstance(error, OSError) and error.errno in _ADVICE else None
    if (full is None and place is None) or verbose:
        traceback.print_exception(error)
    if place is not None and isinstance(error, OSError):
        return _say(f"{place}: {error.strerror}; {_ADVICE[error.errno or 0]}; {_RESUME}", 4)
    if full is not None:
        return _say(f"{full} (the disk is full, or a limit on it is reached; make room); {_RESUME}", 4)
    return _say(f"{error} (this was not expected and may be a bug); {_RESUME}", 4)


def _key_as_option(error: click.ClickException) -> str | None:
    """Return the message for an option that is a key of recipes, to a command that takes one; else None.

    None also for what is nearly an option of the command: click's own message names that.
    """
    from msa_lite.recipe import key_hint

    if not isinstance(error, click.NoSuchOption) or error.ctx is None:
        return None
    if get_close_matches(error.option_name, error.possibilities or (), cutoff=_NEARLY):
        return None
    hint = key_hint(error.option_name.lstrip("-").replace("-", "_"))
    takes_keys = any(parameter.name == "overrides" for parameter in error.ctx.command.params)
    return f"{error.option_name}: no such option; keys are given as KEY=VALUE{hint}" if hint and takes_keys else None


def broken_pipe(end: SystemExit) -> OSError | None:
    """Return the error that made click end a command: a pipe or connection of its own that broke.

    Click's status is 1, which means FAIL here. Standard streams never break (`safe_streams`).
    """
    error = end.__context__
    return error if isinstance(error, OSError) and error.errno == errno.EPIPE else None


def report_lost(fault: OSError | None) -> int:
    """Report that a result could not be printed because of `fault`; return the exit status.

    A reader that stops early (`| head`) has read enough. Any other fault is a wrong usage: the place to print to.
    """
    if fault is None or fault.errno == errno.EPIPE:
        return 0
    return _say(
        f"the result could not be printed ({fault.strerror or fault}); the files that the command makes are "
        "there. Print to another place",
        UsageError.exit_code,
    )


def _print_usage(error: click.ClickException) -> None:
    context = getattr(error, "ctx", None)
    if context is not None:
        click.echo(f"{context.get_usage()}\nTry '{context.command_path} --help' for help.\n", err=True)


def _say(message: str, status: int) -> int:
    click.echo(f"error: {message}", err=True)
    return status
