"""Texts of the Hub that are kept on disk, so that a stopped training goes on with them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

from msa_lite.data.forms import DataSource
from msa_lite.data.rows import stream_texts
from msa_lite.data.sources import pin_source


def kept_texts(source: DataSource, file: Path) -> Iterator[str]:
    """Yield the texts of a source in its order. Each text that is read is kept as a line of `file`.

    A later call reads these lines first. The first line names source and revision; for another source or revision the
    file is begun anew. A source without a revision takes the file's. Raise as `stream_texts`.
    """
    head = kept_head(file)
    end, count = 0, 0
    if head is not None and head == _head(source, source.revision or head["revision"]):
        with open(file, "rb") as stream:
            end = len(stream.readline())
            for line in stream:
                if not line.endswith(b"\n"):  # a kill interrupted the writing
                    break
                if (text := json.loads(line)) is None:
                    return
                end, count = end + len(line), count + 1
                yield text
        source = replace(source, revision=head["revision"])
    else:
        source = pin_source(source)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(_head(source, source.revision)) + "\n", "utf-8")
        end = file.stat().st_size
    with open(file, "r+b") as stream:
        stream.truncate(end)
        stream.seek(end)
        for text in islice(stream_texts(source), count, None):
            stream.write(json.dumps(text).encode() + b"\n")
            yield text
        stream.write(b"null\n")  # there are no more


def kept_head(file: Path) -> dict[str, Any] | None:
    """Return the first line of a file of kept texts, with the source and its revision; None if there is none."""
    try:
        with open(file, encoding="utf-8") as stream:
            head = json.loads(stream.readline())
    except (OSError, ValueError):
        return None
    return head if isinstance(head, dict) and "revision" in head else None


def _head(source: DataSource, revision: str | None) -> dict[str, Any]:
    unread = ("messages", "subject")  # a stream of texts has neither
    fields = {key: value for key, value in asdict(source).items() if key not in unread}
    return fields | {"revision": revision}
