"""msa-lite table: make a table of the paper, or one's own, in one command."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from msa_lite.cli.help import Command, read_names, takes_dry_run, takes_json, takes_overrides

if TYPE_CHECKING:
    from msa_lite.pipeline.table.work import TableResult


@click.command(cls=Command)
@click.argument("name", metavar="NAME|FILE|list")
@takes_overrides
@click.option("--size", type=click.Choice(["own", "small"]), default="own", show_default=True,
              help="small: the same rows with tiny Llamas, for two cores. data=FOLDER names its data.")  # fmt: skip
@click.option("--only", metavar="ROW,ROW", help="Labels of the rows to make; a wrong one lists them.")
@click.option("--force", is_flag=True, help="Start even if the memory is too small by prediction (`msa-lite plan`).")
@takes_dry_run
@takes_json
@click.pass_obj
def table_command(
    verbose: bool,
    name: str,
    overrides: tuple[str, ...],
    size: str,
    only: str | None,
    force: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Make a table of the MSA paper, or one of your own, in one command.

    It trains the models that are missing, runs MSA's rows and the baselines, and puts them side by side.

    NAME is one of the paper's tables; `list` prints their names. FILE is a table of your own, as
    `msa-lite recipes show table/NAME` prints one. KEY.SUB=VALUE changes one of its keys.

    A row that is done is not made again, and one that was stopped goes on. Several processes may make one table: each
    takes rows that no other works at. A row that fails does not stop the others; the exit code is then 4, and a second
    run tries it again. The verdict of a row changes nothing.

    \b
    msa-lite table list
    msa-lite table tofu-forget10-llama-3.2-1b --dry-run
    msa-lite table tofu-forget10-llama-3.2-1b 'methods=[npo, task_vector]' output=runs/mine
    msa-lite table restor-olmo-2-7b --size small data=restor/datasets
    """
    from msa_lite.cli.output import print_json, print_table, progress_bars, quieten_libraries
    from msa_lite.errors import StageError
    from msa_lite.pipeline.table.ahead import ahead_table, look_at_table
    from msa_lite.pipeline.table.work import table

    if name == "list":
        return _print_names(as_json)
    quieten_libraries(verbose)
    labels = read_names(only)
    if dry_run:
        ahead = look_at_table(name, overrides, size=size, only=labels)  # type: ignore[arg-type]
        if as_json:
            print_json(ahead)
        else:
            print_table(ahead_table(ahead))
        return 0
    with progress_bars() as progress:
        result = table(name, overrides, progress, size=size, only=labels, force=force)  # type: ignore[arg-type]
    if as_json:
        print_json(result)
    else:
        _print_result(result)
    return StageError.exit_code if result.of("failed") else 0


def _print_names(as_json: bool) -> int:
    """Print the names of the shipped tables, each with its title."""
    from msa_lite.cli.output import print_json
    from msa_lite.recipe import shipped_recipes, shipped_tables, title_of

    titles = {name: title_of(shipped_recipes()[f"table/{name}"]) for name in shipped_tables()}
    if as_json:
        print_json(titles)
        return 0
    width = max(map(len, titles), default=0)
    for name, title in titles.items():
        click.echo(f"{name:<{width}}  {title}")
    return 0


def _print_result(result: TableResult) -> None:
    """Print the comparison, the files, and the rows that are not done."""
    from msa_lite.cli.output import print_table
    from msa_lite.comparison.compare import FORMATS, comparison_table
    from msa_lite.io.console.progress import duration

    if result.comparison:
        print_table(comparison_table(result.comparison), dense=True)
        names = ", ".join(f"table.{name}" for name in (*FORMATS, "json"))
        click.echo(f"written: {result.folder}: {names}")
    known = [row.seconds for row in result.rows if row.seconds]
    click.echo(f"rows:    {len(result.of('done'))} of {len(result.rows)} are done, in {duration(sum(known))} of work")
    for row in result.of("failed"):
        click.echo(f"failed:  {row.label}: {row.error}")
    if busy := result.of("busy"):
        click.echo(f"at work: other processes make {', '.join(row.label for row in busy)}")
    if left := result.of("left"):
        click.echo(f"left:    {', '.join(row.label for row in left)}")
