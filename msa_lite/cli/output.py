"""Print for commands: results on stdout, progress and warnings on stderr; dry runs, rows, and what a run made."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

import click

from msa_lite.cli.faults import again
from msa_lite.errors import clip
from msa_lite.io.console.display import Display, Notices, log_to
from msa_lite.io.console.terminal import as_is, make_console
from msa_lite.io.files.writing import indented_json

if TYPE_CHECKING:
    from rich.text import Text

    from msa_lite.io.console.progress import Watcher
    from msa_lite.merger import Merged, MergedAdapter
    from msa_lite.pipeline.stages.stage import DryRun
    from msa_lite.pipeline.verbs.run import RunResult
    from msa_lite.publish.upload import Published
    from msa_lite.report import Report
    from msa_lite.report.run.rows import RowList
    from msa_lite.report.tables.formats import TextTable


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


@contextmanager
def progress_bars() -> Iterator[Watcher]:
    """Show progress on stderr: bars on a terminal, lines elsewhere. What libraries print goes there, too."""
    with redirect_stdout(sys.stderr), closing(Display(_notices)) as display:
        yield display


def print_start(recipe: str, output: str) -> None:
    """Print the first line of a command on stderr, before torch is loaded, which takes seconds.

    Of the processes of `accelerate launch`, only the first prints it.
    """
    from importlib.metadata import version

    if os.environ.get("RANK", "0") == "0":
        click.echo(f"msa-lite {version('msa-lite')}: {recipe} → {output}", err=True)


def print_wrapped(text: Text, indent: int = 0, to_stderr: bool = False) -> None:
    """Print a text: wrapped at words on a terminal, elsewhere as it is, so that `grep` finds it.

    indent: blanks before all lines but the first.
    """
    from rich.text import Text

    console = make_console(to_stderr)
    lines = text.wrap(console, max(20, console.width) - indent) if console.is_terminal else text.split()
    for number, line in enumerate(lines):
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


def show(value: Any, as_json: bool, *lines: str) -> None:
    """Print a result on stdout: one JSON object, or lines for people."""
    if as_json:
        print_json(value)
    for line in () if as_json else lines:
        click.echo(line)


def print_data(text: str) -> None:
    """Print a table for other programs on stdout; into a file or pipe with every sign as it is."""
    click.echo(text, file=None if sys.stdout.isatty() else as_is(sys.stdout), nl=False)


def print_reports(reports: Mapping[str, Report], title: str) -> None:
    """Print the table of models side by side on stdout."""
    from msa_lite.report import reports_table

    print_table(reports_table(reports, title))


def print_table(table: TextTable, dense: bool = False) -> None:
    """Print a table and its notes on stdout, in full width where no terminal sets one."""
    from msa_lite.report.tables.formats import terminal_table

    console = make_console()
    if not console.is_terminal:
        console.width = 9999
    console.print(terminal_table(table, dense, whole=not console.is_terminal), highlight=False)


def print_dry_run(result: DryRun, as_json: bool) -> None:
    """Print a dry run on stdout, as JSON or as a table with remarks."""
    from rich.text import Text

    from msa_lite.report.tables.formats import Cell, Section, TextTable

    if as_json:
        print_json(result)
        return
    rows = []
    for stage in result.stages:
        place = os.path.relpath(stage.folder, result.folder) if stage.folder else ""
        words = [stage.name, stage.state, place, "; ".join(stage.reasons)]
        rows.append([Cell(text, stage.state != "done" and text == stage.state) for text in words])
    headings = ["stage", "state", "folder", "reason"]
    print_table(TextTable(headings, [Section(rows)], "Dry run: nothing is written", left=4))
    clauses = {stage.says: stage.name for stage in reversed(result.stages) if stage.state != "done" and stage.says}
    for says, name in reversed(clauses.items()):
        print_wrapped(Text(f"{re.split('[:,]', name)[0]}: {says}"), 2)
    parts = [*([] if result.is_done else ["the folders of stages that are not done"]), *result.files]
    click.echo(f"writes:  {result.folder}: {', '.join(parts)}")
    for note in result.notes:
        click.echo(f"note:    {note}", err=True)
    if result.is_done:
        click.echo("All stages are done: a run would check them, and write the report again.")


_MOST = 400  # characters of a text on a terminal


def print_rows(rows: RowList) -> None:
    """Print counts and one block a row: wrapped at words on a terminal, else one line for each text."""
    from rich.text import Text

    from msa_lite.report.run.rows import row_lines

    is_terminal = make_console().is_terminal
    print_wrapped(Text(rows.headline, "bold"))
    for remark in rows.remarks:
        print_wrapped(Text(remark))
    for place, row in enumerate((*rows.rows, *rows.lost)):
        is_lost = place >= len(rows.rows)
        click.echo(f"\nrow {row.index}{' to keep' * is_lost}")
        for name, mark, text in row_lines(row, "lost" if is_lost else rows.counted):
            text = clip(text, _MOST) if is_terminal else text  # --json has it whole
            style = "bold red" if name == "unlearned" else ""
            print_wrapped(Text.assemble(f"{name:<10}  ", (f"{mark:<9} ", style), text), 22)
    click.echo()


def print_verdict(result: RunResult, to_stderr: bool = False) -> None:
    """Print the verdict with its reasons, or why there is none, and a line on attacks. to_stderr: stdout holds JSON."""
    from rich.text import Text

    verdict = result.verdict
    if verdict is None:
        print_outcome(None, f"No verdict: {result.no_verdict}.", to_stderr)
    else:
        print_outcome(verdict.outcome, verdict.sentence, to_stderr)
        for reason in verdict.reasons:
            print_wrapped(Text(f"  - {reason}"), 4, to_stderr)
        print_wrapped(Text(f"  {verdict.changes}", style="dim"), 2, to_stderr)
    if result.attacks:
        print_wrapped(Text(result.attacks.headline()), to_stderr=to_stderr)


def print_result(result: RunResult, heading: str, as_json: bool, with_examples: bool = False) -> None:
    """Print the scores under a heading, examples if wanted, the places of the files, and the verdict once more.

    On a terminal of 24 lines the verdict at the top has scrolled away by then. Warnings are repeated before it.
    """
    if as_json:
        print_json(result)
        return
    if result.reports:
        split = next(iter(result.reports.values())).split
        print_reports(result.reports, f"{heading}; scores on {split} rows")
    if with_examples:
        _print_examples(result)
    for finding in result.evidence:
        click.echo(f"{finding.question} {finding.sentence}")
    print_model(result.merged)
    click.echo(f"report:          {result.folder / 'report.html'}")
    click.echo(f"removal record:  {result.folder / 'record.json'}")
    if result.published:
        print_published(result.published)
    click.echo()
    repeat_warnings()
    print_verdict(result)


def print_model(merged: Merged | MergedAdapter) -> None:
    """Print where the unlearned model is, and how much of the update it kept."""
    click.echo(f"unlearned model: {merged.folder} ({merged.describe().splitlines()[0]})")


def print_published(published: Published) -> None:
    """Print where a model is on the Hub, and the line that points readers of the target's card to it."""
    facts = ["private" if published.private else "public", f"commit {published.commit[:12]}"]
    if not published.changed:
        facts.append("it was there already")
    click.echo(f"published:       {published.url} ({', '.join(facts)})")
    if published.new_version:
        click.echo(
            f"for the target's card, so that its readers find the new model: new_version: {published.new_version}"
        )


def _print_examples(result: RunResult) -> None:
    from msa_lite.report.run.rows import examples_text

    if result.examples:
        click.echo(f"\nSome questions, and what the models say:\n\n{examples_text(result.examples)}\n")
        click.echo(f"ask them more:   msa-lite ask {shlex.quote(str(result.folder))}")
    elif result.reports:
        click.echo("no questions to show side by side: texts are scored, not answered")


def exit_code(result: RunResult, accept: bool) -> int:
    """Return 1 after a FAIL that the user does not accept, with a message on stderr; else 0."""
    if result.verdict is None or result.verdict.outcome != "FAIL" or accept:
        return 0
    click.echo(
        f"FAIL: {result.verdict.sentence} The model is written; exit code 1. `verdict: off` in the recipe makes it 0, "
        f"and so does {again('--accept')}",
        err=True,
    )
    return 1
