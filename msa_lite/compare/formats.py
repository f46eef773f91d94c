"""A comparison as text: a table for the terminal, GitHub Markdown, LaTeX, CSV and HTML."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from msa_lite.compare.comparison import Cell, Comparison, TableRow
from msa_lite.report.table import escape_markdown

if TYPE_CHECKING:
    from rich.table import Table


def _parts(comparison: Comparison) -> Iterator[tuple[str | None, list[TableRow]]]:
    """The parts of the table between which a rule stands, each with its heading, which only published rows have."""
    for section, rows in groupby(comparison.rows, key=lambda row: row.section):
        yield comparison.published if section == "published" else None, list(rows)


def _value(cell: Cell, bold: str, error: str = "") -> str:
    """The value, by a pattern like **{}** where it is the best, and its standard error by one like ± {}."""
    shown = bold.format(cell.shown) if cell.best else cell.shown
    return shown + (error.format(f"{cell.stderr:.3f}") if cell.stderr is not None else "")


def comparison_table(comparison: Comparison) -> Table:
    """A table for the terminal; standard errors stand on a second line."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(comparison.title), title_justify="left", box=box.HORIZONTALS)
    table.collapse_padding, table.pad_edge = True, False  # seven metrics have room in 80 columns
    table.add_column("model", max_width=40, overflow="fold")
    for column in comparison.columns:
        table.add_column(escape(column.heading), justify="right", overflow="fold", max_width=16)
    for title, rows in _parts(comparison):
        table.add_section()
        if title:
            table.add_row(f"[dim]{escape(title)}[/dim]")
        for row in rows:
            table.add_row(escape(row.label), *map(_rich_cell, row.cells))
    return table


def _rich_cell(cell: Cell) -> str:
    ratio = f" [dim]{cell.ratio}[/dim]" if cell.ratio else ""
    error = f"\n[dim]± {cell.stderr:.3f}[/dim]" if cell.stderr is not None else ""
    return _value(cell, "[bold]{}[/bold]") + ratio + error


def markdown_comparison(comparison: Comparison) -> str:
    """A GitHub table, an empty row between the parts, with the notes below it."""
    width = len(comparison.columns) + 1

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join([*cells, *[""] * (width - len(cells))]) + " |"

    lines = [line(["model", *(column.heading for column in comparison.columns)]), "|---|" + "---:|" * (width - 1)]
    for i, (title, rows) in enumerate(_parts(comparison)):
        if i or title:
            lines.append(line([f"*{escape_markdown(title)}*" if title else ""]))
        lines += [line([escape_markdown(row.label), *map(_markdown_cell, row.cells)]) for row in rows]
    lines += ["", *(f"- {escape_markdown(note)}." for note in comparison.notes)]
    return "\n".join(lines) + "\n"


def _markdown_cell(cell: Cell) -> str:
    return _value(cell, "**{}**", " ± {}") + (f" ({cell.ratio})" if cell.ratio else "")


