"""msa-lite run: the whole job of a recipe."""

from __future__ import annotations

import click


@click.command()
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE ...]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.pass_obj
def command(verbose: bool, recipe: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Do the whole job of RECIPE: vectors, the choice of alpha and beta, merge, scores, report.

    RECIPE is a YAML file or the name of a shipped recipe. A second run does only what is missing or has changed.

    \b
    msa-lite quickstart
    msa-lite my.yaml forget.alpha=1.25 output=runs/stronger
    """
    from msa_lite.cli.output import print_json, print_prior, print_reports, progress_bars, quieten_libraries
    from msa_lite.cli.tokenizer import with_tokenizer
    from msa_lite.recipe import load_recipe

    loaded = load_recipe(recipe, overrides)
    print_prior(loaded)
    from msa_lite.pipeline import run

    quieten_libraries(verbose)
    with progress_bars() as progress:
        result = with_tokenizer(loaded, lambda recipe: run(recipe, progress=progress))
    if result is None:  # this process of `accelerate launch` only helped with the sweep
        return
    if as_json:
        print_json(result.as_dict())
        return
    if result.reports:
        split = next(iter(result.reports.values())).split
        print_reports(result.reports, f"α = {result.alpha:g}, β = {result.beta:g}, scores on {split} rows")
    click.echo(f"unlearned model: {result.merged.folder} ({result.merged.describe().splitlines()[0]})")
    click.echo(f"report:          {result.folder / 'report.md'}")
