"""msa-lite recipes: list, show, copy and check recipes; print the schema for editors."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Literal

import click

from msa_lite.cli.help import Group, RecipeName, takes_json, takes_overrides
from msa_lite.cli.output import print_data, print_json, print_wrapped, quieten_libraries, show
from msa_lite.errors import RecipeError, UsageError

if TYPE_CHECKING:
    from msa_lite.recipe import Recipe, TableRecipe, TrainingRecipe


@click.group(cls=Group)
def recipes_command() -> None:
    """List, show, copy and check recipes.

    \b
    msa-lite recipes list
    msa-lite recipes copy tofu/forget10 my.yaml
    msa-lite recipes validate my.yaml
    """


@recipes_command.command("list")
@takes_json
def list_recipes(as_json: bool) -> None:
    """List the recipes that come with msa-lite.

    \b
    msa-lite recipes list
    msa-lite recipes list --json
    """
    from msa_lite.recipe import shipped_recipes, title_of

    titles = {name: title_of(path) for name, path in shipped_recipes().items()}
    width = max(map(len, titles), default=0)
    show(titles, as_json, *(f"{name:<{width}}  {title}" for name, title in titles.items()))


@recipes_command.command("show")
@click.argument("recipe", type=RecipeName())
@takes_json
def show_recipe(recipe: str, as_json: bool) -> None:
    """Print RECIPE as it is written, with its comments.

    RECIPE is a YAML file, or the name of a shipped recipe.

    \b
    msa-lite recipes show tofu/forget10
    msa-lite recipes show train/tofu
    """
    from msa_lite.io.files.reading import parse_yaml, read_text
    from msa_lite.recipe import find_recipe, title_of

    file = find_recipe(recipe)
    text = read_text(file, kind=RecipeError)
    if as_json:
        values = parse_yaml(text, str(file), RecipeError)
        print_json({"file": str(file), "title": title_of(file), "text": text, "recipe": values})
    else:
        print_data(text)


@recipes_command.command()
@click.argument("name", type=RecipeName())
@click.argument("file", type=click.Path())
@takes_json
def copy(name: str, file: str, as_json: bool) -> None:
    """Copy the shipped recipe NAME, with its comments, to the new file FILE.

    The JSON schema of its kind is written beside it; a comment in the copy leads editors there.
    Relative paths in both start from the working folder, so the copy does the same as the original.

    \b
    msa-lite recipes copy tofu/forget10 my.yaml
    msa-lite recipes copy train/small my-target.yaml
    """
    from msa_lite.recipe import TableRecipe, TrainingRecipe, copy_recipe, load_any

    path, schema = copy_recipe(name, file)
    starts: dict[type, str] = {TrainingRecipe: "msa-lite train", TableRecipe: "msa-lite table"}
    start = starts.get(type(load_any(path)), "msa-lite")
    after = f"{start} {shlex.quote(file)} --dry-run"
    if not as_json:
        click.echo(f"schema:  {schema}, by which editors check the recipe", err=True)
    value = {"file": str(path), "copy_of": name, "schema": str(schema), "next": after}
    show(value, as_json, f"written: {path}", f"next:    {after}")


@recipes_command.command()
@click.argument("recipe", type=RecipeName())
@takes_overrides
@click.option("--show-prompt", is_flag=True, help="Print one forget row as the models read it.")
@takes_json
def validate(recipe: str, overrides: tuple[str, ...], show_prompt: bool, as_json: bool) -> None:
    """Check RECIPE and print it with all defaults filled in.

    RECIPE is a YAML file, or the name of a shipped recipe. KEY.SUB=VALUE changes one of its keys. Only the keys and
    values are checked; the run checks models and data before it fits anything.

    --show-prompt reads the forget set and the target's tokenizer, and prints one row in place of the recipe: with
    special tokens, and with ⟦marks⟧ around the text that is learnt.

    \b
    msa-lite recipes validate my.yaml
    msa-lite recipes validate my.yaml --show-prompt prompt=chat
    """
    from msa_lite.baselines.methods import check_grids
    from msa_lite.recipe import Recipe, dump_recipe, load_any

    loaded = load_any(recipe, overrides)
    if isinstance(loaded, Recipe):
        check_grids(loaded.baseline.methods)
    if show_prompt:
        _show_prompt(loaded, as_json)
    else:
        show(loaded.model_dump(mode="json"), as_json, dump_recipe(loaded).rstrip("\n"))


def _show_prompt(recipe: Recipe | TrainingRecipe | TableRecipe, as_json: bool) -> None:
    from rich.text import Text

    from msa_lite.pipeline.prepare.prompt import show_prompt
    from msa_lite.recipe import Recipe

    if not isinstance(recipe, Recipe):
        raise UsageError("--show-prompt: only for the recipe of a run")
    quieten_libraries(verbose=False)
    prompts = show_prompt(recipe)
    if as_json:
        print_json({"prompts": prompts})
        return
    for prompt in prompts:
        print_wrapped(Text(f"prompt: {prompt.form}", "bold"))
        click.echo(f"row {prompt.row} of {recipe.forget.data.path}: {prompt.tokens} tokens, {prompt.learnt} ⟦learnt⟧")
        click.echo(f"\n{prompt.marked()}\n")


@recipes_command.command()
@click.option(
    "--kind",
    type=click.Choice(["run", "training", "table"]),
    default="run",
    show_default=True,
    help="Recipes of a run, of `msa-lite train`, or of `msa-lite table`.",
)
def schema(kind: Literal["run", "training", "table"]) -> None:
    """Print the JSON schema of recipes.

    Editors complete and check recipes by it. `init` and `recipes copy` write it beside the recipe, which names it in a
    comment; for a recipe of your own, write that line yourself.

    \b
    msa-lite recipes schema
    msa-lite recipes schema --kind training > msa-lite-training.schema.json
    """
    from msa_lite.recipe import recipe_schema

    print_data(recipe_schema(kind))
