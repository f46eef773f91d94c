"""The verdict on a run and its questions, as commands print them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from msa_lite.pipeline import RunResult

_STYLES = {"PASS": "bold green", "PARTLY": "bold yellow", "FAIL": "bold red"}


def print_verdict(result: RunResult, to_stderr: bool = False) -> None:
    """The verdict with its reasons, on stdout unless that is taken by JSON; why there is none where there is none."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=to_stderr)
    verdict = result.verdict
    if verdict is None:
        console.print(Text(f"No verdict: {result.no_verdict}."), soft_wrap=True)
        return
    console.print(Text.assemble((verdict.outcome, _STYLES[verdict.outcome]), f"  {verdict.sentence}"), soft_wrap=True)
    for reason in verdict.reasons:
        console.print(Text(f"  - {reason}"), soft_wrap=True)
    console.print(Text(f"  {verdict.changes}", style="dim"), soft_wrap=True)


def print_examples(result: RunResult) -> None:
    """Questions with the models' answers side by side, on stdout."""
    from msa_lite.report.examples import examples_text

    if result.examples:
        click.echo(f"\nSome questions, and what the models say:\n\n{examples_text(result.examples)}\n")
    elif result.reports:
        click.echo("no questions to show side by side: texts are scored, not answered")


def exit_code(result: RunResult, accept: bool) -> int:
    """1 where the verdict is FAIL and nobody accepts that, with a message on stderr; else 0."""
    if result.verdict is None or result.verdict.outcome != "FAIL" or accept:
        return 0
    click.echo(
        f"FAIL: {result.verdict.sentence} The model is written; exit code 1 (--accept, or `verdict: off` in the "
        "recipe, makes it 0)",
        err=True,
    )
    return 1
