"""Write a table in each format: terminal, Markdown, LaTeX, HTML and CSV."""

from __future__ import annotations

import csv
import html
import io
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text


@dataclass(frozen=True)
class Cell:
    """One cell of a table, as it is shown."""

    text: str
    bold: bool = False
    stderr: float | None = None
    """The standard error of the number. LaTeX leaves it out."""
    remark: str = ""
    """A remark beside the number: its ratio to another one, or how many items it is of."""
    meaning: str = ""
    """What the row is, for the reports of runs; tables leave it out."""


@dataclass(frozen=True)
class Section:
    """Rows that a rule sets apart from the others."""

    rows: Sequence[Sequence[Cell]]
    heading: str = ""


@dataclass(frozen=True)
class TextTable:
    """A table in sections. Every writer escapes the signs that its format reads as commands."""

    headings: Sequence[str]
    sections: Sequence[Section]
    title: str = ""
    """The text above the table. Markdown, LaTeX and CSV leave it out."""
    notes: Sequence[str] = ()
    """The text below the table: one line each, without a full stop."""
    left: int = 1
    """The number of columns of text, at the left. The others hold numbers."""


def terminal_table(table: TextTable, dense: bool = False, whole: bool = False) -> Group:
    """Return a table and its notes for rich.

    dense: for many columns, without padding and with standard errors on a second line. whole: no text is folded, for a
    file or pipe.
    """
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    grid = Table(title=Text(table.title), title_justify="left", box=box.HORIZONTALS, padding=(0, 0 if dense else 1))
    grid.collapse_padding, grid.pad_edge = True, False
    for heading in table.headings[: table.left]:
        grid.add_column(Text(heading), overflow="fold", min_width=7, max_width=None if whole else 40)
    for heading in table.headings[table.left :]:
        lines = Text(textwrap.fill(heading, 16, break_long_words=False))
        grid.add_column(lines, justify="right", overflow="fold", min_width=5, no_wrap=not dense)
    for section in table.sections:
        grid.add_section()
        if section.heading:
            grid.add_row(Text(section.heading, "bold"))
        for row in section.rows:
            grid.add_row(*(_terminal_cell(cell, dense) for cell in row), style="bold" if row[0].bold else None)
    return Group(grid, *(Text(f"{note}.", "dim") for note in table.notes))


def _terminal_cell(cell: Cell, dense: bool) -> Text:
    from rich.text import Text

    if not dense:
        return Text(_one_line(cell, str))
    remark = f" ({cell.remark})" if cell.remark else ""
    error = f"\n± {cell.stderr:.3f}" if cell.stderr is not None else ""
    return Text.assemble((cell.text, "bold" if cell.bold else ""), (remark + error, "dim"))


