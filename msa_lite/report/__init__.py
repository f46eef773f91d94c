"""Define metrics and reports, the tables made of them, and the verdict."""

from msa_lite.report.tables.reports import REPORT_FILE, Metric, Report, load_report, reports_table, write_report

__all__ = [
    "REPORT_FILE",
    "Metric",
    "Report",
    "load_report",
    "reports_table",
    "write_report",
]
