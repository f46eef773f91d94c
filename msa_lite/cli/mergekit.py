"""msa-lite mergekit: print a merge as a recipe that mergekit runs."""

from __future__ import annotations

from typing import Any

import click

from msa_lite.cli.help import Command, complete_recipe
from msa_lite.cli.merge import INPUTS, read_strengths, strength_options


@click.command(cls=Command, groups={"Models and vectors": INPUTS, "Result": ["--dtype"]})
@click.argument("recipe", required=False, shell_complete=complete_recipe)
@click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE ...]")
@strength_options
@click.option("--dtype", default="same", show_default=True, help="same, bfloat16, float16 or float32.")
def command(recipe: str | None, overrides: tuple[str, ...], dtype: str, **options: Any) -> None:
    """Print a merge as YAML for mergekit.

    Its first lines hold the command that runs it. It is the merge of RECIPE's run, whose vectors are fitted already, or
    that of the options (as for `merge`).

    \b
    msa-lite mergekit runs/mine/recipe.yaml > merge.yml
    msa-lite mergekit --target T --forget F --alpha 1.25 > merge.yml
    """
    from msa_lite.errors import UsageError
    from msa_lite.merger import mergekit_recipe

    if recipe is None:
        if options["target"] is None:
            raise UsageError("give a recipe, or --target with the other options of `merge`")
        click.echo(mergekit_recipe(**read_strengths(options), dtype=dtype), nl=False)
        return
    clash = [f"--{name}" for name, value in options.items() if value not in (None, ())]
    if clash or dtype != "same":
        raise UsageError(
            f"the recipe already says {', '.join(clash) or '--dtype'}; leave it out, or leave out the recipe"
        )
    from msa_lite.recipe import load_recipe

    loaded = load_recipe(recipe, overrides)
    if loaded.prior_reason:
        click.echo(loaded.prior_reason, err=True)
    from msa_lite.pipeline import merge_arguments

    click.echo(mergekit_recipe(**merge_arguments(loaded)), nl=False)
