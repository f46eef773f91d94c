"""msa-lite init: a first recipe, from a few questions or flags."""

from __future__ import annotations

from typing import Any

import click

from msa_lite.cli.help import Command, read_columns, takes_json
from msa_lite.cli.invocation import in_terminal
from msa_lite.cli.output import quieten_libraries, show
from msa_lite.errors import ColumnsError, UsageError

_KEYS = ("question", "answer", "messages", "text")
_SET = "FILE, FOLDER[:CONFIGURATION] or Hub id"
_GROUPS = {
    "Models": ["--target", "--prior"],
    "Data": ["--forget", "--retain", "--holdout", "--columns"],
    "Result": ["--output"],
}


def _option(name: str, kind: str, text: str) -> Any:
    return click.option(name, type=click.Path(), metavar=kind, help=text)


@click.command(cls=Command, groups=_GROUPS)
@click.argument("file", type=click.Path(), default="my-request.yaml")
@_option("--target", "MODEL", "The finished model: a folder or repo[@revision], or a LoRA adapter.")
@_option("--prior", "MODEL", "The model that you fine-tuned from.  [default: the model that the target's files name]")
@_option("--forget", "DATA", f"The rows to forget: {_SET}.")
@_option("--retain", "DATA", "Rows to keep, likewise.")
@_option("--holdout", "DATA", "Similar rows that no model was trained on, likewise.")
@click.option("--columns", help="Columns of these: question=Q,answer=A, messages=M or text=T; the usual are known.")
@_option("--output", "FOLDER", "Folder of the run.  [default: runs/ and the name of FILE]")
@takes_json
@click.pass_obj
def init_command(verbose: bool, file: str, as_json: bool, **options: Any) -> None:
    """Write a commented recipe to FILE, from a few questions or options.

    It looks at headers of the models, at what the target was tuned from, and at the columns of the data. It asks only
    what it cannot see, and only on a terminal. No weights are loaded. FILE is my-request.yaml unless you name another.

    The JSON schema of recipes is written beside it: editors complete and check the recipe by it.

    \b
    msa-lite init
    msa-lite init my-request.yaml --target ./my-finetuned-model --prior ./prior --forget delete.jsonl
    msa-lite init --target ./my-finetuned-model --prior ./prior --forget delete.jsonl --retain keep.jsonl
    """
    from msa_lite.io.files.reading import local_path
    from msa_lite.pipeline.init.draft import Wishes, init_recipe
    from msa_lite.recipe import check_new_file

    quieten_libraries(verbose)
    check_new_file(local_path(file))  # before any question
    options["columns"] = read_columns(options["columns"], _KEYS)
    if in_terminal():
        _ask(options)
    if missing := [f"--{name}" for name in ("target", "forget") if not options[name]]:
        raise UsageError(f"{' and '.join(missing)}: needed, as there is no terminal to ask on (`msa-lite init --help`)")
    click.echo("looking at models and data", err=True)
    draft = init_recipe(file, Wishes(**options))
    if not as_json:
        click.echo(f"schema:  {draft.schema}, by which editors check the recipe", err=True)
    show(draft, as_json, f"written: {draft.file}", f"next:    {draft.next}")


def _ask(options: dict[str, Any]) -> None:
    """Ask for what is not given and cannot be seen. An empty answer leaves out what is optional."""
    from msa_lite.pipeline.init.inspect import guess_prior, inspect_set

    options["target"] = options["target"] or _answer("The finished model (folder or repo[@revision])")
    if not options["prior"] and guess_prior(options["target"]) is None:
        options["prior"] = _answer("The model that you fine-tuned, which has not seen the rows")
    if not options["forget"]:  # whoever gives options knows the others
        options["forget"] = _answer(f"The rows to forget ({_SET})")
        for name, what in {"retain": "Rows to keep", "holdout": "Similar rows that no model saw"}.items():
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
