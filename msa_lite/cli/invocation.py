"""Open a command that works on a recipe: load it, print where the run goes, and make the one library call."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Literal, TypeVar

import click

from msa_lite.cli.again import again
from msa_lite.cli.help import RecipeName, takes_dry_run, takes_json, takes_overrides
from msa_lite.cli.output import print_dry_run, print_start, progress_bars, quieten_libraries
from msa_lite.io.launch.crew import Ranks

logger = logging.getLogger(__name__)

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

    def dry_run(self, command: str, **options: Any) -> None:
        """Print what a command would do. Write nothing. options: those of the library function."""
        from msa_lite.pipeline.verbs.dry_run import dry_run

        if Ranks.current().first:
            result = dry_run(self.recipe, command=command, **self.checked, **options)  # type: ignore[arg-type]
            print_dry_run(result, self.as_json)

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
    source = click.argument("recipe", type=RecipeName())
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
            dry_run: bool,
            as_json: bool,
            **options: Any,
        ) -> int | None:
            from msa_lite.recipe import load_recipe, load_training

            recipe = named[recipe] if named else recipe
            loaded = (load_recipe if kind == "run" else load_training)(recipe, overrides)
            print_start(recipe, loaded.output)
            _tell_former_run(loaded.output, recipe)
            quieten_libraries(context.obj)
            checked = {"force": options.pop("force")} if checks else {}
            invocation = Invocation(loaded, as_json, checked)
            if not dry_run:
                return body(invocation, **options)
            choices = {name: options[name] for name in ("method",) if name in options}
            name = PARTS.get(options.get("until") or "", "run" if named else str(context.info_name))
            invocation.dry_run(name, **choices)
            return None

        if checks:
            text = "Start even if the memory is too small by prediction (`msa-lite plan`)."
            command = click.option("--force", is_flag=True, help=text)(command)
        return command

    return decorate


def _tell_former_run(output: str, recipe: str) -> None:
    """Warn that a run with this output is in another folder: this one does not go on with it."""
    from msa_lite.pipeline.run.folder import find_former_run

    if Ranks.current().first and (former := find_former_run(output, recipe)):
        logger.warning(
            "there is a run in %s, made from another working folder; this one begins anew in %s. To go on there: %s",
            former,
            Path(output).absolute(),
            again(f"output={former}"),
        )


def in_terminal() -> bool:
    """Check whether there is a user who can answer a question."""
    return sys.stdin.isatty() and sys.stderr.isatty()