def markdown(table: TextTable) -> str:
    """Return a GitHub table, an empty row between its sections and its notes as a list below it."""
    width = len(table.headings)

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    lines = [line(map(escape_markdown, table.headings)), "|" + "---|" * table.left + "---:|" * (width - table.left)]
    for i, section in enumerate(table.sections):
        if i or section.heading:
            heading = f"*{escape_markdown(section.heading)}*" if section.heading else ""
            lines.append(line([heading, *[""] * (width - 1)]))
        for row in section.rows:
            lines.append(line(_one_line(cell, escape_markdown, "**{}**") for cell in row))
    lines += ["", *(f"- {escape_markdown(note)}." for note in table.notes)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _one_line(
    cell: Cell, escape: Callable[[str], str], bold: str = "{}", error: str = " ± {:.3f}", remark: str = " ({})"
) -> str:
    """Return a cell in one line; bold, error, remark: the patterns of its parts."""
    text = escape(cell.text)
    text = bold.format(text) if cell.bold else text
    text += error.format(cell.stderr) if cell.stderr is not None else ""
    return text + (remark.format(escape(cell.remark)) if cell.remark else "")


def escape_markdown(text: str) -> str:
    """Return text whose signs mean nothing to Markdown."""
    return re.sub(r"([\\|*`<\[\]])", r"\\\1", text)


def latex(table: TextTable) -> str:
    """Return a tabular for booktabs, as in the paper: a column for values, and one for ratios where there are any.

    The notes stand before it as comments.
    """
    rows = [row for section in table.sections for row in section.rows]
    widths = [1 + any(row[i].remark for row in rows) for i in range(len(table.headings))]
    spec = "l" + "r" * sum(widths[1:])
    first, *heads = map(_escape_latex, table.headings)
    heads = [rf"\multicolumn{{{width}}}{{c}}{{{head}}}" for head, width in zip(heads, widths[1:], strict=True)]
    lines = [f"% {note}." for note in (*table.notes, r"needs \usepackage{booktabs}")]
    lines += [rf"\begin{{tabular}}{{{spec}}}", r"\toprule"]
    lines.append(" & ".join([first.capitalize(), *heads]) + r" \\")
    for section in table.sections:
        lines.append(r"\midrule")
        if section.heading:
            lines.append(rf"\multicolumn{{{len(spec)}}}{{l}}{{\textit{{{_escape_latex(section.heading)}}}}} \\")
        for row in section.rows:
            cells = [text for cell, width in zip(row, widths, strict=True) for text in _latex_cells(cell)[:width]]
            lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _latex_cells(cell: Cell) -> list[str]:
    """Return a value, with a proper minus sign and its standard error, and its remark."""
    text = re.sub(r"^-(?=\d)", "$-$", _escape_latex(cell.text))
    text = rf"\textbf{{{text}}}" if cell.bold else text
    text += rf" $\pm$ {cell.stderr:.3f}" if cell.stderr is not None else ""
    return [text, _escape_latex(cell.remark)]


_WORDS = {"\\": "textbackslash", "~": "textasciitilde", "^": "textasciicircum", "<": "textless", ">": "textgreater"}
_LATEX = str.maketrans(
    {sign: f"\\{word}{{}}" for sign, word in (_WORDS | {"|": "textbar", '"': "textquotedbl"}).items()}
    | {sign: f"\\{sign}" for sign in "&%$#_{}"}
    | {"↑": r"$\uparrow$", "↓": r"$\downarrow$", "→": r"$\to$", "–": "--", "±": r"$\pm$"}
    | {sign: f"$\\{word}$" for sign, word in {"θ": "theta", "α": "alpha", "β": "beta", "λ": "lambda"}.items()}
)


def _escape_latex(text: str) -> str:
    return text.translate(_LATEX)


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem }
table { border-collapse: collapse }
tbody { border-top: 1px solid }
th, td { padding: .2rem .8rem; text-align: right; font-weight: inherit }
th:first-child, caption { text-align: left }
""".strip()


def html_page(table: TextTable) -> str:
    """Return a page of its own, with the notes below the table."""
    head = f'<meta charset="utf-8">\n<title>{html.escape(table.title)}</title>\n<style>\n{_STYLE}\n</style>'
    return f'<!doctype html>\n<html lang="en">\n{head}\n{html_table(table)}</html>\n'


def html_table(table: TextTable) -> str:
    """Return a table with its title and its notes, as a part of a page or for a notebook."""
    width = len(table.headings)
    heads = (f'<th scope="col">{html.escape(heading)}</th>' for heading in table.headings)
    lines = [f"<table>\n<caption>{html.escape(table.title)}</caption>\n<thead><tr>{''.join(heads)}</tr></thead>"]
    for section in table.sections:
        heading = f'<tr><th colspan="{width}" scope="rowgroup"><i>{html.escape(section.heading)}</i></th></tr>'
        lines += ["<tbody>", *([heading] if section.heading else [])]
        for row in section.rows:
            texts = [_one_line(cell, html.escape, "<b>{}</b>", " <small>± {:.3f}</small>") for cell in row]
            cells = "".join(f"<td>{text}</td>" for text in texts[1:])
            lines.append(f'<tr><th scope="row">{texts[0]}</th>{cells}</tr>')
        lines.append("</tbody>")
    notes = (f"<li>{html.escape(note)}.</li>" for note in table.notes)
    return "\n".join([*lines, "</table>", "<ul>", *notes, "</ul>"]) + "\n"


def csv_lines(rows: Iterable[Iterable[object]]) -> str:
    """Return rows as CSV: numbers have all their digits, None is empty."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(rows)
    return stream.getvalue()
