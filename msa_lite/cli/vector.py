"""msa-lite vector: only the vectors of a recipe."""

from __future__ import annotations

from typing import Literal

import click

from msa_lite.cli.completion import complete_recipe


@click.command()
@click.argument("recipe", shell_complete=complete_recipe)
@click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE ...]")
@click.option("--which", type=click.Choice(["forget", "retain", "all"]), default="all", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def command(
    verbose: bool, recipe: str, overrides: tuple[str, ...], which: Literal["forget", "retain", "all"], as_json: bool
) -> None:
    """Fit the forget and retain vectors of RECIPE into its run folder, and nothing else."""
    from msa_lite.cli.output import print_json, print_prior, print_start, progress_bars, quieten_libraries
    from msa_lite.cli.tokenizer import with_tokenizer
    from msa_lite.recipe import load_recipe

    loaded = load_recipe(recipe, overrides)
    print_start(recipe, loaded.output)
    print_prior(loaded)
    from msa_lite.pipeline import run_vectors

    quieten_libraries(verbose)
    with progress_bars() as progress:
        folders = with_tokenizer(loaded, lambda recipe: run_vectors(recipe, which, progress=progress))
    if as_json:
        print_json({"vectors": {folder.name: str(folder) for folder in folders}})
        return
    for folder in folders:
        click.echo(f"{folder.name} vector: {folder}")
