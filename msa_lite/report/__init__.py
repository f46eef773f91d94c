"""Reports: aggregates of per-item records as data, and the tables made of them."""

from msa_lite.report.metrics import Metric, Report, load_report, write_report
from msa_lite.report.table import markdown_table, notes, rich_table

__all__ = ["Metric", "Report", "load_report", "markdown_table", "notes", "rich_table", "write_report"]
