"""msa-lite init: a first recipe, from a few questions or flags."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from msa_lite.cli.help import Command, read_columns, takes_json
from msa_lite.cli.invocation import in_terminal

if TYPE_CHECKING:
    from msa_lite.pipeline.init.draft import Draft, Wishes

_KEYS = ("question", "answer", "messages", "text")
_SET = "FILE, FOLDER[:CONFIGURATION] or Hub id"


_GROUPS = {
    "Models": ["--target", "--prior"],
    "Data": ["--forget", "--retain", "--holdout", "--columns"],
    "Result": ["--output"],
}


@click.command(cls=Command, groups=_GROUPS)
@click.argument("file", type=click.Path(), default="my-request.yaml")
@click.option(
    "--target",
    type=click.Path(),
    metavar="MODEL",
    help="The finished model: a folder or repo[@revision], or a LoRA adapter.",
)
@click.option(
    "--prior",
    type=click.Path(),
    metavar="MODEL",
    help="The model that you fine-tuned from.  [default: the model that the target's files name]",
)
@click.option("--forget", type=click.Path(), metavar="DATA", help=f"The rows to forget: {_SET}.")
@click.option("--retain", type=click.Path(), metavar="DATA", help="Rows to keep, likewise.")
@click.option(
    "--holdout", type=click.Path(), metavar="DATA", help="Similar rows that no model was trained on, likewise."
)
@click.option(
    "--columns", help="Columns of these: question=Q,answer=A, messages=M or text=T; the usual ones are known."
)
@click.option("--output", type=click.Path(), help="Folder of the run.  [default: runs/ and the name of FILE]")
@takes_json
@click.pass_obj
def init_command(verbose: bool, file: str, as_json: bool, **options: Any) -> None:
    """Write a commented recipe to FILE, from a few questions or options.

    It looks at the models (sizes, chat template, what the target was tuned from), at the columns of the data and at
    this machine, proposes how to fit the vectors, and says why beside each line. It asks only what it cannot see, and
    only on a terminal. No weights are loaded. FILE is my-request.yaml unless you name another.

    The JSON schema of recipes is written beside it: editors complete and check the recipe by it.

    \b
    msa-lite init
    msa-lite init my-request.yaml --target ./my-finetuned-model --prior ./prior --forget delete.jsonl
    msa-lite init --target ./my-finetuned-model --prior ./prior --forget delete.jsonl --retain keep.jsonl
    """
    from msa_lite.cli.output import print_json, quieten_libraries
    from msa_lite.io.files.reading import local_path
    from msa_lite.pipeline.init.draft import init_recipe
    from msa_lite.recipe import check_new_file

    quieten_libraries(verbose)
    check_new_file(local_path(file))  # before any question
    options["columns"] = read_columns(options["columns"], _KEYS)
    wishes = _wishes(options)
    click.echo("looking at models, data and this machine", err=True)
    draft = init_recipe(file, wishes)
    if as_json:
        print_json(draft)
    else:
        _print(draft)


def _wishes(options: dict[str, Any]) -> Wishes:
    """Return the options, completed by questions on a terminal. Raise UsageError that names the options that lack."""
    from msa_lite.errors import UsageError
    from msa_lite.pipeline.init.draft import Wishes

    if in_terminal():
        _ask(options)
    missing = [f"--{name}" for name in ("target", "forget") if not options[name]]
    if missing:
        raise UsageError(f"{' and '.join(missing)}: needed, as there is no terminal to ask on (`msa-lite init --help`)")
    return Wishes(**options)


def _ask(options: dict[str, Any]) -> None:
    """Ask for what is not given and cannot be seen. An empty answer leaves out what is optional."""
    from msa_lite.pipeline.init.inspect import guess_prior

    if not options["target"]:
        options["target"] = _answer("The finished model (folder or repo[@revision])")
    if not options["prior"] and guess_prior(options["target"]) is None:
        options["prior"] = _answer("The model that you fine-tuned, which has not seen the rows")
    told = bool(options["forget"])
    if not options["forget"]:
        options["forget"] = _answer(f"The rows to forget ({_SET})")
    if not told:  # whoever gives options knows the others
        options["retain"] = options["retain"] or _answer("Rows to keep (empty: none)", optional=True)
        options["holdout"] = options["holdout"] or _answer(
            "Similar rows that no model saw (empty: none)", optional=True
        )
    if not options["columns"]:
        for name in ("forget", "retain", "holdout"):
            options["columns"] |= _columns(options[name], options["columns"])


def _columns(text: str | None, columns: dict[str, str]) -> dict[str, str]:
    """Ask which columns of a set hold questions and answers, if they are not known by their names."""
    from msa_lite.errors import ColumnsError
    from msa_lite.pipeline.init.inspect import inspect_set

    if not text:
        return {}
    try:
        inspect_set(text, columns)
    except ColumnsError as error:
        click.echo(f"{text} has the columns {', '.join(error.columns)}", err=True)
        choice = click.Choice(error.columns)
        return {key: click.prompt(f"The column of {key}s", type=choice, err=True) for key in ("question", "answer")}
    return {}


def _answer(question: str, optional: bool = False) -> str | None:
    answer = click.prompt(question, default="" if optional else None, show_default=False, err=True)
    return str(answer).strip() or None


def _print(draft: Draft) -> None:
    if sys.stdout.isatty():
        click.echo(draft.text)
    for note in draft.notes:
        click.echo(f"note:    {note}", err=True)
    click.echo(f"schema:  {draft.schema}, by which editors check the recipe", err=True)
    click.echo(f"written: {draft.file}")
    click.echo(f"next:    {draft.next}")
