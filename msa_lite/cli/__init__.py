"""The command line: one file a command, loaded when it is called, with heavy imports inside the bodies."""

from __future__ import annotations

import errno
import os
import sys
import traceback

import click

from msa_lite.errors import MsaError, UsageError, nearest

_COMMANDS = {
    "run": "Do the whole job of a recipe.",
    "probe": "Look whether a prior has already seen the forget set.",
    "sweep": "Choose alpha and beta on validation rows.",
    "vector": "Fit only the vectors of a recipe.",
    "merge": "Fold vectors into a target.",
    "mergekit": "Print a merge as a recipe for mergekit.",
    "evaluate": "Score a model on a benchmark.",
    "compare": "Put reports side by side, as in the paper.",
    "baseline": "Run a method that MSA is compared with.",
    "train": "Train targets, ideals and histories in stages.",
    "verify": "Re-hash a folder against its manifest.",
    "recipes": "List, show and check recipes.",
}


class _Commands(click.Group):
    """Commands by file name; a recipe in the place of a command means `run`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        import importlib

        command: click.Command = importlib.import_module(f"msa_lite.cli.{name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in _COMMANDS:
            from msa_lite.recipe import shipped_recipes

            shipped = shipped_recipes()
            if not name.endswith((".yaml", ".yml")) and name not in shipped:
                hint = nearest(name, [*_COMMANDS, *shipped])
                raise UsageError(f"'{name}' is neither a command nor a recipe (a .yaml file, or a shipped one){hint}")
            args = ["run", *args]
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="msa-lite")
@click.option("-v", "--verbose", is_flag=True, help="Say more about what is done; show tracebacks.")
@click.pass_context
def cli(ctx: click.Context, verbose: bool) -> None:
    """Remove the influence of chosen training data from a finished language model.

    \b
    msa-lite RECIPE.yaml [key.sub=value ...]   the whole job
    msa-lite quickstart                        a first try, without GPU or downloads
    msa-lite merge --target T --forget V --alpha 1.0 --out DIR
    """
    from msa_lite.cli.output import set_up_logging

    ctx.obj = verbose
    set_up_logging(verbose)


def main() -> None:
    """Entry point: runs a command and turns errors into messages and exit codes."""
    # OpenMP threads that spin while they wait make training 4 to 12 times slower as soon as another process holds a
    # core. It has to be said before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.exit(_run(sys.argv[1:]))


def _run(args: list[str]) -> int:
    try:
        status = cli.main(args, prog_name="msa-lite", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except click.ClickException as error:
        error.show()
        return 2
    except MsaError as error:
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted; finished stages stay, the same command resumes", err=True)
        return 130
    except MemoryError:
        message = "error: out of memory; finished stages stay, the same command resumes (merge: --threads 1)"
        click.echo(message, err=True)
        return 4
    except Exception as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not full or "-v" in args or "--verbose" in args:
            traceback.print_exc()
        hint = "the disk is full; make room" if full else "this was not expected and may be a bug"
        click.echo(f"error: {error} ({hint}); finished stages stay, the same command resumes", err=True)
        return 4
