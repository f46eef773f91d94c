"""The pages that are made from the code: `python -m tests.tools.pages` writes them anew, and a test compares them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from msa_lite.io.files.writing import indented_json
from msa_lite.record.schema import removal_schema
from msa_lite.report.tables.metrics import METRICS
from tests.tools.arrows import ROOT, drawing
from tests.tools.pages.commands import commands_page
from tests.tools.pages.files import files_page
from tests.tools.pages.lowest import lowest_page, plain_page
from tests.tools.pages.python import python_page
from tests.tools.pages.recipe import recipe_page
from tests.tools.pages.tables import code, table

BEGIN, END = "<!-- rooms: drawn by python -m tests.tools.pages -->\n", "<!-- end of rooms -->\n"
_CONTRIBUTING = ROOT / ".github/CONTRIBUTING.md"
_METRICS = ROOT / "docs/reference/metrics.md"
_ROWS = "<!-- metrics: by python -m tests.tools.pages -->\n"  # the table below it is the end of the page
_ARROWS = {True: "↑", False: "↓", None: "–"}


def contributing_page() -> str:
    """Return CONTRIBUTING with the drawing of the rooms as the code is now."""
    before, rest = _CONTRIBUTING.read_text().split(BEGIN)
    return before + BEGIN + "\n" + drawing() + "\n" + END + rest.split(END)[1]


def metrics_page() -> str:
    """Return the page that explains every metric: one row for all sets that a metric is measured on."""
    rows: dict[str, tuple[list[str], str]] = {}  # meaning → the names with their direction, source
    for kind in METRICS.values():
        meaning = kind.formula.rpartition("; ")[2] if kind.group == "under attack" else kind.formula
        arrow = "0" if kind.best_at_zero else _ARROWS[kind.higher_is_better]
        rows.setdefault(meaning, ([], kind.source))[0].append(f"{code(kind.name)} {arrow}")
    texts = [(", ".join(names), meaning.replace("*", r"\*"), source) for meaning, (names, source) in rows.items()]
    return _METRICS.read_text().split(_ROWS)[0] + _ROWS + "\n" + table(("metric", "meaning", "source"), texts)


def schema_page() -> str:
    """Return the JSON schema of record.json."""
    return indented_json(removal_schema())


_RECORD = ROOT / "docs/reference/removal-record.md"
_FIELDS = "<!-- fields: by python -m tests.tools.pages -->\n"  # the table below it is the end of the page


def record_page() -> str:
    """Return the page of the removal record with the fields of its schema."""
    schema = removal_schema()
    rows, first = list[tuple[str, str]](), dict[str, str]()  # text → the first field that has it
    for name, text in _fields(schema, schema["$defs"]):
        rows.append((code(name), text if first.setdefault(text, name) == name else f"as {code(first[text])}"))
    return _RECORD.read_text().split(_FIELDS)[0] + _FIELDS + "\n" + table(("field", "content"), rows)


def _fields(part: dict[str, Any], parts: dict[str, Any], place: str = "") -> Iterator[tuple[str, str]]:
    """Yield the fields of a part of a schema, with their descriptions; NAME for the names in a mapping."""
    for name, item in part["properties"].items():
        yield place + name, item["description"]
        inner = item.get("items") or item.get("additionalProperties") or item
        if reference := inner.get("$ref") if isinstance(inner, dict) else None:
            many = {"array": "[]", "object": ".NAME"}.get(item.get("type", ""), "")
            yield from _fields(parts[reference.rpartition("/")[2]], parts, f"{place}{name}{many}.")


PAGES: dict[Path, Callable[[], str]] = {
    _CONTRIBUTING: contributing_page,
    ROOT / "constraints/lowest.txt": lowest_page,
    ROOT / "constraints/plain.txt": plain_page,
    ROOT / "docs/reference/commands.md": commands_page,
    ROOT / "docs/reference/files.md": files_page,
    _METRICS: metrics_page,
    ROOT / "docs/reference/python.md": python_page,
    ROOT / "docs/reference/recipe.md": recipe_page,
    _RECORD: record_page,
    ROOT / "msa_lite/record/schema.json": schema_page,
}
