"""Reports: aggregates of per-item records as data, the tables made of them, and models side by side."""

from msa_lite.report.comparison import Comparison, compare
from msa_lite.report.formats import FORMATS, comparison_table
from msa_lite.report.metrics import REPORT_FILE, Metric, Report, load_report, write_report
from msa_lite.report.pictures import write_pictures
from msa_lite.report.points import Candidate, Sweep, points_csv, points_markdown, points_table, shown_metrics
from msa_lite.report.published import PublishedTable, load_published, published_tables
from msa_lite.report.ratios import Ratio, ratios
from msa_lite.report.table import markdown_table, notes, rich_table

__all__ = [
    "FORMATS",
    "REPORT_FILE",
    "Candidate",
    "Comparison",
    "Metric",
    "PublishedTable",
    "Ratio",
    "Report",
    "Sweep",
    "compare",
    "comparison_table",
    "load_published",
    "load_report",
    "markdown_table",
    "notes",
    "points_csv",
    "points_markdown",
    "points_table",
    "published_tables",
    "ratios",
    "rich_table",
    "shown_metrics",
    "write_pictures",
    "write_report",
]
