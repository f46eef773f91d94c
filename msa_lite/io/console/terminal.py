"""The way out to a terminal: signs that steer it, from names and texts of others, are shown and not obeyed."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

# Controls but tab and line ends, and Unicode's Bidi_Control and line separators, which turn the order of a line.
_STEERING = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]|\r(?!\n)")
_BARS = re.compile("\r|(?:\x1b\\[A)+$")  # by which tqdm goes back to the start of its line, or up


def shown(text: str) -> str:
    """Return a text with steering signs written as \\u001b, as JSON has them: within JSON the value stays the same."""
    return _STEERING.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


class SafeText(io.TextIOWrapper):
    """A text stream on which nobody's text steers the terminal. Bars of tqdm may go back to the start of their line."""

    def write(self, text: str) -> int:
        """Write a text as `shown`."""
        bar = _BARS.match(text)
        start = bar[0] if bar else ""
        super().write(start + shown(text[len(start) :]))
        return len(text)


class _AsIs:
    """A stream that changes nothing, for the colours of `rich` and for data that goes into a file."""

    def __init__(self, stream: SafeText) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return io.TextIOWrapper.write(self._stream, text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def as_is(stream: TextIO) -> TextIO:
    """Return a stream that writes steering signs as they are."""
    return _AsIs(stream) if isinstance(stream, SafeText) else stream  # type: ignore[return-value]


def make_console(to_stderr: bool = False, width: int | None = None) -> Console:
    """Return a console of `rich` on standard output or error. Of steering signs, only its own reach the terminal."""
    from rich.console import Console
    from rich.segment import Segment

    class SafeConsole(Console):
        def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(shown(segment.text), segment.style)

    stream = sys.stderr if to_stderr else sys.stdout
    return SafeConsole(file=as_is(getattr(stream, "rich_proxied_file", stream)), width=width)
