"""Find texts in files of any kind, all at once, in each form that they may be written in."""

from __future__ import annotations

import html
import json
import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from msa_lite.io.files.reading import open_file

SHORTEST = 12  # characters; shorter texts stand in many files by chance
_WINDOW = 8  # bytes of a text by which it is known: one number
_STEP = 4  # bytes from one place in a file that is looked at to the next
_LEAST = _WINDOW + _STEP - 1  # bytes; so at least one whole window of a text begins at such a place
_BLOCK = 4 << 20  # bytes read at a time
_MANY = 1000  # places in a block with one window: then the texts are looked for one by one
_BITS = 22  # of the table that tells windows that no text has
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing: 2^64 divided by the golden ratio, Knuth, TAOCP 3, 6.4


class ByteSearch:
    """A search for many byte strings in one pass over a file.

    Twenty thousand of them take about forty times as long as a hundred.
    Every fourth place of a file is compared with four windows of eight bytes of each string, by a table of hashes.
    Where one fits, the whole string is compared.
    """

    def __init__(self, needles: Iterable[bytes]) -> None:
        """Prepare the search. needles: of 11 bytes and more each; raise ValueError for shorter ones."""
        self._needles = list(dict.fromkeys(needles))
        if any(len(needle) < _LEAST for needle in self._needles):
            raise ValueError(f"a text to look for has fewer than {_LEAST} bytes")
        self._longest = max(map(len, self._needles), default=0)
        self._places: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
        for needle, start in zip(self._needles, _rare_places(self._needles), strict=True):
            for at in range(start, start + _STEP):
                self._places[int.from_bytes(needle[at : at + _WINDOW], "little")].append((at, needle))
        self._windows = np.array(sorted(self._places), np.uint64)
        self._table = np.zeros(1 << _BITS, bool)
        self._table[_hashes(self._windows)] = True

    def __bool__(self) -> bool:
        return bool(self._needles)

    def is_in(self, path: Path) -> bool:
        """Check whether a file holds one of the strings. Raise FormatError for what is no regular file, or OSError."""
        if not self:
            return False
        tail = b""
        with os.fdopen(open_file(path), "rb", buffering=0) as stream:
            while block := stream.read(_BLOCK):
                block = tail + block
                if self.is_within(block):
                    return True
                tail = block[-(self._longest + _STEP) :]
        return False

    def is_within(self, block: bytes) -> bool:
        """Check whether one of the strings stands in a block of bytes."""
        for first in range(0, _WINDOW, _STEP):
            words = np.frombuffer(block, "<u8", max(0, len(block) - first) // _WINDOW, min(first, len(block)))
            likely = np.flatnonzero(self._table[_hashes(words)])
            likely = likely[np.isin(words[likely], self._windows)]
            for word, count in zip(*np.unique(words[likely], return_counts=True), strict=True):
                if count > _MANY:
                    if any(needle in block for _, needle in self._places[int(word)]):
                        return True
                    likely = likely[words[likely] != word]
            for place in likely.tolist():
                at = first + place * _WINDOW
                for shift, needle in self._places[int(words[place])]:
                    if at >= shift and block.startswith(needle, at - shift):
                        return True
        return False


def _hashes(words: np.ndarray) -> np.ndarray:
    return (words * _SPREAD) >> np.uint64(64 - _BITS)


def _rare_places(needles: Iterable[bytes]) -> Iterator[int]:
    """Yield for each string a place whose window few of them share: not "What is " at the beginning of all."""
    needles = list(needles)
    choices = [sorted({(len(needle) - _LEAST) * part // 4 for part in range(5)}) for needle in needles]
    counts = Counter(
        needle[at : at + _WINDOW] for needle, places in zip(needles, choices, strict=True) for at in places
    )
    for needle, places in zip(needles, choices, strict=True):
        yield min(places, key=lambda at: counts[needle[at : at + _WINDOW]])


def text_search(texts: Iterable[str], most: int = 200) -> ByteSearch:
    """Return a search for texts in each form that they may have. Texts below `SHORTEST` characters are left out.

    most: characters of a text to look for; of longer ones only the beginning has to be there.
    """
    starts = dict.fromkeys(text.strip()[:most].strip() for text in texts)
    return ByteSearch(form for start in starts if len(start) >= SHORTEST for form in written_forms(start))


def written_forms(text: str) -> Iterator[bytes]:
    """Yield a text's bytes in files: in UTF-8 and UTF-16, with other line ends and accents, within other formats.

    The formats are JSON as the usual libraries write it, also within a text of JSON, HTML and XML, CSV, YAML, Python.
    """
    lines = re.sub(r"\r\n?", "\n", text)
    ended = {lines, lines.replace("\n", "\r\n"), lines.replace("\n", "\r"), text}
    for spelled in {unicodedata.normalize(form, end) for form in ("NFC", "NFD") for end in ended} | ended:
        forms = dict.fromkeys([spelled, *_json_forms(spelled), *_markup_forms(spelled)])
        forms |= dict.fromkeys((spelled.replace('"', '""'), spelled.replace("'", "''"), repr(spelled)[1:-1]))
        for form in forms:
            yield form.encode("utf-8", "replace")
        yield spelled.encode("utf-16-le", "replace")
        yield spelled.encode("utf-16-be", "replace")


def _json_forms(text: str) -> Iterator[str]:
    """Yield a text as Python, pandas, Go, PHP and .NET write it into JSON, and the same within a text of JSON."""
    for plain in (json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]):
        capital = re.sub(r"\\u[0-9a-f]{4}", lambda match: "\\u" + match[0][2:].upper(), plain)
        for form in dict.fromkeys((plain, capital)):
            safe = re.sub("[<>&]", lambda match: f"\\u{ord(match[0]):04x}", form)
            all_safe = re.sub("[<>&'+]", lambda match: f"\\u{ord(match[0]):04X}", form).replace('\\"', "\\u0022")
            for written in dict.fromkeys((form, form.replace("/", "\\/"), safe, all_safe)):
                yield written
                yield json.dumps(written, ensure_ascii=False)[1:-1]


def _markup_forms(text: str) -> Iterator[str]:
    """Yield a text within HTML and XML, as Python, Jinja and XML libraries escape it."""
    escaped = html.escape(text, quote=False)
    yield escaped
    for double, single in (("&quot;", "&#x27;"), ("&quot;", "&#39;"), ("&#34;", "&#39;"), ("&quot;", "&apos;")):
        yield escaped.replace('"', double).replace("'", single)
    yield escaped.replace('"', "&quot;")
