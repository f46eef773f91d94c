"""Search files for texts as they stand in files: as they are, in JSON, in HTML."""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from msa_lite.io.reading import open_file

_BLOCK = 16 << 20  # bytes read at a time
_MOST = 200  # characters of a text to look for
_BUDGET = 20 << 30  # texts times bytes to search in
_FEWEST = 8
_SHORTEST = 12  # characters; shorter texts stand in many files by chance


def needles(texts: Iterable[str]) -> list[bytes]:
    """Return texts, long ones cut, in the forms that they may have in files. Short texts are left out."""
    forms: dict[bytes, None] = {}
    for text in texts:
        start = text.strip()[:_MOST].strip()
        if len(start) >= _SHORTEST:
            written = (start, json.dumps(start)[1:-1], json.dumps(start, ensure_ascii=False)[1:-1], html.escape(start))
            forms |= dict.fromkeys(form.encode("utf-8", "replace") for form in written)
    return list(forms)


def sample_texts(texts: Sequence[str], nbytes: int) -> list[str]:
    """Return as many of the texts, evenly spread, as can be looked for in so many bytes within seconds (≥ 8)."""
    count = max(_FEWEST, _BUDGET // max(1, nbytes))
    return list(texts[:: math.ceil(len(texts) / count) or 1])


def holds_any(path: Path, parts: Collection[bytes]) -> bool:
    """Check whether a file holds one of these bytes. Raise FormatError for what is no regular file."""
    if not parts:
        return False
    overlap = max(map(len, parts)) - 1
    before = b""
    with os.fdopen(open_file(path), "rb", buffering=0) as stream:
        while block := stream.read(_BLOCK):
            block = before + block
            if any(part in block for part in parts):
                return True
            before = block[-overlap:] if overlap else b""
    return False
