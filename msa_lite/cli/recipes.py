"""msa-lite recipes: what is shipped, what a recipe says, whether it is right, and the schema for editors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from msa_lite.cli.completion import complete_recipe

if TYPE_CHECKING:
    from msa_lite.recipe import Recipe, TrainingRecipe


@click.group()
def command() -> None:
    """List, show and check recipes."""


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_recipes(as_json: bool) -> None:
    """Recipes that come with msa-lite."""
    from msa_lite.cli.output import print_json
    from msa_lite.recipe import shipped_recipes, title_of

    titles = {name: title_of(path) for name, path in shipped_recipes().items()}
    if as_json:
        print_json(titles)
        return
    width = max(map(len, titles), default=0)
    for name, title in titles.items():
        click.echo(f"{name:<{width}}  {title}")


@command.command()
@click.argument("name", shell_complete=complete_recipe)
def show(name: str) -> None:
    """Print a recipe as it is written, NAME being a shipped one or a file."""
    from msa_lite.recipe import find_recipe

    click.echo(find_recipe(name).read_text("utf-8"), nl=False)


@command.command()
@click.argument("path", shell_complete=complete_recipe)
@click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE ...]")
@click.option("--show-prompt", is_flag=True, help="Print one forget row as the models read it, instead of the recipe.")
@click.option("--json", "as_json", is_flag=True, help="Print the resolved recipe, or the row, as JSON.")
def validate(path: str, overrides: tuple[str, ...], show_prompt: bool, as_json: bool) -> None:
    """Check a recipe against the schema and print it with all defaults filled in.

    With --show-prompt, the forget set and the target's tokenizer are read, and one row is printed with special tokens
    and with ⟦marks⟧ around what is learnt.
    """
    from msa_lite.baselines.methods import check_grids
    from msa_lite.cli.output import print_json
    from msa_lite.recipe import Recipe, dump_recipe, load_any

    recipe = load_any(path, overrides)
    if isinstance(recipe, Recipe):
        check_grids(recipe.baseline.methods)
    if show_prompt:
        _show_prompt(recipe, as_json)
    elif as_json:
        print_json(recipe.model_dump(mode="json"))
    else:
        click.echo(dump_recipe(recipe), nl=False)


def _show_prompt(recipe: Recipe | TrainingRecipe, as_json: bool) -> None:
    from msa_lite.cli.output import print_json, quieten_libraries
    from msa_lite.errors import UsageError
    from msa_lite.pipeline.prompting import show_prompt
    from msa_lite.recipe import Recipe

    if not isinstance(recipe, Recipe):
        raise UsageError("--show-prompt: only for the recipe of a run")
    quieten_libraries(verbose=False)
    shown = show_prompt(recipe)
    if as_json:
        print_json({"prompts": [item.as_dict() for item in shown]})
        return
    for item in shown:
        click.secho(f"prompt: {item.form}", bold=True)
        click.echo(f"row {item.row} of {recipe.forget.data.path}: {item.tokens} tokens, {item.learnt} ⟦learnt⟧")
        click.echo(f"\n{item.marked()}\n")


@command.command()
@click.option("--kind", type=click.Choice(["run", "training"]), default="run", show_default=True)
def schema(kind: str) -> None:
    """Print the JSON schema of recipes of a kind, by which editors complete and check them."""
    from msa_lite.cli.output import print_json
    from msa_lite.recipe import Recipe, TrainingRecipe

    print_json((Recipe if kind == "run" else TrainingRecipe).model_json_schema())
