"""msa-lite report: write the report of a run that is there already, finished or not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from msa_lite.cli.help import Command

if TYPE_CHECKING:
    from msa_lite.report.story import Story


@click.command(cls=Command)
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--show-examples", is_flag=True, help="Add ten questions with the models' answers. They hold the data.")
@click.option("--rows", is_flag=True, help="Print every row to forget, those still recited first.")
@click.option("--csv", "as_csv", is_flag=True, help="With --rows: print only the rows, as CSV.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, that of report.json or of the rows.")
def command(run: Path, show_examples: bool, rows: bool, as_csv: bool, as_json: bool) -> None:
    """Write report.html, report.md and report.json into RUN.

    A run writes them at its end; this writes them again, for a run that was stopped, or was
    made by an earlier version, or with examples. RUN is a recipe's output, or a baseline's folder below it. Every file
    is checked against its manifest first. Without --show-examples the report holds no row of the data.

    --rows prints the rows with the answers of target, unlearned model and ideal. With --show-examples they are in the
    report, too. In CSV, texts that a spreadsheet would run as a formula begin with an apostrophe; --json has them as
    they are.

    \b
    msa-lite report runs/mine
    msa-lite report runs/mine --rows
    msa-lite report runs/mine --rows --csv > rows.csv
    msa-lite report runs/mine/baselines/npo --show-examples
    """
    from msa_lite.cli.output import print_json
    from msa_lite.errors import UsageError
    from msa_lite.pipeline.run.report import report_run
    from msa_lite.report.rows import rows_csv
    from msa_lite.report.run_files import run_json

    if as_csv and not rows:
        raise UsageError("--csv goes with --rows")
    if as_csv and as_json:
        raise UsageError("--csv and --json: choose one of them")
    story = report_run(run, show_examples, rows)
    listed = story.forget_rows
    if as_csv and listed is not None:
        click.echo(rows_csv(listed), nl=False)
    elif as_json:
        print_json(listed if listed is not None else run_json(story))
    else:
        _print_report(run, story)


def _print_report(run: Path, story: Story) -> None:
    """Print the rows, if wanted, then the outcome, what is missing and the files."""
    from msa_lite.cli.output import print_outcome, print_rows
    from msa_lite.pipeline.run.report import REPORT_FILES

    if story.forget_rows is not None:
        print_rows(story.forget_rows)
    print_outcome(story.outcome, story.sentence)
    for line in story.missing:
        click.echo(f"missing: {line}")
    for name in REPORT_FILES:
        click.echo(f"report: {run / name}")
