"""msa-lite vector: only the vectors of a recipe."""

from __future__ import annotations

import click

from msa_lite.cli.help import Command
from msa_lite.cli.invocation import Invocation, takes_recipe


@click.command(cls=Command)
@click.option(
    "--which",
    type=click.Choice(["forget", "retain", "all"]),
    default="all",
    show_default=True,
    help="Which vector to fit; all: those that the recipe uses.",
)
@takes_recipe()
def command(invocation: Invocation, which: str) -> None:
    """Fit the forget and retain vectors of RECIPE, and do nothing else.

    They go into vectors/ of the run's folder. RECIPE is a YAML file, or the name of a shipped recipe. KEY.SUB=VALUE
    changes one of its keys. Vectors that are there already are kept, and `msa-lite run` on the same recipe goes on with
    them.

    \b
    msa-lite vector my.yaml
    msa-lite vector my.yaml --which forget vector.lora.rank=64
    """
    from msa_lite.cli.output import print_json
    from msa_lite.pipeline import run_vectors

    folders = invocation.call(run_vectors, which=which)
    if folders is None:  # of the processes of a launcher, the first one prints
        return
    if invocation.as_json:
        print_json({"vectors": {folder.name: str(folder) for folder in folders}})
        return
    for folder in folders:
        click.echo(f"{folder.name} vector: {folder}")
