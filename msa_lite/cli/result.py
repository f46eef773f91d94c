"""Print what a run made: the verdict, the scores, example questions, and where the model is."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from msa_lite.merger import Merged, MergedAdapter
    from msa_lite.pipeline import RunResult
    from msa_lite.publish.upload import Published


def print_verdict(result: RunResult, to_stderr: bool = False) -> None:
    """Print the verdict with its reasons, or why there is none, and a line on attacks. to_stderr: stdout holds JSON."""
    from rich.text import Text

    from msa_lite.cli.output import print_outcome, print_wrapped

    verdict = result.verdict
    print_outcome(verdict.outcome if verdict else None, verdict.sentence if verdict else _no_verdict(result), to_stderr)
    for reason in verdict.reasons if verdict else ():
        print_wrapped(Text(f"  - {reason}"), 4, to_stderr)
    if verdict:
        print_wrapped(Text(f"  {verdict.changes}", style="dim"), 2, to_stderr)
    if result.attacks:
        print_wrapped(Text(result.attacks.headline()), to_stderr=to_stderr)


def _no_verdict(result: RunResult) -> str:
    return f"No verdict: {result.no_verdict}."


def print_result(result: RunResult, heading: str, with_examples: bool = False) -> None:
    """Print the scores under a heading, examples if wanted, the places of the files, and the verdict once more.

    On a terminal of 24 lines the verdict at the top has scrolled away by then. Warnings are repeated before it.
    """
    from msa_lite.cli.output import print_reports, repeat_warnings

    if result.reports:
        split = next(iter(result.reports.values())).split
        print_reports(result.reports, f"{heading}; scores on {split} rows")
    if with_examples:
        _print_examples(result)
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
