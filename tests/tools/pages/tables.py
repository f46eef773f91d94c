"""Tables of Markdown for pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. A bar in a cell is escaped, and a line break becomes a blank."""
    first, *others = ["| " + " | ".join(map(_cell, line)) + " |\n" for line in (headings, *rows)]
    return first + "|---" * len(headings) + "|\n" + "".join(others)


def code(text: str) -> str:
    """Return a text as code, or nothing for none."""
    return f"`{text}`" if text else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")
