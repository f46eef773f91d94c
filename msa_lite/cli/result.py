"""Print what a run made: the verdict, the scores, example questions, and where the model is."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from msa_lite.merger import Merged, MergedAdapter
    from msa_lite.pipeline import RunResult
    from msa_lite.publish.upload import Published

_STYLES = {"PASS": "bold green", "PARTLY": "bold yellow", "FAIL": "bold red"}


def print_verdict(result: RunResult, to_stderr: bool = False) -> None:
    """Print the verdict with its reasons, or the reason why there is none. to_stderr: for when stdout holds JSON."""
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


def print_result(result: RunResult, heading: str, with_examples: bool = False) -> None:
    """Print the scores under a heading, examples if wanted, and where the model, the report and the record are."""
    from msa_lite.cli.output import print_reports
    from msa_lite.report.attacks import attack_summary

    if result.reports:
        split = next(iter(result.reports.values())).split
        print_reports(result.reports, f"{heading}; scores on {split} rows")
    if with_examples:
        _print_examples(result)
    print_model(result.merged)
    click.echo(f"report:          {result.folder / 'report.html'}")
    click.echo(f"removal record:  {result.folder / 'record.json'}")
    for name, outcome in attack_summary(result.attacks).items() if result.attacks else ():
        click.echo(f"attacks:         {name}: {outcome['sentence']}")
    if result.published:
        print_published(result.published)


def print_model(merged: Merged | MergedAdapter) -> None:
    """Print where the unlearned model is, and how much of the update it kept."""
    click.echo(f"unlearned model: {merged.folder} ({merged.describe().splitlines()[0]})")


def print_published(published: Published) -> None:
    """Print where a model is on the Hub, and the line that points readers of the target's card to it."""
    facts = ["private" if published.private else "public", f"commit {published.commit[:12]}"]
    if not published.sent:
        facts.append("it was there already")
    click.echo(f"published:       {published.url} ({', '.join(facts)})")
    if published.new_version:
        click.echo(
            f"for the target's card, so that its readers find the new model: new_version: {published.new_version}"
        )


def _print_examples(result: RunResult) -> None:
    from msa_lite.report.examples import examples_text

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
        f"FAIL: {result.verdict.sentence} The model is written; exit code 1 (--accept, or `verdict: off` in the "
        "recipe, makes it 0)",
        err=True,
    )
    return 1
