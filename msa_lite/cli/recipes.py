"""Recipes: write a first one (init); list, show, copy and check them; print their schema for editors."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any, Literal

import click

from msa_lite.cli.arguments import complete_recipe, in_terminal, read_columns, takes_json, takes_overrides
from msa_lite.cli.output import print_data, print_json, print_wrapped, show
from msa_lite.errors import ColumnsError, Faults, RecipeError, UsageError
from msa_lite.io.console.libraries import require

if TYPE_CHECKING:
    from msa_lite.recipe import Recipe, TableRecipe, TrainingRecipe


@click.group()
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
@click.argument("recipe", shell_complete=complete_recipe)
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
@click.argument("name", shell_complete=complete_recipe)
@click.argument("file", type=click.Path())
def copy(name: str, file: str) -> None:
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
    click.echo(f"schema:  {schema}, by which editors check the recipe", err=True)
    click.echo(f"written: {path}\nnext:    {start} {shlex.quote(file)} --dry-run")


@recipes_command.command()
@click.argument("recipe", shell_complete=complete_recipe)
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
    require("train")
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


_SET = "FILE, FOLDER[:CONFIGURATION] or Hub id"


def _option(name: str, kind: str, text: str) -> Any:
    return click.option(name, type=click.Path(), metavar=kind, help=text)


@click.command()
@click.argument("file", type=click.Path(), default="my-request.yaml")
@_option("--target", "MODEL", "The finished model: a folder or repo[@revision], or a LoRA adapter.")
@_option("--prior", "MODEL", "The model that you fine-tuned from.  [default: the model that the target's files name]")
@_option("--forget", "DATA", f"The rows to forget: {_SET}.")
@_option("--retain", "DATA", "Rows to keep, likewise.")
@_option("--holdout", "DATA", "Similar rows that no model was trained on, likewise.")
@click.option("--columns", help="Columns of these: question=Q,answer=A, messages=M, text=T, …; the usual are known.")
@_option(
    "--from", "CONFIG", "What made the target: a file of axolotl or LLaMA-Factory, or a folder that a Trainer wrote."
)
@takes_json
def init_command(file: str, as_json: bool, **options: Any) -> None:
    """Write a commented recipe to FILE, from a few questions or options.

    It looks at headers of the models, at what the target was tuned from, and at the columns of the data. It asks only
    what it cannot see, and only on a terminal. No weights are loaded. FILE is my-request.yaml unless you name another.

    The JSON schema of recipes is written beside it: editors complete and check the recipe by it.

    \b
    msa-lite init
    msa-lite init my-request.yaml --target ./my-finetuned-model --prior ./prior --forget delete.jsonl
    msa-lite init --from axolotl.yml --forget delete.jsonl
    """
    from msa_lite.io.files.reading import local_path
    from msa_lite.pipeline.verbs.elsewhere import read_training
    from msa_lite.pipeline.verbs.init import Wishes, init_recipe
    from msa_lite.recipe import check_new_file

    require("train")
    check_new_file(local_path(file))  # before any question
    options |= {"columns": read_columns(options["columns"], "text"), "config": options.pop("from")}
    faults = Faults()
    if options["config"]:
        with faults.gathered():
            read_training(options["config"], faults, [name for name, value in options.items() if value])
    if in_terminal():
        faults.check()
        _ask(options)
    needed = ("forget",) if options["config"] else ("target", "forget")
    if missing := [f"--{name}" for name in needed if not options[name]]:
        message = f"{' and '.join(missing)}: needed, as there is no terminal to ask on (`msa-lite init --help`)"
        faults.append(UsageError(message))
        faults.check()
    click.echo("looking at models and data", err=True)
    draft = init_recipe(file, Wishes(**options | {"target": options["target"] or ""}))
    if not as_json:
        click.echo(f"schema:  {draft.schema}, by which editors check the recipe", err=True)
    show(draft, as_json, f"written: {draft.file}", f"next:    {draft.next}")


def _ask(options: dict[str, Any]) -> None:
    """Ask for what is not given and cannot be seen. An empty answer leaves out what is optional."""
    from msa_lite.pipeline.verbs.init import guess_prior, inspect_set

    if not options["config"]:
        options["target"] = options["target"] or _answer("The finished model (folder or repo[@revision])")
        if not options["prior"] and guess_prior(options["target"]) is None:
            options["prior"] = _answer("The model that you fine-tuned, which has not seen the rows")
    if not options["forget"]:  # whoever gives options knows the others
        options["forget"] = _answer(f"The rows to forget ({_SET})")
        others = {"retain": "Rows to keep", "holdout": "Similar rows that no model saw"}
        for name, what in others.items() if not options["config"] else ():
            options[name] = options[name] or _answer(f"{what} (empty: none)", default="")
    for name in ("forget", "retain", "holdout") if not options["columns"] else ():
        try:
            if options[name]:
                inspect_set(options[name], options["columns"])
        except ColumnsError as error:
            click.echo(f"{options[name]} has the columns {', '.join(error.columns)}", err=True)
            choice = click.Choice(error.columns)
            for key in ("question", "answer"):
                options["columns"][key] = click.prompt(f"The column of {key}s", type=choice, err=True)


def _answer(question: str, default: str | None = None) -> str | None:
    answer = click.prompt(question, default=default, show_default=False, err=True)
    return str(answer).strip() or None
