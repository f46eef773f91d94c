"""The pages that are made from the code: `python -m tests.tools.pages` writes them anew, and a test compares them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from msa_lite.io.files.writing import indented_json
from msa_lite.record.schema import removal_schema
from msa_lite.report.tables.formats import Cell, Section, TextTable, markdown
from msa_lite.report.tables.metrics import METRICS
from tests.tools.arrows import ROOT, drawing
from tests.tools.pages.commands import commands_page
from tests.tools.pages.files import files_page
from tests.tools.pages.lowest import lowest_page
from tests.tools.pages.python import python_page
from tests.tools.pages.recipe import recipe_page
from tests.tools.pages.tables import code, table

BEGIN, END = "<!-- rooms: drawn by python -m tests.tools.pages -->\n", "<!-- end of rooms -->\n"
_CONTRIBUTING = ROOT / ".github/CONTRIBUTING.md"
_METRICS = """# Metrics

Written by `python -m tests.tools.pages` from the table in `msa_lite/report/tables/metrics.py`.

"""


def contributing_page() -> str:
    """Return CONTRIBUTING with the drawing of the rooms as the code is now."""
    before, rest = _CONTRIBUTING.read_text().split(BEGIN)
    return before + BEGIN + "\n" + drawing() + "\n" + END + rest.split(END)[1]


def metrics_page() -> str:
    """Return the page that explains every metric."""
    rows: list[tuple[str, ...]] = []
    first: dict[str, str] = {}  # meaning → the first metric that has it
    for kind in METRICS.values():
        name = first.setdefault(kind.formula, kind.name)
        meaning = (kind.formula, kind.source) if name == kind.name else (f"as {name}", "")
        rows.append((kind.group, kind.name, kind.best, *meaning))
    headings = ["group", "metric", "best", "meaning", "source"]
    return _METRICS + markdown(TextTable(headings, [Section([[*map(Cell, row)] for row in rows])], left=5))


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
    ROOT / "docs/reference/commands.md": commands_page,
    ROOT / "docs/reference/files.md": files_page,
    ROOT / "docs/reference/metrics.md": metrics_page,
    ROOT / "docs/reference/python.md": python_page,
    ROOT / "docs/reference/recipe.md": recipe_page,
    _RECORD: record_page,
    ROOT / "msa_lite/record/schema.json": schema_page,
}
