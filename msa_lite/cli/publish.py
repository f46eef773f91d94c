"""msa-lite publish: send a model or adapter to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from msa_lite.cli.help import Command, Folder, takes_json
from msa_lite.cli.invocation import in_terminal
from msa_lite.cli.output import print_json, print_published, show
from msa_lite.errors import UsageError, with_retries
from msa_lite.io.files.writing import json_form

if TYPE_CHECKING:
    from msa_lite.publish.contents import Contents
    from msa_lite.publish.upload import Destination


_GROUPS = {
    "Content": ["--as", "--license", "--accept", "--i-know-this-can-undo-the-removal"],
    "Repository": ["--private"],
    "Before it is sent": ["--dry-run", "--yes"],
}


@click.command(cls=Command, groups=_GROUPS)
@click.argument("folder", metavar="FOLDER", type=Folder())
@click.argument("repo")
@click.option("--private/--public", "private", default=True, show_default=True, help="Who sees it: the owner, or all.")
@click.option("--as", "form", type=click.Choice(["model", "adapter"]), help="The folder of a run to send.")
@click.option("--license", metavar="ID", help="The licence, if the target's card names none.")
@click.option("--accept", is_flag=True, help="Send it although its verdict is FAIL.")
@click.option("--i-know-this-can-undo-the-removal", "can_undo", is_flag=True, help="Send even a vector.")
@click.option("--dry-run", is_flag=True, help="Print card and files. Send nothing; no token is needed.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@takes_json
@click.pass_obj
def publish_command(
    verbose: bool, folder: Path, repo: str, private: bool, dry_run: bool, yes: bool, as_json: bool, **wishes: Any
) -> int:
    """Send a model or adapter, with its card, to the Hugging Face Hub.

    FOLDER is a model, an adapter, or a run with one of them. REPO is ACCOUNT/NAME. A new repository is private unless
    --public is given. What is to be sent is shown first. An upload that was interrupted is repeated by the same
    command, which sends only what is missing; until it is whole, the main branch stays as it was.

    \b
    msa-lite publish runs/mine alice/mine-unlearned --dry-run
    msa-lite publish runs/mine/model alice/mine-unlearned
    msa-lite publish runs/mine alice/mine-unlearned --public --yes
    """
    from contextlib import nullcontext
    from dataclasses import replace

    from huggingface_hub.utils import disable_progress_bars, logging

    from msa_lite.publish.contents import PublishOptions, make_contents
    from msa_lite.publish.upload import check_name, find_destination, push

    options = PublishOptions(repo=repo, public=not private, **wishes)
    if dry_run:
        check_name(repo)
        contents = make_contents(folder, options)
        value = {"repo": repo, "private": private, "card": contents.card, **_described(contents)}
        show(value, as_json, contents.card, *_file_lines(contents))
        return 0
    if not verbose:  # the library warns of each try that fails, with addresses; errors come as ours
        logging.set_verbosity_error()
    to = find_destination(repo, private)  # first: the files of a large model take minutes to check
    contents = make_contents(folder, replace(options, repo=to.repo))
    click.echo("\n".join(_file_lines(contents, to)), err=True)
    if not yes:
        if not in_terminal():
            error = UsageError("nothing was sent: there is nobody to ask; give --yes, or --dry-run for a look")
            raise with_retries(error, {"to send it": ["--yes"]})
        if not click.confirm("Send this?", err=True):
            click.echo("nothing was sent", err=True)
            return 130
    with nullcontext() if in_terminal() else disable_progress_bars():
        result = push(contents, to)
    if as_json:
        print_json(json_form(result) | _described(contents))
    else:
        print_published(result)
    return 0


def _described(contents: Contents) -> dict[str, Any]:
    files = [{"name": item.name, "bytes": item.nbytes, "sha256": item.sha256} for item in contents.files]
    return {"kind": contents.kind, "files": files, "cautions": list(contents.cautions)}


def _file_lines(contents: Contents, to: Destination | None = None) -> list[str]:
    """Return the files and sizes, where they go, what is deleted there, and what the user should know."""
    from msa_lite.io.console.progress import readable
    from msa_lite.publish.upload import stale_files

    lines = [f"to:     {to.describe()}"] if to else []
    count, size = len(contents.files), readable(sum(item.nbytes for item in contents.files))
    lines.append(f"sends:  the {contents.kind} {contents.folder}: {count} files, {size}")
    width = max(len(item.name) for item in contents.files)
    lines += [f"          {item.name:{width}}  {readable(item.nbytes)}" for item in contents.files]
    if to and (stale := stale_files(contents, to.files)):
        lines.append(f"deletes there: {', '.join(stale)}")
    return lines + [f"note:   {caution}" for caution in contents.cautions]
