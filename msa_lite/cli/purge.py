"""msa-lite purge: list and remove what still holds the data of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from msa_lite.cli.help import Command, takes_json, takes_run

if TYPE_CHECKING:
    from msa_lite.pipeline.purge.holdings import Remark
    from msa_lite.pipeline.purge.purge import Purge

_MOST = 30  # lines of files that are left alone


@click.command(cls=Command)
@takes_run
@click.option("--yes", is_flag=True, help="Remove what is listed. Nothing brings it back.")
@click.option("--search", "places", multiple=True, metavar="FOLDER", help="Print its files that hold rows.")
@takes_json
def purge_command(run: Path, yes: bool, places: tuple[str, ...], as_json: bool) -> None:
    """List what still holds the data of RUN, and with --yes remove it.

    RUN is the folder of a run. Vectors can put the data back, and records repeat its rows. The unlearned model, the
    report and the removal record stay. After that, RUN is not run again and takes no part in later merges. Outside of
    RUN nothing is removed; the data's own files, the target and earlier runs are named.

    --search looks for the rows of the recipe's files in other folders: in UTF-8, as they stand or escaped as in JSON,
    from 12 bytes on. It sees nothing in packed files (Parquet, zip, PDF) and other encodings.

    \b
    msa-lite purge runs/mine         # only lists
    msa-lite purge runs/mine --yes   # removes what was listed
    msa-lite purge runs/mine --search ~/notes --search runs   # before the data's files are gone
    """
    from msa_lite.cli.output import print_json
    from msa_lite.pipeline.purge.purge import UNKNOWN, purge
    from msa_lite.pipeline.purge.rows import search_folders

    if places:
        if yes:
            raise click.UsageError("--search only prints files; leave out --yes")
        found = search_folders(run, places)
        if as_json:
            print_json(found)
            return
        for name in found.files:
            click.echo(name)
        for fault in found.unread:
            click.echo(f"not searched: {fault}", err=True)
        return
    result = purge(run, remove=yes)
    if as_json:
        print_json(result)
        return
    _print_holdings(result)
    _print_remarks("stays", result.kept)
    _print_remarks("left alone", result.strays[:_MOST])
    if len(result.strays) > _MOST:
        click.echo(f"  … and {len(result.strays) - _MOST} more")
    click.echo("\nnot removed by this command:")
    for line in result.elsewhere:
        click.echo(f"  - {line}")
    click.echo(f"\n{UNKNOWN}")
    _print_end(result)


def _print_holdings(result: Purge) -> None:
    from msa_lite.io.console.progress import readable

    if not result.holdings:
        before = f" since it was purged ({result.purged})" if result.purged else ""
        click.echo(f"{result.folder}: nothing that msa-lite made in it holds the data{before}")
        return
    verb = "was removed" if result.removed else "can be removed"
    count = f"{len(result.holdings)} item{'s' if len(result.holdings) > 1 else ''}"
    click.echo(f"{result.folder}: holds the data, and {verb} ({count}, {readable(result.nbytes)}):")
    width = max(len(holding.name) for holding in result.holdings)
    for holding in result.holdings:
        click.echo(f"  {holding.name:<{width}}  {readable(holding.nbytes):>9}  {holding.reason}")


def _print_remarks(title: str, remarks: Sequence[Remark]) -> None:
    if remarks:
        click.echo(f"\n{title}:")
        width = max(len(remark.name) for remark in remarks)
        for remark in remarks:
            click.echo(f"  {remark.name:<{width}}  {remark.reason}")


def _print_end(result: Purge) -> None:
    from msa_lite.pipeline.purge.purge import AFTER, purge_command
    from msa_lite.report.run.provenance import PURGED_FILE

    if not result.holdings:
        return
    if result.removed:
        click.echo(f"\n{PURGED_FILE} lists what was removed; `msa-lite verify {result.folder}` checks what stays")
    else:
        click.echo(f"\nnothing was removed. To remove what holds the data: {purge_command(result.folder)}\n{AFTER}")
