"""msa-lite sweep: the choice of alpha and beta."""

from __future__ import annotations

import click

from msa_lite.cli.completion import complete_recipe


@click.command()
@click.argument("recipe", shell_complete=complete_recipe)
@click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE ...]")
@click.option("--ray", is_flag=True, help="Spread the points over a Ray cluster (RAY_ADDRESS), or over this machine.")
@click.option("--workers", type=click.IntRange(min=1), help="With --ray: how many at a time.  [default: one a GPU]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.pass_obj
def command(
    verbose: bool, recipe: str, overrides: tuple[str, ...], ray: bool, workers: int | None, as_json: bool
) -> None:
    """Try all points (alpha, beta) of RECIPE on validation rows, and merge the best.

    Vectors are fitted once and no model is written before the best point is known; that one is merged and scored
    again. Test rows are not looked at: `msa-lite run` on the same recipe goes on with them. Tables and pictures lie in
    the run's sweep/ folder, with a report for each point; a sweep that was stopped goes on.

    \b
    msa-lite sweep my.yaml 'forget.alpha=[0.5, 1.0, 1.5]' select.refine=1
    accelerate launch -m msa_lite sweep my.yaml             points are spread over GPUs
    torchrun --nproc_per_node 2 -m msa_lite sweep my.yaml   over processes, without GPUs
    msa-lite sweep my.yaml --ray --workers 4                over machines
    """
    from msa_lite.cli.output import print_json, print_prior, print_start, print_table, progress_bars, quieten_libraries
    from msa_lite.cli.tokenizer import with_tokenizer
    from msa_lite.errors import UsageError
    from msa_lite.recipe import load_recipe

    if workers and not ray:
        raise UsageError("--workers goes with --ray; processes of `accelerate launch` are counted by its own options")
    loaded = load_recipe(recipe, overrides)
    print_start(recipe, loaded.output)
    print_prior(loaded)
    from msa_lite.pipeline import sweep

    quieten_libraries(verbose)
    with progress_bars() as progress:
        ray_workers = (workers or 0) if ray else None
        result = with_tokenizer(loaded, lambda recipe: sweep(recipe, progress=progress, ray_workers=ray_workers))
    if result is None:
        return
    if as_json:
        print_json(result.as_dict())
        return
    from msa_lite.choose.table import points_table

    print_table(points_table(result.points), dense=True)
    point = ", ".join(f"{'α' if key == 'alpha' else 'β'} = {value:g}" for key, value in result.choice.values.items())
    click.echo(f"chosen:          {point}")
    for note in result.notes:
        click.echo(f"                 {note.strip()}")
    click.echo(f"unlearned model: {result.merged.folder} ({result.merged.describe().splitlines()[0]})")
    click.echo(f"tables:          {result.folder / 'sweep'}")
