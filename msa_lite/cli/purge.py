"""msa-lite purge: list and remove what still holds the data of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from msa_lite.cli.help import Command, takes_json, takes_run
from msa_lite.cli.output import print_json, show

if TYPE_CHECKING:
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
    from msa_lite.pipeline.purge.purge import purge, search_folders

    if places:
        if yes:
            raise click.UsageError("--search only prints files; leave out --yes")
        found = search_folders(run, places)
        show(found, as_json, *found.files)
        for fault in found.unread if not as_json else ():
            click.echo(f"not searched: {fault}", err=True)
        return
    result = purge(run, remove=yes)
    if as_json:
        print_json(result)
        return
    click.echo("\n".join(_lines(result)))


def _lines(result: Purge) -> Iterator[str]:
    """Yield what holds the data, what stays, what is elsewhere, and what to do next."""
    from msa_lite.io.console.progress import readable
    from msa_lite.pipeline.purge.purge import AFTER, UNKNOWN, purge_command
    from msa_lite.report.run.provenance import PURGED_FILE

    if result.holdings:
        verb = "was removed" if result.removed else "can be removed"
        yield f"{result.folder}: holds the data, and {verb} ({len(result.holdings)} items, {readable(result.nbytes)}):"
    else:
        before = f" since it was purged ({result.purged})" if result.purged else ""
        yield f"{result.folder}: nothing that msa-lite made in it holds the data{before}"
    yield from _aligned((item.name, f"{readable(item.nbytes):>9}  {item.reason}") for item in result.holdings)
    for title, remarks in (("stays", result.kept), ("left alone", result.strays)):
        if remarks:
            yield f"\n{title}:"
        yield from _aligned((remark.name, remark.reason) for remark in remarks[:_MOST])
        if len(remarks) > _MOST:
            yield f"  … and {len(remarks) - _MOST} more"
    yield "\nnot removed by this command:"
    yield from (f"  - {line}" for line in result.elsewhere)
    yield f"\n{UNKNOWN}"
    if result.removed and result.holdings:
        yield f"\n{PURGED_FILE} lists what was removed; `msa-lite verify {result.folder}` checks what stays"
    elif result.holdings:
        yield f"\nnothing was removed. To remove what holds the data: {purge_command(result.folder)}\n{AFTER}"


def _aligned(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Return lines of names with texts beside them."""
    pairs = list(rows)
    width = max((len(name) for name, _ in pairs), default=0)
    return [f"  {name:<{width}}  {text}" for name, text in pairs]
