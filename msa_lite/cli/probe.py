"""msa-lite probe: signs that a prior has already seen the forget set."""

from __future__ import annotations

import click

from msa_lite.cli.completion import complete_recipe


@click.command()
@click.argument("recipe", shell_complete=complete_recipe)
@click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE ...]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.pass_obj
def command(verbose: bool, recipe: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Test the prior of RECIPE, or every checkpoint of its history, for signs of having seen the forget set.

    Forget rows are compared with rows that no candidate can have seen: those of probe.against, the benchmark's holdout
    set, or TOFU's paraphrases. Target and ideal are tested as controls.

    \b
    msa-lite probe my.yaml
    msa-lite probe my.yaml probe.against.path=holdout.jsonl
    msa-lite probe my.yaml probe.against.path=paraphrased.jsonl probe.paired=true
    """
    from msa_lite.cli.output import print_json, print_start, progress_bars, quieten_libraries
    from msa_lite.cli.tokenizer import with_tokenizer
    from msa_lite.recipe import load_recipe

    loaded = load_recipe(recipe, overrides)
    print_start(recipe, loaded.output)
    from msa_lite.pipeline import probe

    quieten_libraries(verbose)
    with progress_bars() as progress:
        result = with_tokenizer(loaded, lambda recipe: probe(recipe, progress=progress))
    if as_json:
        print_json(result.as_dict())
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=result.title, title_justify="left", caption="AUC [95 % interval]: ½ not seen, 1 seen")
    table.add_column("model", no_wrap=True)
    for label in result.labels:
        table.add_column(label, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for finding in result.findings:
        table.add_row(finding.name, *finding.cells(), finding.verdict)
    Console().print(table)
    for finding in result.findings:
        click.echo(f"{finding.name} ({result.models[finding.name]}): {finding.explanation}")
    click.echo(f"report: {result.folder / 'report.md'}")
