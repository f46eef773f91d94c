"""Print for commands: results on stdout, progress and warnings on stderr."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, closing, redirect_stdout
from typing import TYPE_CHECKING, Any

import click

from msa_lite.io.display import Display, Notices, log_to
from msa_lite.io.extras import require
from msa_lite.io.files import indented_json

if TYPE_CHECKING:
    from rich.text import Text

    from msa_lite.io.progress import Watcher
    from msa_lite.report import Report
    from msa_lite.report.formats import TextTable

OUTCOME_STYLES = {"PASS": "bold green", "PARTLY": "bold yellow", "FAIL": "bold red"}
_notices = Notices()  # of this process's command


def set_up_logging(verbose: bool) -> None:
    """Send the warnings of msa-lite to stderr, and with --verbose all it logs. Other packages log errors alone."""
    global _notices
    _notices = Notices()  # the warnings of another command, if one was called in this process, are not of this one
    log_to(_notices, verbose)


def repeat_warnings() -> None:
    """Print all warnings of a command again at its end, in one block, if it showed progress between them."""
    _notices.repeat()


def quieten_libraries(verbose: bool) -> None:
    """Check that the libraries underneath are installed; hide their bars and warnings, unless the user wants all."""
    require("train")
    if os.environ.get("WANDB_MODE") == "offline":  # transformers then prints a line on stdout, where results go
        with redirect_stdout(sys.stderr):
            import transformers.integrations.integration_utils
    if verbose:
        return
    import warnings

    import datasets
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.utils.logging.set_verbosity_error()
    for name in (
        "peft",
        "bitsandbytes",
        "accelerate.big_modeling",
        "huggingface_hub",
        "httpx",
        "httpx2",
        "openai",
        "lm_eval",
    ):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning)


def progress_bars() -> AbstractContextManager[Watcher]:
    """Show progress on stderr: bars on a terminal, lines elsewhere."""
    return closing(Display(_notices))


def print_start(recipe: str, output: str) -> None:
    """Print the first line of a command on stderr, before torch is loaded, which takes seconds.

    Of the processes of `accelerate launch`, only the first prints it.
    """
    from importlib.metadata import version

    if os.environ.get("RANK", "0") == "0":
        click.echo(f"msa-lite {version('msa-lite')}: {recipe} → {output}", err=True)


def print_wrapped(text: Text, indent: int = 0, to_stderr: bool = False) -> None:
    """Print a text: wrapped at words on a terminal, elsewhere in one line, so that `grep` finds it.

    indent: blanks before all lines but the first.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=to_stderr)
    if not console.is_terminal:
        console.print(text, soft_wrap=True)
        return
    width = max(20, console.width)
    for number, line in enumerate(text.wrap(console, width - indent)):
        console.print(Text(" " * indent if number else "").append_text(line), soft_wrap=True)


def print_outcome(outcome: str | None, sentence: str, to_stderr: bool = False) -> None:
    """Print PASS, PARTLY or FAIL with a sentence; the sentence alone where there is no verdict."""
    from rich.text import Text

    word = Text.assemble((outcome, OUTCOME_STYLES[outcome]), "  ") if outcome else Text()
    print_wrapped(word.append(sentence), to_stderr=to_stderr)


def print_json(value: Any) -> None:
    """Print one JSON object on stdout, in ASCII if the encoding lacks some of its characters."""
    text = indented_json(value)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except (UnicodeEncodeError, AttributeError):
        text = json.dumps(json.loads(text), indent=2) + "\n"
    click.echo(text, nl=False)


def print_reports(reports: Mapping[str, Report], title: str) -> None:
    """Print the table of models side by side on stdout."""
    from msa_lite.report import reports_table

    print_table(reports_table(reports, title))


def print_table(table: TextTable, dense: bool = False) -> None:
    """Print a table and its notes on stdout, in full width where no terminal sets one."""
    from rich.console import Console

    from msa_lite.report.formats import terminal_table

    console = Console()
    if not console.is_terminal:
        console.width = 9999
    console.print(terminal_table(table, dense), highlight=False)
