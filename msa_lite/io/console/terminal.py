"""The way out to a terminal: signs that steer it are shown and not obeyed, and a stream that breaks stops no work."""

from __future__ import annotations

import codecs
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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
    """A text stream on which nobody's text steers the terminal, and whose errors stop nobody.

    Bars of tqdm may go back to the start of their line. The stream below is somebody else's, and is never closed.
    """

    fault: OSError | None = None
    """The first error; everything after it goes nowhere."""

    def write(self, text: str) -> int:
        """Write a text as `shown`."""
        bar = _BARS.match(text)
        start = bar[0] if bar else ""
        self.write_as_is(start + shown(text[len(start) :]))
        return len(text)

    def write_as_is(self, text: str) -> int:
        """Write a text with the signs that steer a terminal; keep an error, and do not raise it."""
        try:
            super().write(text)
        except OSError as error:
            self._give_up(error)
        return len(text)

    def flush(self) -> None:
        """Flush; keep an error, and do not raise it."""
        try:
            super().flush()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Flush only."""
        self.flush()

    def _give_up(self, error: OSError) -> None:
        self.fault = self.fault or error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())  # takes what is still in buffers, too
        os.close(nowhere)


@contextmanager
def safe_streams() -> Iterator[None]:
    """Replace standard output and error by safe streams."""
    _fill_descriptors()
    originals = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_safe, originals)
    try:
        yield
    finally:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        sys.stdout, sys.stderr = originals


def _fill_descriptors() -> None:
    """Lead closed standard streams nowhere. Otherwise a model's file gets their number, and the prints go into it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _safe(stream: TextIO) -> TextIO:
    """Wrap a stream: escape what steers a terminal or its encoding lacks; turn ASCII (a POSIX locale) into UTF-8."""
    if not isinstance(stream, io.TextIOWrapper):  # closed, or put there by somebody who knows why
        return stream
    stream.flush()
    encoding = codecs.lookup(stream.encoding).name
    encoding = "utf-8" if encoding == "ascii" else encoding
    at_once = stream.write_through  # with PYTHONUNBUFFERED, which containers often set
    lines = stream.line_buffering
    return SafeText(stream.buffer, encoding, "backslashreplace", line_buffering=lines, write_through=at_once)


class _AsIs:
    """A stream that changes nothing, for the colours of `rich` and for data that goes into a file."""

    def __init__(self, stream: SafeText) -> None:
        self._stream = stream
        self.write = stream.write_as_is

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
