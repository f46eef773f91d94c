"""msa-lite verify: is a folder still what it was when it was written?"""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(folder: Path, as_json: bool) -> int:
    """Re-hash every file of FOLDER (a model, vector, evaluation, …) against its manifest."""
    from msa_lite.cli.output import print_json
    from msa_lite.errors import MismatchError, join_faults
    from msa_lite.io.manifest import verify_folder

    faults = verify_folder(folder)
    if as_json:
        print_json({"folder": str(folder), "faults": faults})
        return MismatchError.exit_code if faults else 0
    if faults:
        raise MismatchError(join_faults(f"{folder}: differs from its manifest:", faults))
    click.echo(f"{folder}: every file is as it was written")
    return 0
