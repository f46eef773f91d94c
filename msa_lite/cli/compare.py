"""msa-lite compare: reports side by side, as in the MSA paper."""

from __future__ import annotations

import click

from msa_lite.cli.help import Command


@click.command(cls=Command)
@click.argument("paths", nargs=-1, metavar="[LABEL=]FOLDER|REPORT ...")
@click.option(
    "--format", "form", type=click.Choice(["md", "tex", "csv", "html"]), help="Print this instead of a terminal table."
)
@click.option("--published", metavar="TABLE", help="A table of the MSA paper to put below; a wrong name lists them.")
@click.option("--metrics", help="Columns, separated by commas; those of the paper by default.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    paths: tuple[str, ...], form: str | None, published: str | None, metrics: str | None, as_json: bool
) -> None:
    """Put reports side by side, as in the MSA paper.

    The table has target, ideal, and each method with its ratio to the ideal. FOLDER is that of a run, whose baselines
    are taken in too, or of an evaluation; REPORT is a report.json. Models that were scored on different rows are
    compared on those that all share.

    \b
    msa-lite compare runs/mine
    msa-lite compare LoRA=runs/a full=runs/b --format md
    msa-lite compare runs/mine --published tofu-forget10-llama-3.2-1b --format tex
    """
    from msa_lite.cli.output import print_json, print_table
    from msa_lite.comparison.compare import FORMATS, compare, comparison_table
    from msa_lite.errors import UsageError

    if as_json and form:
        raise UsageError("give one of --json and --format")
    names = [name.strip() for name in metrics.split(",") if name.strip()] if metrics is not None else None
    comparison = compare(paths, published, names)
    if as_json:
        print_json(comparison)
    elif form:
        click.echo(FORMATS[form](comparison), nl=False)
    else:
        print_table(comparison_table(comparison), dense=True)
