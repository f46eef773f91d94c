"""The command line. A command's module is loaded when it is called; heavy imports stand inside the bodies."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from msa_lite.errors import UsageError, nearest
from msa_lite.io.launch.crew import Ranks, in_group

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# By section of the help: each command with the module that it stands in, and its purpose.
_SECTIONS = {
    "Start": {
        "quickstart": ("runs", "Try msa-lite in minutes, without GPU or downloads."),
        "init": ("recipes", "Write a first recipe, from a few questions."),
        "recipes": ("recipes", "List, show, copy and check recipes."),
        "plan": ("runs", "Predict memory, disk and time of a run."),
    },
    "Unlearn": {
        "run": ("runs", "Run a recipe: vectors, choice, merge, scores, report."),
        "merge": ("merge", "Merge vectors into a target."),
        "baseline": ("runs", "Run a method that MSA is compared with."),
        "train": ("runs", "Train targets, ideals and histories in stages."),
    },
    "Check": {
        "report": ("scores", "Write the report of a run: a page and JSON."),
        "ask": ("asking", "Ask the models of a run a question, side by side."),
        "web": ("asking", "Ask the models of a run in a page of the browser."),
        "attack": ("asking", "Attack a run's models: does it stay forgotten?"),
        "evaluate": ("scores", "Score a model on a benchmark."),
        "compare": ("scores", "Put reports side by side, as in the paper."),
        "probe": ("runs", "Check whether a prior has already seen the forget set."),
    },
    "Hand on": {
        "verify": ("handing_on", "Check every file of a run or folder against its manifest."),
        "publish": ("handing_on", "Send a model or adapter to the Hugging Face Hub."),
        "purge": ("handing_on", "List and remove what still holds the data of a run."),
    },
    "Tools": {
        "mergekit": ("merge", "Print a merge as a recipe for mergekit."),
        "table": ("scores", "Make a table of the paper, or one of your own."),
        "env": ("runs", "Print versions, devices, and what is missing for what."),
    },
}
_COMMANDS = {name: module for section in _SECTIONS.values() for name, (module, _) in section.items()}
# Commands that several processes of a launcher work on, or that know of them.
_SHARED = {"quickstart", "run", "train", "baseline", "probe", "evaluate"}


class _Commands(click.Group):
    """The commands of the table. A recipe in the place of a command means `run`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        import importlib

        module = importlib.import_module(f"msa_lite.cli.{_COMMANDS[name]}")
        command: click.Command = getattr(module, f"{name}_command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, _COMMANDS))
        for title, section in _SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:<{width}}", purpose) for name, (_, purpose) in section.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in _COMMANDS:
            from msa_lite.recipe import command_hint, shipped_recipes

            shipped = shipped_recipes()
            if not name.endswith((".yaml", ".yml")) and name not in shipped:
                if ctx.resilient_parsing:  # while the shell completes a word
                    return None, None, []
                hint = command_hint(name) or nearest(name, [*_COMMANDS, *shipped])
                raise UsageError(f"'{name}' is neither a command nor a recipe (a .yaml file, or a shipped one){hint}")
            args = ["run", *args]
        if args[0] not in _SHARED and not Ranks.current().first:  # of the processes of a launcher, the first one works
            raise click.exceptions.Exit(0)
        if sys.platform == "win32" and args[0] != "env":
            raise UsageError("msa-lite does not run on Windows itself; in WSL (`wsl --install`) it runs as on Linux")
        from msa_lite.cli.faults import remember_options

        called, command, rest = super().resolve_command(ctx, args)
        remember_options(command)
        return called, command, rest

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Offer the commands, and files and shipped recipes, which mean `run`."""
        from msa_lite.cli.arguments import complete_recipe

        return super().shell_complete(ctx, incomplete) + complete_recipe(ctx, self.params[0], incomplete)


_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True}


@click.group(cls=_Commands, context_settings=_SETTINGS)
@click.version_option(package_name="msa-lite")
@click.option("-v", "--verbose", is_flag=True, help="Print more, and tracebacks of errors; in any place.")
def cli(verbose: bool) -> None:
    """Remove the influence of chosen training data from a finished language model.

    \b
    msa-lite quickstart                        a first try, without GPU or downloads
    msa-lite RECIPE.yaml [KEY.SUB=VALUE ...]   the whole run: vectors, choice, merge, scores, report
    msa-lite merge --target T --forget V --alpha 1.0 --out FOLDER   only a merge, without torch
    """
    from msa_lite.cli.output import set_up_logging
    from msa_lite.io.console.libraries import silence_libraries

    set_up_logging(verbose)
    if not verbose:
        silence_libraries()


def main() -> None:
    """Run the command that the user typed; turn errors into messages and exit codes."""
    try:
        from msa_lite.cli.faults import report_lost
        from msa_lite.io.console.terminal import SafeText, safe_streams

        with safe_streams():
            status = _run(sys.argv[1:])
            if isinstance(sys.stdout, SafeText):
                sys.stdout.flush()
                status = status or report_lost(sys.stdout.fault)
    except KeyboardInterrupt:  # before a command began, or while its end is told
        sys.stderr.write("interrupted\n")
        status = 130
    if status and in_group():  # an ordinary exit would wait for a collective that the others never join
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)
    sys.exit(status)


def _run(args: list[str]) -> int:
    """Run a command and return its exit status: what the command returns, or 0."""
    from msa_lite.cli.faults import broken_pipe, remember, report_error
    from msa_lite.cli.output import repeat_warnings
    from msa_lite.io.files.addresses import check_secrets

    remember(args)
    verbose = not {"-v", "--verbose"}.isdisjoint(args)
    words = [word for word in args if word not in ("-v", "--verbose")]  # the root's, wherever the user puts it
    rank = Ranks.current().rank  # a run leaves the launcher's group, and then there is none
    try:
        try:
            # A text with blanks is a question to a model, and no address.
            check_secrets({f"word {n}": word for n, word in enumerate(words, 1) if len(word.split()) < 2})
            status = cli.main(["-v", *words] if verbose else words, prog_name="msa-lite", standalone_mode=False)
        finally:
            repeat_warnings()
    except SystemExit as end:
        if (error := broken_pipe(end)) is None:
            raise
        return report_error(error, verbose, rank)
    except (Exception, KeyboardInterrupt) as error:
        return report_error(error, verbose, rank)
    return status if isinstance(status, int) else 0
