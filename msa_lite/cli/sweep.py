"""msa-lite sweep: the choice of alpha and beta."""

from __future__ import annotations

import click

from msa_lite.cli.completion import complete_recipe
from msa_lite.errors import UsageError


def _refuse_ray(context: click.Context, option: click.Parameter, is_given: bool) -> None:
    """Raise UsageError for an option of earlier versions, with the command that does the same."""
    if is_given:
        raise UsageError(
            "--ray is gone. To spread the points over processes: accelerate launch --num_processes N -m msa_lite sweep "
            "RECIPE.yaml (over several machines, give them a shared disk)"
        )


@click.command()
@click.argument("recipe", shell_complete=complete_recipe)
@click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE ...]")
@click.option("--ray", "--workers", is_flag=True, hidden=True, expose_value=False, callback=_refuse_ray)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.pass_obj
def command(verbose: bool, recipe: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Try all points (alpha, beta) of RECIPE on validation rows, and merge the best.

    Vectors are fitted once and no model is written before the best point is known; that one is merged and scored
    again. Test rows are not looked at: `msa-lite run` on the same recipe goes on with them. Tables and pictures lie in
    the run's sweep/ folder, with a report for each point; a sweep that was stopped goes on.

    \b
    msa-lite sweep my.yaml 'forget.alpha=[0.5, 1.0, 1.5]' select.refine=1
    accelerate launch -m msa_lite sweep my.yaml             points are spread over GPUs
    torchrun --nproc_per_node 2 -m msa_lite sweep my.yaml   over processes, without GPUs
    """
    from msa_lite.cli.output import print_json, print_prior, print_start, progress_bars, quieten_libraries
    from msa_lite.cli.tokenizer import with_tokenizer
    from msa_lite.recipe import load_recipe

    loaded = load_recipe(recipe, overrides)
    print_start(recipe, loaded.output)
    print_prior(loaded)
    from msa_lite.pipeline import sweep

    quieten_libraries(verbose)
    with progress_bars() as progress:
        result = with_tokenizer(loaded, lambda recipe: sweep(recipe, progress=progress))
    if result is None:
        return
    if as_json:
        print_json(result.as_dict())
        return
    from rich.console import Console

    from msa_lite.choose.table import points_table

    Console().print(points_table(result.points))
    point = ", ".join(f"{'α' if key == 'alpha' else 'β'} = {value:g}" for key, value in result.choice.values.items())
    click.echo(f"chosen:          {point}")
    for note in result.notes:
        click.echo(f"                 {note.strip()}")
    click.echo(f"unlearned model: {result.merged.folder} ({result.merged.describe().splitlines()[0]})")
    click.echo(f"tables:          {result.folder / 'sweep'}")
