"""Texts in other spellings: find them in files, and mask a key in a server's message."""

from __future__ import annotations

import base64
import html
import json
import math
import os
import re
import string
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote

from msa_lite.io.files.reading import open_file

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


_BLOCK = 16 << 20  # bytes read at a time
_MOST = 200  # characters of a text to look for
_BUDGET = 20 << 30  # texts times bytes to search in
_FEWEST = 8
SHORTEST = 12  # characters; shorter texts stand in many files by chance


def needles(texts: Iterable[str]) -> list[bytes]:
    """Return texts, long ones cut, in the forms that they may have in files. Short texts are left out."""
    forms: dict[bytes, None] = {}
    for text in texts:
        start = text.strip()[:_MOST].strip()
        if len(start) >= SHORTEST:
            forms |= dict.fromkeys(written_forms(start))
    return list(forms)


def written_forms(text: str) -> Iterator[bytes]:
    """Yield a text's bytes in files: plain, within JSON, HTML and CSV, with other line ends and accents, in UTF-16."""
    lines = re.sub(r"\r\n?", "\n", text)
    ended = {lines, lines.replace("\n", "\r\n"), lines.replace("\n", "\r"), text}
    for spelled in {unicodedata.normalize(form, end) for form in ("NFC", "NFD") for end in ended} | ended:
        quoted = (json.dumps(spelled)[1:-1], json.dumps(spelled, ensure_ascii=False)[1:-1])
        for form in dict.fromkeys((spelled, *quoted, html.escape(spelled), spelled.replace('"', '""'))):
            yield form.encode("utf-8", "replace")
        yield spelled.encode("utf-16-le", "replace")
        yield spelled.encode("utf-16-be", "replace")


def sample_texts(texts: Sequence[str], nbytes: int) -> list[str]:
    """Return as many of the texts, evenly spread, as can be looked for in so many bytes within seconds (≥ 8)."""
    count = max(_FEWEST, _BUDGET // max(1, nbytes))
    return list(texts[:: math.ceil(len(texts) / count) or 1])


def holds_any(path: Path, needles: Collection[bytes]) -> bool:
    """Check whether a file holds one of these bytes. Raise FormatError for what is no regular file."""
    if not needles:
        return False
    overlap = max(map(len, needles)) - 1
    tail = b""
    with os.fdopen(open_file(path), "rb", buffering=0) as stream:
        while block := stream.read(_BLOCK):
            block = tail + block
            if any(needle in block for needle in needles):
                return True
            tail = block[-overlap:] if overlap else b""
    return False
