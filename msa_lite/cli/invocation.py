"""Open a command that works on a recipe: load it, print where the run goes, and make the one library call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Literal, TypeVar

import click

from msa_lite.cli.help import complete_recipe
from msa_lite.io.launch.crew import Ranks

DRY_RUN = "Print what would be done, read and written, and how long it would take. Write nothing."
Body = Callable[..., int | None]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Invocation:
    """A recipe and the options that all commands on recipes share."""

    recipe: Any
    """The recipe, with its overrides: a Recipe, or the TrainingRecipe of `msa-lite train`."""
    verbose: bool
    """Show what the libraries underneath print."""
    as_json: bool
    """Print one JSON object in the place of tables and lines."""
    checked: Mapping[str, bool] = field(default_factory=dict)
    """`force` of commands that check their memory first; it goes to the library function."""

    def dry_run(self, command: str, **options: Any) -> None:
        """Print what a command would do. Write nothing. options: those of the library function."""
        from msa_lite.cli.output import print_dry_run, print_json, quieten_libraries
        from msa_lite.pipeline import dry_run

        if not Ranks.current().first:
            return
        quieten_libraries(self.verbose)
        result = dry_run(self.recipe, command=command, **self.checked, **options)  # type: ignore[arg-type]
        print_json(result) if self.as_json else print_dry_run(result)

    def call(self, function: Callable[..., Result], **options: Any) -> Result:
        """Return what a library function makes of the recipe, with progress on stderr.

        If the target has no tokenizer, ask in a terminal whether to take the prior's, then call once more.
        """
        from msa_lite.cli.output import progress_bars, quieten_libraries
        from msa_lite.errors import NoTokenizerError

        quieten_libraries(self.verbose)
        can_ask = in_terminal() and Ranks.current().count == 1
        options |= self.checked
        with progress_bars() as progress:
            try:
                return function(self.recipe, progress=progress, **options)
            except NoTokenizerError as error:
                if error.offer is None or self.recipe.tokenizer is not None or not can_ask:
                    raise
                question = f"{self.recipe.target} was saved without a tokenizer. Take that of the prior, {error.offer}?"
                if not click.confirm(question, err=True):
                    raise
                recipe = self.recipe.model_copy(update={"tokenizer": error.offer})
            return function(recipe, progress=progress, **options)


def takes_recipe(
    kind: Literal["run", "training"] = "run", checks: bool = True, named: Mapping[str, str] | None = None
) -> Callable[[Body], Body]:
    """Give a command the arguments RECIPE and KEY.SUB=VALUE and the option --json; its body takes an `Invocation`.

    checks: False for a command that does not check its memory first, and so has no --force. named: recipes by the
    values of an option --model, which takes the place of RECIPE; the first is the default.
    """
    if named is None:
        source = click.argument("recipe", shell_complete=complete_recipe)
    else:
        text = "The model: made from nothing, or a real one."
        choice = click.Choice(list(named))
        source = click.option("--model", "recipe", type=choice, default=next(iter(named)), show_default=True, help=text)

    def decorate(body: Body) -> Body:
        @source
        @click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE ...]")
        @click.option("--dry-run", is_flag=True, help=DRY_RUN)
        @click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
        @click.pass_context
        @wraps(body)
        def command(
            context: click.Context,
            recipe: str,
            overrides: tuple[str, ...],
            dry_run: bool,
            as_json: bool,
            **options: Any,
        ) -> int | None:
            from msa_lite.cli.output import print_start
            from msa_lite.recipe import load_recipe, load_training

            recipe = named[recipe] if named else recipe
            loaded = (load_recipe if kind == "run" else load_training)(recipe, overrides)
            print_start(recipe, loaded.output)
            checked = {"force": options.pop("force")} if checks else {}
            invocation = Invocation(loaded, context.obj, as_json, checked)
            if not dry_run:
                return body(invocation, **options)
            choices = {name: options[name] for name in ("method", "which") if name in options}
            invocation.dry_run("run" if named else str(context.info_name), **choices)
            return None

        if checks:
            text = "Start even if the memory is too small by prediction (`msa-lite plan`)."
            command = click.option("--force", is_flag=True, help=text)(command)
        return command

    return decorate


def in_terminal() -> bool:
    """Check whether there is a user who can answer a question."""
    return sys.stdin.isatty() and sys.stderr.isatty()
