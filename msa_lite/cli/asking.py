"""Put questions to the models of a finished run: ask, web, attack."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from msa_lite.catalogue import ATTACKS
from msa_lite.cli.arguments import read_names, takes_dry_run, takes_json, takes_overrides, takes_run
from msa_lite.cli.output import print_dry_run, print_json, print_table, print_wrapped, progress_bars, show
from msa_lite.errors import UsageError
from msa_lite.io.console.libraries import require
from msa_lite.io.files.writing import json_form
from msa_lite.io.finished.seal import in_use

if TYPE_CHECKING:
    from msa_lite.pipeline.verbs.ask import Panel

_PROMPT = "question> "


@click.command()
@takes_run
@click.argument("question", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each question.")
def ask_command(run: Path, question: str | None, as_json: bool) -> int:
    """Ask target, unlearned model and ideal of RUN the same QUESTION.

    RUN is the folder of a run, or of a baseline in it. Without QUESTION, questions are read line by line until an empty
    line or Ctrl-D; from a file or pipe, until its end. The prompt is that of the run, answers are greedy and no longer
    than in its scores. A run over texts continues what you write. Nothing is written into RUN.

    \b
    msa-lite ask runs/quickstart "Where was Elitan Wenthorp born?"
    msa-lite ask runs/quickstart < questions.txt
    """
    from msa_lite.pipeline.verbs.ask import open_panel

    require("train")
    with in_use(run):
        panel = open_panel(run, several=question is None)
        _print_head(panel)
        try:
            if question is not None:
                _answer(panel, question, as_json, one=True)
                return 0
            return _answer_lines(panel, as_json)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            return 130


def _answer_lines(panel: Panel, as_json: bool) -> int:
    """Answer the lines of standard input; return the exit status."""
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


def _print_head(panel: Panel) -> None:
    """Print on stderr how the models are asked."""
    how = "texts, so what you write is continued" if panel.continues else panel.prompter.sentence
    click.echo(f"prompt: {how}; at most {panel.run.recipe.max_new_tokens} tokens, greedy", err=True)


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
    from rich.text import Text

    from msa_lite.pipeline.verbs.ask import Question

    if as_json:
        with progress_bars() as progress:
            value = panel.answers(question, progress)
        print_json(value) if one else click.echo(json.dumps(json_form(value)))
        return
    width = max(map(len, panel.names))
    for name in panel.names:
        with progress_bars() as progress:  # closed before anything is printed: bars lead stdout to their own stream
            text = panel.answer(name, Question(question), progress)
        lines = "\n".join(map(_plain, text.splitlines())) or "(nothing)"
        print_wrapped(Text.assemble((f"{name:<{width}}", "bold"), "  ", lines), width + 2)


def _plain(line: str) -> str:
    """Return a line with blanks for signs that are no text, such as those that steer a terminal."""
    return "".join(sign if sign.isprintable() else " " for sign in line)


@click.command()
@takes_run
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="The port of this machine; 0 takes a free one.")
@click.option("--open", "opens", is_flag=True, help="Open the page in the browser.")
@takes_json
def web_command(run: Path, port: int, opens: bool, as_json: bool) -> None:
    """Ask the models of RUN in a page of the browser.

    The page shows the answers of target, unlearned model and ideal as they come, and the rows with their answers. In
    the picture of the choice, a click on a point asks the model at these strengths; sliders set any others.

    RUN may still be going on: the page then shows its stages, losses and points as they come, and does not hold it up.
    It may also be a folder that holds runs: the page lists them.

    Only this machine can reach the page, at an address with a secret token. It loads nothing from the network, and
    nothing is written. Ctrl-C ends it. To reach it from another machine, give --port PORT here, and run
    `ssh -L PORT:127.0.0.1:PORT THIS_MACHINE` there.

    \b
    msa-lite web runs/quickstart --open
    msa-lite web runs
    msa-lite web runs/quickstart/baselines/npo --port 8123
    """
    from msa_lite.web import open_page

    require("train")
    with _signals_as_ctrl_c():
        page = open_page(run, port)
        click.echo("Open this address; Ctrl-C ends it:", err=True)
        click.echo(json.dumps({"address": page.address}) if as_json else page.address)
        with _opened_in_browser(page.address) if opens else nullcontext():
            page.serve()


@contextmanager
def _signals_as_ctrl_c() -> Iterator[None]:
    """Let SIGTERM, and the end of the terminal (SIGHUP), end the block as Ctrl-C does: it removes what it wrote."""

    def stop(number: int, frame: object) -> None:
        if number == signal.SIGTERM:
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGTERM)  # which the server, while it runs, takes itself

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    former = {n: signal.signal(n, stop) for n in numbers if signal.getsignal(n) == signal.SIG_DFL}  # not under nohup
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextmanager
def _opened_in_browser(address: str) -> Iterator[None]:
    """Open an address through a file of this user: everybody on the machine can see the arguments of a browser.

    The file goes at the end of the block. A SIGKILL leaves it, with the token of a page that has ended.
    """
    import tempfile
    import webbrowser

    with tempfile.NamedTemporaryFile("w", suffix=".html", prefix="msa-lite-") as file:  # its mode is 0600
        file.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={address}">')
        file.flush()
        webbrowser.open(Path(file.name).as_uri())
        yield


@click.command()
@takes_run
@takes_overrides
@click.option(
    "--attacks",
    metavar="NAMES",
    help=f"Some of {', '.join(ATTACKS)}, with commas between them.  [default: all that are possible]",
)
@takes_dry_run
@takes_json
def attack_command(run: Path, overrides: tuple[str, ...], attacks: str | None, is_dry: bool, as_json: bool) -> None:
    """Attack the models of RUN, to see whether the rows to forget come back.

    RUN is the folder of a finished run, or of a baseline in it. Target, ideal and unlearned model are attacked alike.
    What counts is what comes back beyond the ideal; without one, beyond rows that no model saw (evaluate.holdout).
    KEY.SUB=VALUE changes a key of the recipe's `attack`. The results land in RUN/attacks and in the run's report. A
    rerun does only what is missing.

    \b
    msa-lite attack runs/quickstart
    msa-lite attack runs/quickstart --dry-run
    msa-lite attack runs/quickstart --attacks quantise,relearn attack.rows=100
    """
    from msa_lite.pipeline.attack.run import attack, dry_attack
    from msa_lite.report.page.run_files import GAIN_MEANING, attack_table
    from msa_lite.report.run.attacks import HOLDOUT_LIMIT

    require("train")
    names = read_names(attacks)
    if is_dry:
        print_dry_run(dry_attack(run, names, overrides), as_json)
        return
    with progress_bars() as progress:
        result = attack(run, names, overrides=overrides, progress=progress)
    facts = result.facts
    if not as_json:
        print_table(attack_table(facts, "Attacks", (f"comes back: {facts.meaning}", GAIN_MEANING)))
    lines = [*map(facts.headline, facts.models), *(f"{name}: left out: {why}" for name, why in facts.left_out.items())]
    lines += [HOLDOUT_LIMIT] if facts.control == "holdout" else []
    show(result, as_json, *lines, f"results: {result.folder}")
