"""msa-lite verify: check that a folder, or a whole run, is as it was written."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(folder: Path, as_json: bool) -> int:
    """Check every file of FOLDER against its manifest, by hash.

    FOLDER is a model, a vector, an evaluation, or a run with all of these. The manifest is checked against its own
    hash. Files that no manifest names are listed too.

    \b
    msa-lite verify runs/mine/model
    msa-lite verify runs/mine
    """
    from msa_lite.cli.output import print_json
    from msa_lite.errors import MismatchError, join_faults
    from msa_lite.io.verify import unsealed, verify_stages

    faults = verify_stages(folder)
    broken = sum(map(bool, faults.values()))
    lines = [_place(folder, stage, fault) for stage, of_stage in faults.items() for fault in of_stage]
    earlier = unsealed(faults)
    if as_json:
        stages = {str(stage.relative_to(folder)): of_stage for stage, of_stage in faults.items()}
        without = [str(stage.relative_to(folder)) for stage in earlier]
        print_json({"folder": str(folder), "faults": lines, "stages": stages, "unsealed": without})
        return MismatchError.exit_code if broken else 0
    for stage in earlier:
        click.echo(f"note: {stage}: made by an earlier version, whose manifest shows no change of itself", err=True)
    for stage, of_stage in faults.items():
        if not of_stage:
            click.echo(f"{stage}: every file is as it was written")
    if broken:
        of = f" ({broken} of {len(faults)} folders)" if len(faults) > 1 else ""
        raise MismatchError(join_faults(f"{folder}: differs from its manifest{of}:", lines, limit=100))
    return 0


def _place(folder: Path, stage: Path, fault: str) -> str:
    """Return a fault with the stage that it is in, as seen from the folder of the command."""
    return fault if stage == folder else f"{stage.relative_to(folder)}/{fault}"
