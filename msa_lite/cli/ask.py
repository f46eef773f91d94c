"""msa-lite ask: the models of a run answer the same question."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from msa_lite.cli.help import Command, takes_run
from msa_lite.cli.output import print_json, progress_bars, quieten_libraries
from msa_lite.errors import UsageError
from msa_lite.io.files.writing import json_form

if TYPE_CHECKING:
    from msa_lite.pipeline.ask import Panel

_PROMPT = "question> "


@click.command(cls=Command)
@takes_run
@click.argument("question", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each question.")
@click.pass_obj
def ask_command(verbose: bool, run: Path, question: str | None, as_json: bool) -> int:
    """Ask target, unlearned model and ideal of RUN the same QUESTION.

    RUN is the folder of a run, or of a baseline in it. Without QUESTION, questions are read line by line until an empty
    line or Ctrl-D; from a file or pipe, until its end. The prompt is that of the run, answers are greedy and no longer
    than in its scores. A run over texts continues what you write. Nothing is written into RUN.

    \b
    msa-lite ask runs/quickstart "Where was Elitan Wenthorp born?"
    msa-lite ask runs/quickstart < questions.txt
    """
    from msa_lite.pipeline.ask import open_panel

    quieten_libraries(verbose)
    panel = open_panel(run, several=question is None)
    _print_head(panel)
    try:
        if question is not None:
            _answer(panel, question, as_json, one=True)
            return 0
        status = 0
        for line in _lines():
            if not as_json and not sys.stdin.isatty():  # a terminal shows what was typed
                click.echo(f"{_PROMPT}{_plain(line)}")
            try:
                _answer(panel, line, as_json)
            except UsageError as error:  # the next question may be a better one
                click.echo(f"error: {error}", err=True)
                status = error.exit_code
        return status
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        return 130


def _print_head(panel: Panel) -> None:
    """Print on stderr how the models are asked, and which are missing."""
    how = "texts, so what you write is continued" if panel.continues else panel.prompter.sentence
    click.echo(f"prompt: {how}; at most {panel.run.recipe.max_new_tokens} tokens, greedy", err=True)
    for name, reason in panel.missing.items():
        click.echo(f"no {name}: {reason}", err=True)


def _lines() -> Iterator[str]:
    """Yield questions from standard input; from a terminal, with a prompt and until an empty line."""
    is_terminal = sys.stdin.isatty()
    while True:
        if is_terminal:
            click.echo(_PROMPT, nl=False, err=True)
        line = sys.stdin.readline()
        if not line or (is_terminal and not line.strip()):
            if is_terminal and not line:
                click.echo(err=True)
            return
        if line.strip():
            yield line.strip()


def _answer(panel: Panel, question: str, as_json: bool, one: bool = False) -> None:
    """Print each answer as it comes; as JSON, all of them together."""

    if as_json:
        with progress_bars() as progress:
            value = panel.answers(question, progress)
        print_json(value) if one else click.echo(json.dumps(json_form(value)))
        return
    width = max(map(len, panel.names))
    for name in panel.names:
        with progress_bars() as progress:  # closed before anything is printed: bars lead stdout to their own stream
            text = panel.answer(name, question, progress)
        _print_answer(f"{name:<{width}}", text)


def _print_answer(name: str, text: str) -> None:
    """Print an answer beside a name: wrapped on a terminal, else in full width. Other signs than text become blanks."""
    from rich.table import Table
    from rich.text import Text

    from msa_lite.io.console.terminal import make_console

    console = make_console()
    if not console.is_terminal:
        console.width = 1 << 20
    lines = map(_plain, text.splitlines())
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(Text(name, style="bold"), Text("\n".join(lines) or "(nothing)"))
    console.print(table)


def _plain(line: str) -> str:
    """Return a line with blanks for signs that are no text, such as those that steer a terminal."""
    return "".join(sign if sign.isprintable() else " " for sign in line)
