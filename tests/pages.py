"""The pages that are made from the code: `python -m tests.pages` writes them anew.

The drawing of the rooms stands in .github/CONTRIBUTING.md between two markers; docs/reference/metrics.md is the table of metrics;
msa_lite/record/schema.json is the form of record.json.
"""

from __future__ import annotations

from msa_lite.io.files import indented_json
from msa_lite.record.schema import removal_schema
from msa_lite.report.formats import Cell, Section, TextTable, markdown
from msa_lite.report.metrics import METRICS
from tests.arrows import ROOT, drawing

CONTRIBUTING = ROOT / ".github/CONTRIBUTING.md"
METRICS_PAGE = ROOT / "docs/reference/metrics.md"
SCHEMA_PAGE = ROOT / "msa_lite/record/schema.json"
BEGIN, END = "<!-- rooms: drawn by python -m tests.pages -->\n", "<!-- end of rooms -->\n"
_HEADER = """# Metrics

Written by `python -m tests.pages` from the table in `msa_lite/report/metrics.py`; `msa-lite metrics` prints the same.

"""


def contributing_page() -> str:
    """Return CONTRIBUTING with the drawing of the rooms as the code is now."""
    before, rest = CONTRIBUTING.read_text().split(BEGIN)
    return before + BEGIN + "\n" + drawing() + "\n" + END + rest.split(END)[1]


def metrics_page() -> str:
    """Return the page that explains every metric."""
    rows = [(kind.group, kind.name, kind.best, kind.formula, kind.source) for kind in METRICS.values()]
    headings = ["group", "metric", "best", "meaning", "source"]
    return _HEADER + markdown(TextTable(headings, [Section([[*map(Cell, row)] for row in rows])], left=5))


def schema_page() -> str:
    """Return the JSON schema of record.json."""
    return indented_json(removal_schema())


if __name__ == "__main__":
    CONTRIBUTING.write_text(contributing_page())
    METRICS_PAGE.parent.mkdir(exist_ok=True)
    METRICS_PAGE.write_text(metrics_page())
    SCHEMA_PAGE.write_text(schema_page())
