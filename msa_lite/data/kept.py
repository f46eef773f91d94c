"""Texts of the Hub that are kept as they are taken: what a stopped training has read need not be had twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

from msa_lite.data.rows import stream_texts
from msa_lite.data.sources import DataSource, pin_source


def kept_texts(source: DataSource, file: Path) -> Iterator[str]:
    """The texts of a source in its order. Those taken are kept in `file`, a line each, and come from there later.

    The first line says what they are. Of a source without revision, what is kept stays; with another revision or
    source, the file is begun anew. Raises as `stream_texts`.
    """
    head = kept_head(file)
    end, count = 0, 0
    if head is not None and head == _head(source, source.revision or head["revision"]):
        with open(file, "rb") as stream:
            end = len(stream.readline())
            for line in stream:
                if not line.endswith(b"\n"):  # a kill came while it was written
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
    """The first line of a file of kept texts: the source and its revision; None where there is none."""
    try:
        with open(file, encoding="utf-8") as stream:
            head = json.loads(stream.readline())
    except (OSError, ValueError):
        return None
    return head if isinstance(head, dict) and "revision" in head else None


def _head(source: DataSource, revision: str | None) -> dict[str, Any]:
    given = {key: value for key, value in asdict(source).items() if key != "messages"}  # texts have none
    return given | {"revision": revision}
