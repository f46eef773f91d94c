"""Commands on reports: write that of a run, put several side by side."""

from __future__ import annotations

from pathlib import Path

import click

from msa_lite.cli.help import Command, read_names, takes_json, takes_run
from msa_lite.cli.output import print_data, print_json, print_outcome, print_rows, print_table
from msa_lite.errors import UsageError


@click.command(cls=Command)
@takes_run
@click.option("--show-examples", is_flag=True, help="Add ten questions with the models' answers. They hold the data.")
@click.option("--rows", is_flag=True, help="Print every row to forget, those still recited first.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, that of report.json or of the rows.")
def report_command(run: Path, show_examples: bool, rows: bool, as_json: bool) -> None:
    """Write report.html and report.json into RUN.

    A run writes them at its end; this writes them again, for a run that was stopped, or with examples. RUN is a
    recipe's output, or a baseline's folder below it. Every file is checked against its manifest first. Without
    --show-examples the report holds no row of the data.

    --rows prints the rows with the answers of target, unlearned model and ideal. With --show-examples they are in the
    report, too.

    \b
    msa-lite report runs/mine
    msa-lite report runs/mine --rows
    msa-lite report runs/mine/baselines/npo --show-examples
    """
    from msa_lite.pipeline.run.report import REPORT_FILES, report_run
    from msa_lite.report.page.run_files import run_json

    story = report_run(run, show_examples, rows)
    if as_json:
        print_json(story.forget_rows if story.forget_rows is not None else run_json(story))
        return
    if story.forget_rows is not None:
        print_rows(story.forget_rows)
    print_outcome(story.outcome, story.sentence)
    for line in (*(f"missing: {line}" for line in story.missing), *(f"report: {run / name}" for name in REPORT_FILES)):
        click.echo(line)


@click.command(cls=Command)
@click.argument("paths", nargs=-1, metavar="[LABEL=]FOLDER|REPORT ...")
@click.option(
    "--format", "form", type=click.Choice(["md", "tex", "csv", "html"]), help="Print this instead of a terminal table."
)
@click.option("--published", metavar="TABLE", help="A table of the MSA paper to put below; a wrong name lists them.")
@click.option(
    "--metrics",
    metavar="NAMES",
    help="Columns, with commas between them (docs/reference/metrics.md).  [default: those of the paper]",
)
@takes_json
def compare_command(
    paths: tuple[str, ...], form: str | None, published: str | None, metrics: str | None, as_json: bool
) -> None:
    """Put reports side by side, as in the MSA paper.

    The table has target, ideal, and each method with its ratio to the ideal. FOLDER is that of a run, whose baselines
    are taken in too, or of an evaluation; REPORT is a report.json. Models that were scored on different rows are
    refused.

    \b
    msa-lite compare runs/mine
    msa-lite compare LoRA=runs/a full=runs/b --format md
    msa-lite compare runs/mine --published tofu-forget10-llama-3.2-1b --format tex
    """
    from msa_lite.comparison.compare import FORMATS, compare, comparison_table

    if as_json and form:
        raise UsageError("give one of --json and --format")
    names = read_names(metrics) if metrics is not None else None
    comparison = compare(paths, published, names)
    if as_json:
        print_json(comparison)
    elif form:
        print_data(FORMATS[form](comparison))
    else:
        print_table(comparison_table(comparison), dense=True)
