"""Print what a command would do: stages, inputs, outputs, time and disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from msa_lite.pipeline import DryRun


def print_dry_run(result: DryRun) -> None:
    """Print a dry run on stdout."""
    from msa_lite.budget.table import plan_lines, time_span
    from msa_lite.cli.output import print_table
    from msa_lite.report.formats import Cell, Section, TextTable

    rows = []
    for one in result.stages:
        time = "" if one.state == "done" else time_span(one.seconds)
        place = str(one.folder.relative_to(result.folder)) if one.folder else ""
        words = [one.label, one.state, time, place, "; ".join(one.reasons)]
        rows.append([Cell(text, one.state != "done" and text == one.state) for text in words])
    headings = ["stage", "state", "time", "folder", "reason"]
    print_table(TextTable(headings, [Section(rows)], "Dry run: nothing is written", left=5))
    for reading in result.reads:
        click.echo(f"reads:   {reading.role}: {reading.name}" + (f" ({reading.amount})" if reading.amount else ""))
    parts = [*([] if result.is_done else ["the folders of stages that are not done"]), *result.files]
    click.echo(f"writes:  {result.folder}: {', '.join(parts)}")
    unknown = any(one.state != "done" and one.seconds is None for one in result.stages)
    click.echo(
        f"time:    {time_span(result.seconds)}, by prediction" + (", without stages marked ?" if unknown else "")
    )
    if result.plan and not result.is_done:
        click.echo(next(line for line in plan_lines(result.plan) if line.startswith("disk:")))
    for note in result.notes:
        click.echo(f"note:    {note}", err=True)
    if result.is_done:
        click.echo("All stages are done: a run would check them, and write the report again.")
    elif result.plan:
        click.echo(result.plan.verdict)
