"""Keep the work going when standard output or error fails: no reader, a full disk, an encoding without a character."""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class Outlet(io.BufferedIOBase):
    """A stream of bytes whose errors stop nobody."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.fault: OSError | None = None
        """The first error; everything after it goes nowhere."""

    def write(self, data: ReadableBuffer) -> int:
        """Write; keep an error, and do not raise it."""
        try:
            self._stream.write(data)
        except OSError as error:
            self._give_up(error)
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Flush; keep an error, and do not raise it."""
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Lead the descriptor nowhere, so that bytes in buffers and later ones do not fail again."""
        if self.fault is None:
            self.fault = error
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def close(self) -> None:
        """Flush alone: the stream is somebody else's."""
        self.flush()


@contextmanager
def safe_streams() -> Iterator[Outlet | None]:
    """Replace standard output and error by safe streams; give the outlet of standard output, if there is one."""
    _fill_descriptors()
    before = sys.stdout, sys.stderr
    sys.stdout, outlet = _safe(sys.stdout)
    sys.stderr, _ = _safe(sys.stderr)
    try:
        yield outlet
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        sys.stdout, sys.stderr = before


def _fill_descriptors() -> None:
    """Lead closed standard streams nowhere. Otherwise a model's file gets their number, and the prints go into it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _safe(stream: TextIO) -> tuple[TextIO, Outlet | None]:
    """Wrap a stream: escape characters that its encoding lacks, and turn ASCII (a POSIX locale) into UTF-8."""
    if not hasattr(stream, "buffer"):  # closed, or put there by somebody who knows why
        return stream, None
    stream.flush()
    outlet = Outlet(stream.buffer)
    encoding = codecs.lookup(stream.encoding or "utf-8").name
    lines = getattr(stream, "line_buffering", False)
    encoding = "utf-8" if encoding == "ascii" else encoding
    at_once = getattr(stream, "write_through", False)  # with PYTHONUNBUFFERED, which containers often set
    safe = io.TextIOWrapper(outlet, encoding, "backslashreplace", line_buffering=lines, write_through=at_once)  # type: ignore[type-var]
    return safe, outlet
