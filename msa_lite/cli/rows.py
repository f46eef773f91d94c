"""Print the rows to forget with the models' answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msa_lite.report.rows import RowList

_MOST = 400  # characters of a text on a terminal
_STYLES = {"unlearned": "bold red"}  # of the mark


def print_rows(rows: RowList) -> None:
    """Print a count and one block a row: wrapped at words on a terminal, else one line for each text."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from msa_lite.cli.output import print_wrapped
    from msa_lite.report.rows import row_lines

    console = Console()
    print_wrapped(Text(rows.headline, "bold"))
    for remark in rows.remarks:
        print_wrapped(Text(remark))
    was_cut = False
    for row in rows.rows:
        console.print(f"\nrow {row.index}", highlight=False)
        grid = Table.grid(padding=(0, 2))
        for width in (10, max(7, len(rows.wording.failed))):
            grid.add_column(no_wrap=True, min_width=width)
        grid.add_column(overflow="fold")
        for name, mark, text in row_lines(row, rows.wording):
            if not console.is_terminal:
                console.print(Text(f"{name:<10}  {mark:<9} {text}"), soft_wrap=True)
                continue
            was_cut |= len(text) > _MOST
            shown = text if len(text) <= _MOST else f"{text[:_MOST].rstrip()} …"
            grid.add_row(Text(name), Text(mark, _STYLES.get(name, "")), Text(shown))
        if console.is_terminal:
            console.print(grid)
    if was_cut:
        print_wrapped(Text("Long texts are cut here; --csv has them whole."))
    console.print()
