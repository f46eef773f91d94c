"""Check a result, publish it, and remove the data that a run still holds: verify, publish, purge."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from msa_lite.cli.arguments import Folder, in_terminal, takes_json, takes_run
from msa_lite.cli.output import print_json, print_published, show
from msa_lite.errors import MismatchError, UsageError, clip, join_faults, with_retries
from msa_lite.io.files.reading import local_path
from msa_lite.io.files.writing import json_form

if TYPE_CHECKING:
    from msa_lite.pipeline.purge.purge import Purge
    from msa_lite.publish.contents import Contents
    from msa_lite.publish.upload import Destination
    from msa_lite.record.check import RecordCheck

_ANSWERS = {
    "row": "among the rows to forget",
    "question": "only its question is among the rows to forget",
    "none": "not among the rows to forget",
}


@click.command()
@click.argument("folder", type=Folder())
@click.option("--record", type=click.Path(), help="Compare FOLDER, a model, with this removal record.")
@click.option("--allowed-signers", type=click.Path(), help="OpenSSH's file of those who may sign record.json.")
@click.option("--rows", type=click.Path(), help="Only tell which rows of this file were to be forgotten.")
@click.option("--key", type=click.Path(), help="With --rows: a copy of the run's record.key.")
@takes_json
def verify_command(
    folder: Path, record: str | None, allowed_signers: str | None, rows: str | None, key: str | None, as_json: bool
) -> int:
    """Check every file of FOLDER against its manifest, by hash.

    FOLDER is a model, a vector, an evaluation, or a run with all of these. The manifest is checked against its own
    hash. Files that no manifest names are listed too. Of a run, the removal record is checked as well: against its own
    hash and signature, against the files of the run, and against the records of earlier requests.

    --record takes the place of manifests, for a model that came without its run. All files that the record names must
    be there and have its hashes.

    \b
    msa-lite verify runs/mine/model
    msa-lite verify runs/mine
    msa-lite verify downloaded-model --record record.json
    msa-lite verify runs/mine --allowed-signers signers
    msa-lite verify runs/mine --rows suspects.jsonl
    """

    from msa_lite.record.check import verify

    if rows is not None:
        if record is not None:
            raise UsageError("--rows: asks the record in FOLDER; leave out --record")
        return _print_answers(folder, rows, key, as_json)
    if key is not None:
        raise UsageError("--key: only with --rows FILE")
    if record is not None:
        return _print_model(folder, local_path(record), allowed_signers, as_json)
    result = verify(folder, allowed_signers)
    if as_json:
        print_json(result)
        return MismatchError.exit_code if result.faults else 0
    for place, faults in result.stages.items():
        names = ", ".join(dict.fromkeys(fault.partition(": ")[0] for fault in faults))
        state = (
            f"differs from its manifest ({clip(names, _LONGEST)})" if names else "every file has its manifest's hash"
        )
        click.echo(f"{folder / place}: {state}")
    for check in result.records.values():
        _print_check(check)
    if result.unsealed:
        click.echo(f"note: {folder}: nothing here has the hash of: {clip(', '.join(result.unsealed), _LONGEST)}.")
    broken = sum(map(bool, result.stages.values()))
    of = f" ({broken} of {len(result.stages)} folders)" if len(result.stages) > 1 else ""
    headline = f"differs from its manifest{of}" if broken else "its removal record does not hold"
    if result.faults:
        raise MismatchError(join_faults(f"{folder}: {headline}:", result.faults, limit=100))
    return 0


_LONGEST = 500  # characters of a list of names


def _print_check(check: RecordCheck) -> None:
    """Print the findings of a record's check; of files that differ only the names."""
    if check.differing:
        click.echo(f"{check.file}: describes other files ({clip(', '.join(check.differing), _LONGEST)})")
    for fault in check.broken:
        click.echo(f"fault: {fault}")
    for line in [*check.statements, *(f"note: {note}" for note in check.notes)]:
        click.echo(line)


