"""What commands share: common arguments and options, and the way in for those that work on a recipe."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from msa_lite.cli.output import print_dry_run, print_start, progress_bars
from msa_lite.errors import UsageError, nearest
from msa_lite.io.console.libraries import require
from msa_lite.io.files.reading import local_path
from msa_lite.io.launch.crew import Ranks

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

logger = logging.getLogger(__name__)


class Folder(click.Path):
    """A folder that is there."""

    def __init__(self) -> None:
        super().__init__(exists=True, file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the folder. Raise UsageError for any other path, with the nearest name beside it."""
        try:
            folder = super().convert(value, param, ctx)
            if os.path.exists(folder) and not os.path.isdir(folder):  # click takes pipes and devices
                raise click.BadParameter(value)
            return folder
        except click.BadParameter as error:
            path = local_path(value)
            if path.exists():
                raise UsageError(f"{value}: is no folder that can be read; name a folder") from error
            place = Path(os.path.abspath(path.parent))
            beside = [item.name for item in place.iterdir() if item.is_dir()] if place.is_dir() else []
            raise UsageError(f"no such folder: {value} (looked in {place}){nearest(path.name, beside)}") from error


def complete_recipe(context: click.Context, argument: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer the shipped recipes, and files."""
    from click.shell_completion import CompletionItem

    from msa_lite.recipe import shipped_recipes

    names = [name for name in shipped_recipes() if name.startswith(incomplete)]
    return [*map(CompletionItem, names), CompletionItem(incomplete, type="file")]


takes_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
takes_dry_run = click.option(
    "--dry-run", "is_dry", is_flag=True, help="Print what would be done, and why. Write nothing."
)
takes_force = click.option(
    "--force", is_flag=True, help="Start even if the memory is too small by prediction (`msa-lite plan`)."
)
takes_overrides = click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE ...]")
takes_run = click.argument("run", type=Folder())


def read_names(text: str | None) -> list[str]:
    """Return the names in a text, with commas between them."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def given_options(options: Mapping[str, Any], *names: str) -> str:
    """Return those of the named options that are given, for a message. names: none for all options."""
    given = [name for name in names or options if options[name] not in (None, (), False)]
    return ", ".join(f"--{name.replace('_', '-')}" for name in given)


def read_columns(text: str | None, *more: str) -> dict[str, Any]:
    """Read question=Q,answer=A,ignore=I,ignore=J. Raise UsageError for keys that are unknown or do not go together.

    more: keys beside those of a source of questions.
    """
    keys = ("question", "answer", "messages", "system", "tools", "history", "input", "ignore", *more)
    columns: dict[str, Any] = {}
    for pair in text.split(",") if text is not None else ():
        key, equals, name = (piece.strip() for piece in pair.partition("="))
        if key not in keys or not equals or not name:
            raise UsageError(
                f"--columns: '{pair}' is not KEY=COLUMN with a key of {', '.join(keys)}{nearest(key, keys)}"
            )
        columns[key] = (*columns.get(key, ()), name) if key == "ignore" else name
    for alone in ("messages", "text"):
        if alone in columns and columns.keys() & {"question", "answer", "messages", "text"} != {alone}:
            raise UsageError(f"--columns: {alone} stands in the place of question and answer; name one or the other")
    return columns


Body = Callable[..., int | None]
Result = TypeVar("Result")
PARTS = {"moments": "moments", "vectors": "vector", "sweep": "sweep"}  # the verb of a part of a run, by `run --until`


@dataclass(frozen=True)
class Invocation:
    """A recipe and the options that all commands on recipes share."""

    recipe: Any
    """The recipe, with its overrides: a Recipe, or the TrainingRecipe of `msa-lite train`."""
    as_json: bool
    """Print one JSON object in the place of tables and lines."""
    checked: Mapping[str, bool]
    """`force` of commands that check their memory first; it goes to the library function."""

    def call(self, function: Callable[..., Result | None], **options: Any) -> Result:
        """Return what a library function makes of the recipe, with progress on stderr.

        Of the processes of a launcher, only the first one has a result; the command ends here in the others.
        """

        with progress_bars() as progress:
            result = function(self.recipe, progress=progress, **self.checked, **options)
        if result is None:
            raise click.exceptions.Exit(0)
        return result


def takes_recipe(
    kind: Literal["run", "training"] = "run", checks: bool = True, named: Mapping[str, str] | None = None
) -> Callable[[Body], Body]:
    """Give a command the arguments RECIPE and KEY.SUB=VALUE and the option --json; its body takes an `Invocation`.

    checks: False for a command that does not check its memory first, and so has no --force. named: recipes by the
    values of an option --model, which takes the place of RECIPE; the first is the default.
    """
    source = click.argument("recipe", shell_complete=complete_recipe)
    if named is not None:
        text = "The model: made from nothing, or a real one."
        choice = click.Choice(list(named))
        source = click.option("--model", "recipe", type=choice, default=next(iter(named)), show_default=True, help=text)

    def decorate(body: Body) -> Body:
        @source
        @takes_overrides
        @takes_dry_run
        @takes_json
        @click.pass_context
        @wraps(body)
        def command(
            context: click.Context,
            recipe: str,
            overrides: tuple[str, ...],
            is_dry: bool,
            as_json: bool,
            **options: Any,
        ) -> int | None:
            from msa_lite.recipe import load_recipe, load_training

            recipe = named[recipe] if named else recipe
            loaded = (load_recipe if kind == "run" else load_training)(recipe, overrides)
            print_start(recipe, loaded.output)
            require("train")
            checked = {"force": options.pop("force")} if checks else {}
            if not is_dry:
                return body(Invocation(loaded, as_json, checked), **options)
            if Ranks.current().first:
                from msa_lite.pipeline.verbs.commands import dry_run

                names = [name for name in ("method", "model", "accept") if options.get(name) is not None]
                choices: dict[str, Any] = {name: options[name] for name in names}
                verb: Any = PARTS.get(options.get("until") or "", "run" if named else str(context.info_name))
                print_dry_run(dry_run(loaded, command=verb, **checked, **choices), as_json)
            return None

        return takes_force(command) if checks else command

    return decorate


def in_terminal() -> bool:
    """Check whether there is a user who can answer a question."""
    return sys.stdin.isatty() and sys.stderr.isatty()
