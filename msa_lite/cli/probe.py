"""msa-lite probe: check whether a prior has already seen the forget set."""

from __future__ import annotations

import click

from msa_lite.cli.help import Command
from msa_lite.cli.invocation import Invocation, takes_recipe


@click.command(cls=Command)
@takes_recipe(checks=False)
def command(invocation: Invocation) -> None:
    """Check whether the prior of RECIPE has already seen the forget set.

    With a history, each of its checkpoints is checked. RECIPE is a YAML file, or the name of a shipped recipe.
    KEY.SUB=VALUE changes one of its keys. Forget rows are compared with rows that no checkpoint can have seen: those of
    probe.against, the benchmark's holdout set, or TOFU's paraphrases. Target and ideal are tested as controls.

    \b
    msa-lite probe my.yaml
    msa-lite probe my.yaml probe.against.path=holdout.jsonl
    msa-lite probe my.yaml probe.against.path=paraphrased.jsonl probe.paired=true
    """
    from msa_lite.cli.output import print_json, print_table
    from msa_lite.pipeline import probe
    from msa_lite.report.formats import Cell, Section, TextTable

    result = invocation.call(probe)
    if result is None:  # of the processes of a launcher, the first one prints
        return
    if invocation.as_json:
        print_json(result)
        return
    rows = [[*map(Cell, [finding.name, *finding.cells(), finding.verdict])] for finding in result.findings]
    notes = ["AUC [95 % interval]: ½ not seen, 1 seen"]
    print_table(TextTable(["model", *result.labels, "verdict"], [Section(rows)], result.title, notes))
    for finding in result.findings:
        click.echo(f"{finding.name} ({result.models[finding.name]}): {finding.explanation}")
    click.echo(f"report: {result.folder / 'report.md'}")
