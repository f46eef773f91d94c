"""msa-lite table: make a table of the paper, or one's own, in one command."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from msa_lite.cli.help import Command, read_names, takes_dry_run, takes_json, takes_overrides
from msa_lite.cli.output import print_table, progress_bars, quieten_libraries, show
from msa_lite.errors import StageError

if TYPE_CHECKING:
    from msa_lite.pipeline.table.work import TableResult


@click.command(cls=Command)
@click.argument("name", metavar="NAME|FILE")
@takes_overrides
@click.option("--only", metavar="ROW,ROW", help="Labels of the rows to make; a wrong one lists them.")
@click.option("--force", is_flag=True, help="Start even if the memory is too small by prediction (`msa-lite plan`).")
@takes_dry_run
@takes_json
@click.pass_obj
def table_command(
    verbose: bool, name: str, overrides: tuple[str, ...], only: str | None, force: bool, dry_run: bool, as_json: bool
) -> int:
    """Make a table of the MSA paper, or one of your own, in one command.

    It trains the models that are missing, runs MSA's rows and the baselines, and puts them side by side.

    NAME is one of the paper's tables; `msa-lite recipes list` prints their names. FILE is a table of your
    own, as `msa-lite recipes show table/NAME` prints one. KEY.SUB=VALUE changes one of its keys.

    A row that is done is not made again, and one that was stopped goes on. The jobs of a Slurm array divide the rows. A
    row that fails does not stop the others; the exit code is then 4, and a second run tries it again. The verdict of a
    row changes nothing.

    \b
    msa-lite table tofu-forget10-llama-3.2-1b --dry-run
    msa-lite table tofu-forget10-llama-3.2-1b 'methods=[npo, task_vector]' output=runs/mine
    """
    from msa_lite.pipeline.table.work import look_at_table, table

    quieten_libraries(verbose)
    labels = read_names(only)
    if dry_run:
        result = look_at_table(name, overrides, only=labels)
    else:
        with progress_bars() as progress:
            result = table(name, overrides, progress, only=labels, force=force)
    if dry_run or as_json:
        width = max(len(row.label) for row in result.rows)
        show(result, as_json, *(f"{row.label:<{width}}  {row.state}" for row in result.rows))
        for note in result.notes if not as_json else ():
            click.echo(f"note: {note}", err=True)
    else:
        _print_result(result)
    return StageError.exit_code if result.of("failed") else 0


def _print_result(result: TableResult) -> None:
    """Print the comparison, the files, and the rows that are not done."""
    from msa_lite.comparison.compare import FORMATS, comparison_table
    from msa_lite.io.console.progress import duration

    for name, comparison in result.comparisons.items():
        print_table(comparison_table(comparison), dense=True)
        click.echo(f"written: {result.folder}: {', '.join(f'{name}.{ending}' for ending in FORMATS)}")
    known = [row.seconds for row in result.rows if row.seconds]
    click.echo(f"rows:    {len(result.of('done'))} of {len(result.rows)} are done, in {duration(sum(known))} of work")
    for row in result.of("failed"):
        click.echo(f"failed:  {row.label}: {row.error}")
    if left := result.of("left"):
        click.echo(f"left:    {', '.join(row.label for row in left)}")
