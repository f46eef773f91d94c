"""msa-lite metrics: what each metric of a report means, and which way is better."""

from __future__ import annotations

import sys

import click

from msa_lite.cli.help import Command


@click.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> None:
    """Explain the metrics of reports.

    Each has a name, a direction, a definition and a source. Recipes and `compare` take these names. Tasks of
    lm-evaluation-harness bring metrics of their own, TASK/METRIC.

    \b
    msa-lite RECIPE.yaml select.minimise=rouge_l_f
    msa-lite compare runs/mine --metrics rouge_l_f,model_utility
    """
    from dataclasses import asdict

    from msa_lite.cli.output import print_json
    from msa_lite.report.metrics import METRICS

    if as_json:
        print_json({name: asdict(kind) for name, kind in METRICS.items()})
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("metric", "best", "meaning and source"):
        table.add_column(name, no_wrap=name in ("metric", "best"))
    for group in dict.fromkeys(kind.group for kind in METRICS.values()):
        table.add_row(f"\n[bold]{group}[/bold]")
        for kind in (kind for kind in METRICS.values() if kind.group == group):
            table.add_row(kind.name, kind.best, f"{escape(kind.formula)}. [dim]{escape(kind.source)}[/dim]")
    # Without a terminal, in one line a metric.
    Console(width=None if sys.stdout.isatty() else 250).print(table, highlight=False)
