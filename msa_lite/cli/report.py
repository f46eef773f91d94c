"""msa-lite report: write the report of a run that is there already, finished or not."""

from __future__ import annotations

from pathlib import Path

import click

from msa_lite.cli.help import Command


@click.command(cls=Command)
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--show-examples", is_flag=True, help="Add ten questions with the models' answers. They hold the data.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, that of report.json.")
def command(run: Path, show_examples: bool, as_json: bool) -> None:
    """Write report.html, report.md and report.json into RUN.

    A run writes them at its end; this writes them again, for a run that was stopped, or was
    made by an earlier version, or with examples. RUN is a recipe's output, or a baseline's folder below it. Every file
    is checked against its manifest first. Without --show-examples the report holds no row of the data.

    \b
    msa-lite report runs/mine
    msa-lite report runs/mine/baselines/npo --show-examples
    """
    from msa_lite.cli.output import print_json
    from msa_lite.pipeline.reporting import REPORT_FILES, report_run
    from msa_lite.report.run_json import run_json

    story = report_run(run, show_examples)
    if as_json:
        print_json(run_json(story))
        return
    click.echo(story.sentence)
    for line in story.missing:
        click.echo(f"missing: {line}")
    for name in REPORT_FILES:
        click.echo(f"report: {run / name}")
