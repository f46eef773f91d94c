"""The user's own command line once more, with what a refusal offers: an option, or a key with another value."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

import click

from msa_lite.errors import MsaError
from msa_lite.io.launch.crew import Ranks

_TYPED: list[str] = []  # the words of this process's command


def remember(args: Sequence[str]) -> None:
    """Take the words that the user typed after `msa-lite`."""
    _TYPED[:] = args


def again(*words: str) -> str:
    """Return the user's command with some words more, quoted for a shell.

    Of a launcher's command, only the words after it are known.
    """
    end = _TYPED.index("--") if "--" in _TYPED else len(_TYPED)
    command = shlex.join(["msa-lite", *_TYPED[:end], *words, *_TYPED[end:]])
    return f"{command} (after your launcher)" if Ranks.current().count > 1 else command


def offers(error: BaseException, command: click.Command | None) -> Iterator[str]:
    """Yield a line for each way out that an error offers and the command knows: "to …: msa-lite …"."""
    options = {name for parameter in command.params for name in parameter.opts} if command else set()
    for purpose, words in error.retries.items() if isinstance(error, MsaError) else ():
        known = all(word in options for word in words if word.startswith("--"))
        if known and not set(words) <= set(_TYPED):
            yield f"{purpose}: {again(*words)}"
