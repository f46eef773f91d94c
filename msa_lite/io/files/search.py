"""Find files that hold one of many texts, in one pass."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from msa_lite.io.files.reading import open_file

SHORTEST = 12  # bytes; shorter texts stand in many files by chance
_WINDOW = 8  # bytes of a text by which it is known: one number
_BLOCK = 4 << 20  # bytes read at a time
_BITS = 22  # of the table that tells windows that no text has
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing: 2^64 divided by the golden ratio, Knuth, TAOCP 3, 6.4


class TextSearch:
    """A search for texts in UTF-8, as they stand or escaped as in JSON. Texts below `SHORTEST` bytes are left out."""

    def __init__(self, texts: Iterable[str]) -> None:
        forms = {form for text in texts for form in _forms(text.strip()) if len(form) >= SHORTEST}
        self._longest = max(map(len, forms), default=0)
        self._windows: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
        self._table = np.zeros(1 << _BITS, bool)
        for form in forms:
            at = (len(form) - _WINDOW) // 2  # many questions begin alike
            self._windows[int.from_bytes(form[at : at + _WINDOW], "little")].append((at, form))
        self._table[_hashes(np.array(list(self._windows), np.uint64))] = True

    def __bool__(self) -> bool:
        return self._longest > 0

    def is_in(self, path: Path) -> bool:
        """Check whether a file holds one of the texts. Raise FormatError for what is no regular file, or OSError."""
        tail = b""
        with os.fdopen(open_file(path), "rb", buffering=0) as stream:
            while block := stream.read(_BLOCK):
                block = tail + block
                if self._is_within(block):
                    return True
                tail = block[-self._longest :]
        return False

    def _is_within(self, block: bytes) -> bool:
        for first in range(min(_WINDOW, len(block) - _WINDOW + 1)):
            words = np.frombuffer(block, "<u8", (len(block) - first) // _WINDOW, first)
            for place in np.flatnonzero(self._table[_hashes(words)]).tolist():
                start = first + place * _WINDOW
                for at, form in self._windows.get(int(words[place]), ()):
                    if start >= at and block.startswith(form, start - at):
                        return True
        return False


def _forms(text: str) -> Iterator[bytes]:
    yield text.encode("utf-8", "replace")
    yield json.dumps(text)[1:-1].encode()
    yield json.dumps(text, ensure_ascii=False)[1:-1].encode("utf-8", "replace")


def _hashes(words: np.ndarray) -> np.ndarray:
    return (words * _SPREAD) >> np.uint64(64 - _BITS)
