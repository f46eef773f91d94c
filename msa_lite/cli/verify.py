"""msa-lite verify: check that a folder, or a whole run with its removal record, is as it was written."""

from __future__ import annotations

from pathlib import Path

import click

from msa_lite.cli.help import Command, Folder, takes_json
from msa_lite.cli.output import print_json, show
from msa_lite.errors import MismatchError, UsageError, join_faults

_ANSWERS = {
    "row": "among the rows to forget",
    "question": "only its question is among the rows to forget",
    "none": "not among the rows to forget",
}


@click.command(cls=Command)
@click.argument("folder", type=Folder())
@click.option("--allowed-signers", type=click.Path(), help="OpenSSH's file of those who may sign record.json.")
@click.option("--rows", type=click.Path(), help="Only tell which rows of this file were to be forgotten.")
@click.option("--key", type=click.Path(), help="With --rows: a copy of the run's record.key.")
@takes_json
def verify_command(folder: Path, allowed_signers: str | None, rows: str | None, key: str | None, as_json: bool) -> int:
    """Check every file of FOLDER against its manifest, by hash.

    FOLDER is a model, a vector, an evaluation, or a run with all of these. The manifest is checked against its own
    hash. Files that no manifest names are listed too. Of a run, the removal record is checked as well: against its own
    hash and signature, against the rest of the run, and against the records of earlier requests.

    \b
    msa-lite verify runs/mine/model
    msa-lite verify runs/mine
    msa-lite verify runs/mine --allowed-signers signers
    msa-lite verify runs/mine --rows suspects.jsonl
    """

    from msa_lite.io.finished.seal import verify_stages
    from msa_lite.record.check import check_records

    if rows is not None:
        return _print_answers(folder, rows, key, as_json)
    if key is not None:
        raise UsageError("--key: only with --rows FILE")
    records = {str(place.relative_to(folder)): check for place, check in check_records(folder, allowed_signers).items()}
    stages = {str(place.relative_to(folder)): of for place, of in verify_stages(folder, needed=not records).items()}
    lines = [fault if place == "." else f"{place}/{fault}" for place, faults in stages.items() for fault in faults]
    of_records = [fault for check in records.values() for fault in check.faults]
    if as_json:
        print_json({"folder": str(folder), "faults": lines + of_records, "stages": stages, "records": records})
        return MismatchError.exit_code if lines or of_records else 0
    for place, faults in stages.items():
        if not faults:
            click.echo(f"{folder / place}: every file is as it was written")
    for check in records.values():
        for line in check.statements:
            click.echo(line)
        for line in check.notes:
            click.echo(f"note: {line}", err=True)
    broken = sum(map(bool, stages.values()))
    of = f" ({broken} of {len(stages)} folders)" if len(stages) > 1 else ""
    headline = f"{folder}: differs from its manifest{of}:" if lines else f"{folder}: its removal record does not hold:"
    if lines or of_records:
        raise MismatchError(join_faults(headline, lines + of_records, limit=100))
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