def _print_model(folder: Path, file: Path, allowed_signers: str | None, as_json: bool) -> int:
    """Say for each file of a model whether it is the one that a record describes."""
    from msa_lite.record.check import check_downloaded

    check = check_downloaded(folder, file, allowed_signers)
    if as_json:
        print_json({"folder": str(folder), "record": str(file), **json_form(check)})
        return MismatchError.exit_code if check.faults else 0
    click.echo("".join(f"{line}\n" for line in _aligned(check.files.items())), nl=False)
    _print_check(check)
    if check.faults:
        headline = f"{folder}: is not shown to be the model of {file}:"
        raise MismatchError(join_faults(headline, check.faults, limit=100))
    return 0


def _print_answers(folder: Path, rows: str, key: str | None, as_json: bool) -> int:
    """Say for each row of a file whether it was to be forgotten. The rows themselves are not printed."""
    from msa_lite.pipeline.run.report import find_forgotten

    answers = find_forgotten(folder, rows, key)
    count = sum(answer.match == "row" for answer in answers)
    values = [{"row": i, "match": a.match, "run": str(a.folder)} for i, a in enumerate(answers)]
    lines = []
    for number, answer in enumerate(answers):
        other = "" if answer.folder == folder else f" of the earlier run {answer.folder}"
        lines.append(f"row {number}: {_ANSWERS[answer.match]}{other}")
    lines.append(f"{count} of {len(answers)} rows were to be forgotten")
    show({"folder": str(folder), "rows": len(answers), "among": count, "answers": values}, as_json, *lines)
    return 0


@click.command()
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
def publish_command(
    folder: Path, repo: str, private: bool, dry_run: bool, yes: bool, as_json: bool, **wishes: Any
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
    from dataclasses import replace

    from huggingface_hub.utils import disable_progress_bars

    from msa_lite.publish.contents import PublishOptions, make_contents
    from msa_lite.publish.upload import check_name, find_destination, push

    options = PublishOptions(repo=repo, public=not private, **wishes)
    if dry_run:
        check_name(repo)
        contents = make_contents(folder, options)
        value = {"repo": repo, "private": private, "card": contents.card, **_described(contents)}
        show(value, as_json, contents.card, *_file_lines(contents))
        return 0
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
    if not in_terminal():
        disable_progress_bars()
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


_MOST = 30  # lines of files that stay
_STRAY = "may hold rows, for msa-lite does not know it (look at it; --also PATH removes it)"


@click.command()
@takes_run
@click.option("--yes", is_flag=True, help="Remove what is listed. Nothing brings it back.")
@click.option("--also", multiple=True, metavar="PATH", help="Remove this in RUN, too, which msa-lite does not know.")
@click.option("--search", "places", multiple=True, metavar="FOLDER", help="Print its files that hold rows.")
@takes_json
def purge_command(run: Path, yes: bool, also: tuple[str, ...], places: tuple[str, ...], as_json: bool) -> None:
    """List what still holds the data of RUN, and with --yes remove it.

    RUN is the folder of a run. Model, report and removal record stay, if they have the record's hashes. What msa-lite
    does not know may hold rows: it is left, and the exit status is 4, until you move it elsewhere or name it with
    --also. After that, RUN is not run again and takes no part in later merges. What lies outside of RUN is only named.

    --search looks for the recipe's rows: in UTF-8, as they stand or escaped as in JSON, from 12 bytes on. It sees
    nothing in packed files (Parquet, zip, PDF) and other encodings.

    \b
    msa-lite purge runs/mine         # only lists
    msa-lite purge runs/mine --yes   # removes what was listed
    msa-lite purge runs/mine --yes --also notes.txt --also model-copy
    msa-lite purge runs/mine --search ~/notes --search runs   # before the data's files are gone
    """
    from msa_lite.pipeline.purge.purge import purge, search_folders

    if places:
        if yes or also:
            raise click.UsageError("--search only prints files; leave out --yes and --also")
        found = search_folders(run, places)
        show(found, as_json, *found.files)
        for fault in found.unread if not as_json else ():
            click.echo(f"not searched: {fault}", err=True)
        return
    result = purge(run, remove=yes, also=also)
    show(result, as_json, *_lines(result))


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
    for title, remarks in (("stays", result.kept), (_STRAY, result.strays)):
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
