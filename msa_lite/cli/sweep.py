"""msa-lite sweep: the choice of alpha and beta."""

from __future__ import annotations

import click

from msa_lite.cli.help import Command
from msa_lite.cli.invocation import Invocation, takes_recipe
from msa_lite.errors import UsageError


def _refuse_ray(context: click.Context, option: click.Parameter, is_given: bool) -> None:
    """Raise UsageError for an option of earlier versions, with the command that does the same."""
    if is_given:
        raise UsageError(
            "--ray is gone. To spread the points over processes: accelerate launch --num_processes N -m msa_lite sweep "
            "RECIPE.yaml (over several machines, give them a shared disk)"
        )


@click.command(cls=Command)
@click.option("--ray", "--workers", is_flag=True, hidden=True, expose_value=False, callback=_refuse_ray)
@takes_recipe()
def command(invocation: Invocation) -> None:
    """Choose alpha and beta of RECIPE on validation rows; merge the best point.

    RECIPE is a YAML file, or the name of a shipped recipe. KEY.SUB=VALUE changes one of its keys. Vectors are fitted
    once. Only the best point is merged, and then scored again. Test rows are left alone: `msa-lite run` on the same
    recipe goes on with them. A sweep that was stopped goes on where it was.

    Tables, pictures and a report for each point are in the run's sweep/ folder.

    \b
    msa-lite sweep my.yaml
    msa-lite sweep my.yaml 'forget.alpha=[0.5, 1.0, 1.5]' select.refine=1
    accelerate launch --num_processes 4 -m msa_lite sweep my.yaml   points are spread over 4 GPUs
    torchrun --nproc_per_node 2 -m msa_lite sweep my.yaml           over 2 processes, without GPUs
    """
    from msa_lite.cli.output import print_json, print_model, print_table
    from msa_lite.pipeline import sweep

    result = invocation.call(sweep)
    if result is None:  # of the processes of a launcher, the first one prints
        return
    if invocation.as_json:
        print_json(result)
        return
    from msa_lite.choose.table import points_table

    print_table(points_table(result.points), dense=True)
    click.echo(f"chosen:          {result.strengths}")
    for note in result.notes:
        click.echo(f"                 {note.strip()}")
    print_model(result.merged)
    click.echo(f"tables:          {result.folder / 'sweep'}")
