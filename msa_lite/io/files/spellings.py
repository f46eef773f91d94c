"""Mask a key in a server's message, in whatever spelling it stands there."""

from __future__ import annotations

import base64
import html
import re
import string
from collections.abc import Iterator
from urllib.parse import unquote

_PART = 8  # characters in a row of the key that are too many to show
_READ = 4000  # characters of a text to read
_SHOWN = 500  # characters of it to show
_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)


def masked(text: str, key: str) -> str:
    """Return a text on one line, of at most 500 characters, with *** in place of each piece of the key.

    A text that spells the key in a way that cannot be cut out (escapes, letters apart) is left out as a whole. A key
    of fewer than 8 characters, as for servers that need none, is masked only as a whole.
    """
    text = " ".join("".join(sign if sign.isprintable() else " " for sign in text[:_READ]).split())
    if not key:
        return text[:_SHOWN]
    if len(key) < _PART:
        return text.replace(key, "***")[:_SHOWN]
    pieces = {spelling[i : i + _PART] for spelling in _spellings(key) for i in range(len(spelling) - _PART + 1)}
    lower = text.translate(_LOWER)
    starts = [i for i in range(len(lower)) if lower[i : i + _PART] in pieces]
    covered = {i + step for i in starts for step in range(_PART)}
    shown = "".join("\0" if i in covered else sign for i, sign in enumerate(text))
    shown = re.sub("\0+", "***", shown)
    if any(piece in view for view in _views(shown) for piece in pieces):
        return "(what it says is left out, since it repeats the key)"
    return shown[:_SHOWN]


def without_login(text: str) -> str:
    """Return a text with addresses, without account and password in them."""
    return re.sub(r"(?<=://)[^/\s@]*@", "", text)


def _spellings(key: str) -> Iterator[str]:
    """Yield the key in lower case: as it is, without signs, backwards, in hexadecimal, in base64 at each offset."""
    raw = key.encode()
    for spelling in (key, re.sub(r"[\W_]", "", key)):
        yield spelling.translate(_LOWER)
        yield spelling.translate(_LOWER)[::-1]
    yield raw.hex()
    for offset in range(3):
        # The first and the last group also hold bits of the neighbours.
        inner = base64.b64encode(b"\0" * offset + raw).decode().rstrip("=")[4 if offset else 0 :]
        yield inner.translate(_LOWER)
        yield inner.translate(_LOWER).translate(str.maketrans("+/", "-_"))


def _views(text: str) -> Iterator[str]:
    """Yield a text with escapes of URLs, HTML and JSON resolved, and the same with letters and digits alone."""
    resolved = html.unescape(unquote(unquote(text)))
    resolved = re.sub(r"\\(?:u|x|U)\{?0*([0-9a-fA-F]{2})\}?", lambda match: chr(int(match[1], 16)), resolved)
    resolved = resolved.replace("\\", "").translate(_LOWER)
    yield resolved
    yield re.sub(r"[\W_]", "", resolved)
