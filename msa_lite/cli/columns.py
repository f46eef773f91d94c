"""Read the option --columns: names of columns by key."""

from __future__ import annotations

from collections.abc import Sequence

from msa_lite.errors import UsageError, nearest


def read_columns(text: str | None, keys: Sequence[str]) -> dict[str, str]:
    """Read question=Q,answer=A. Raise UsageError for keys that are not among these, or do not go together."""
    columns: dict[str, str] = {}
    for part in text.split(",") if text is not None else ():
        key, equals, name = (piece.strip() for piece in part.partition("="))
        if key not in keys or not equals or not name:
            raise UsageError(
                f"--columns: '{part}' is not KEY=COLUMN with a key of {', '.join(keys)}{nearest(key, keys)}"
            )
        columns[key] = name
    for alone in ("messages", "text"):
        if alone in columns and len(columns) > 1:
            raise UsageError(f"--columns: {alone} stands in the place of question and answer; name one or the other")
    return columns
