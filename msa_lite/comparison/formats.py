"""Make a table of a comparison, and text in each format."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

from msa_lite.comparison.compare import Comparison, ModelValue
from msa_lite.report.formats import Cell, Section, TextTable, csv_lines, html_page, latex, markdown


def comparison_table(comparison: Comparison) -> TextTable:
    """Return one row a model; a section each for references, MSA, baselines, other models and published figures."""
    sections = []
    for name, rows in groupby(comparison.rows, key=lambda row: row.section):
        heading = comparison.published if name == "published" else None
        sections.append(Section([[Cell(row.label), *map(_cell, row.cells)] for row in rows], heading or ""))
    headings = ["model", *(column.heading for column in comparison.columns)]
    return TextTable(headings, sections, comparison.title, comparison.notes)


def _cell(value: ModelValue) -> Cell:
    return Cell(value.text, value.best, value.stderr, str(value.ratio or ""))


def comparison_csv(comparison: Comparison) -> str:
    """Return one line a model; for each metric METRIC, METRIC_stderr, METRIC_n, METRIC_ratio (as printed), METRIC_best.

    Values have all their digits; what is missing is empty. Notes have no place in it.
    """
    ends = ("", "_stderr", "_n", "_ratio", "_best")
    lines: list[list[object]] = [["section", "model", *(f"{c.name}{end}" for c in comparison.columns for end in ends)]]
    for row in comparison.rows:
        parts = ((v.value, v.stderr, v.n, v.ratio, str(v.best).lower()) for v in row.cells)
        lines.append([row.section, row.label, *(part for value in parts for part in value)])
    return csv_lines(lines)


FORMATS: dict[str, Callable[[Comparison], str]] = {
    "md": lambda comparison: markdown(comparison_table(comparison)),
    "tex": lambda comparison: latex(comparison_table(comparison)),
    "csv": comparison_csv,
    "html": lambda comparison: html_page(comparison_table(comparison)),
}
"""Writers of a comparison by the name of the format."""