def latex_comparison(comparison: Comparison) -> str:
    """A tabular for booktabs, as in the paper: a column for values, and one for ratios where a metric has any.

    The notes stand before it as comments; standard errors are left to the other formats.
    """
    with_ratio = [any(row.cells[i].ratio for row in comparison.rows) for i in range(len(comparison.columns))]
    width = 1 + sum(2 if both else 1 for both in with_ratio)
    spec = "l" + "".join("rr" if both else "r" for both in with_ratio)
    heads = [
        rf"\multicolumn{{{2 if both else 1}}}{{c}}{{{_escape_latex(column.heading)}}}"
        for column, both in zip(comparison.columns, with_ratio, strict=True)
    ]
    lines = [f"% {note}." for note in (*comparison.notes, r"needs \usepackage{booktabs}")]
    lines += [rf"\begin{{tabular}}{{{spec}}}", r"\toprule", " & ".join(["Model", *heads]) + r" \\"]
    for title, rows in _parts(comparison):
        lines.append(r"\midrule")
        if title:
            lines.append(rf"\multicolumn{{{width}}}{{l}}{{\textit{{{_escape_latex(title)}}}}} \\")
        for row in rows:
            cells = [text for cell, both in zip(row.cells, with_ratio, strict=True) for text in _latex_cell(cell, both)]
            lines.append(" & ".join([_escape_latex(row.label), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "→": r"$\to$",
    "–": "--",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
} | {sign: f"\\{sign}" for sign in "&%$#_{}"}


def _escape_latex(text: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in text)


def _latex_cell(cell: Cell, with_ratio: bool) -> list[str]:
    shown = re.sub(r"^-(?=\d)", "$-$", cell.shown) if cell.value is not None else "--"
    value = rf"\textbf{{{shown}}}" if cell.best else shown
    return [value, _escape_latex(str(cell.ratio)) if cell.ratio else ""] if with_ratio else [value]


def csv_comparison(comparison: Comparison) -> str:
    """One line a model; for each metric METRIC, METRIC_stderr, METRIC_n, METRIC_ratio (as printed) and METRIC_best.

    Values have all their digits; what is missing is empty. Notes have no place in it.
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    names = [column.name for column in comparison.columns]
    writer.writerow(
        ["section", "model", *(f"{name}{end}" for name in names for end in ("", "_stderr", "_n", "_ratio", "_best"))]
    )
    for row in comparison.rows:
        cells = [
            item for cell in row.cells for item in (cell.value, cell.stderr, cell.n, cell.ratio, str(cell.best).lower())
        ]
        writer.writerow([row.section, row.label, *cells])
    return stream.getvalue()


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem; color: #222 }
table { border-collapse: collapse; border-top: 2px solid; border-bottom: 2px solid }
caption { text-align: left; font-weight: 600; padding-bottom: .5rem }
th, td { padding: .2rem .8rem; text-align: right; vertical-align: baseline; white-space: nowrap }
thead th { white-space: normal; max-width: 9rem }
th:first-child { text-align: left; font-weight: inherit }
tbody { border-top: 1px solid }
small { color: #777 }
li { max-width: 60rem }
""".strip()


def html_comparison(comparison: Comparison) -> str:
    """A page of its own, with the notes below the table."""
    width = len(comparison.columns) + 1
    heads = ["model", *(column.heading for column in comparison.columns)]
    title = html.escape(comparison.title)
    lines = ["<!doctype html>", '<html lang="en">', '<meta charset="utf-8">', f"<title>{title}</title>"]
    lines += [f"<style>\n{_STYLE}\n</style>", "<table>", f"<caption>{title}</caption>"]
    lines += ["<thead><tr>" + "".join(f'<th scope="col">{html.escape(head)}</th>' for head in heads) + "</tr></thead>"]
    for part, rows in _parts(comparison):
        lines.append("<tbody>")
        if part:
            lines.append(f'<tr><th colspan="{width}" scope="rowgroup"><i>{html.escape(part)}</i></th></tr>')
        for row in rows:
            cells = "".join(f"<td>{_html_cell(cell)}</td>" for cell in row.cells)
            lines.append(f'<tr><th scope="row">{html.escape(row.label)}</th>{cells}</tr>')
        lines.append("</tbody>")
    lines += ["</table>", "<ul>", *(f"<li>{html.escape(note)}.</li>" for note in comparison.notes), "</ul>", "</html>"]
    return "\n".join(lines) + "\n"


def _html_cell(cell: Cell) -> str:
    ratio = f" {html.escape(str(cell.ratio))}" if cell.ratio else ""
    return _value(cell, "<b>{}</b>", " <small>± {}</small>") + ratio


FORMATS: dict[str, Callable[[Comparison], str]] = {
    "md": markdown_comparison,
    "tex": latex_comparison,
    "csv": csv_comparison,
    "html": html_comparison,
}
"""How a comparison is written in each format, by its name."""
