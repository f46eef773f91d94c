"""Reports: aggregates of per-item records as data, the tables made of them, and models side by side."""

from msa_lite.report.comparison import Comparison, compare
from msa_lite.report.formats import FORMATS, comparison_table
from msa_lite.report.metrics import REPORT_FILE, Metric, Report, load_report, write_report
from msa_lite.report.published import PublishedTable, load_published, published_tables
from msa_lite.report.ratios import Ratio, ratios
from msa_lite.report.table import markdown_table, notes, rich_table

__all__ = [
    "FORMATS",
    "REPORT_FILE",
    "Comparison",
    "Metric",
    "PublishedTable",
    "Ratio",
    "Report",
    "compare",
    "comparison_table",
    "load_published",
    "load_report",
    "markdown_table",
    "notes",
    "published_tables",
    "ratios",
    "rich_table",
    "write_report",
]
