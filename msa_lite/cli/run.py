"""msa-lite run: the whole job of a recipe."""

from __future__ import annotations

import click

from msa_lite.cli.completion import complete_recipe


@click.command()
@click.argument("recipe", shell_complete=complete_recipe)
@click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE ...]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.option("--accept", is_flag=True, help="Exit with 0 whatever the verdict; checks before the work only warn.")
@click.option("--show-examples", is_flag=True, help="Questions with the models' answers in report.md and --json, too.")
@click.pass_obj
def command(
    verbose: bool, recipe: str, overrides: tuple[str, ...], as_json: bool, accept: bool, show_examples: bool
) -> int:
    """Do the whole job of RECIPE: vectors, the choice of alpha and beta, merge, scores, report.

    RECIPE is a YAML file or the name of a shipped recipe. A second run does only what is missing or has changed. The
    verdict comes first: PASS, PARTLY, or FAIL, with which the command exits with 1.

    \b
    msa-lite quickstart
    msa-lite my.yaml forget.alpha=1.25 output=runs/stronger
    """
    from msa_lite.cli.output import (
        print_json,
        print_prior,
        print_reports,
        print_start,
        progress_bars,
        quieten_libraries,
    )
    from msa_lite.cli.tokenizer import with_tokenizer
    from msa_lite.cli.verdict import exit_code, print_examples, print_verdict
    from msa_lite.recipe import load_recipe

    loaded = load_recipe(recipe, overrides)
    print_start(recipe, loaded.output)
    print_prior(loaded)
    from msa_lite.pipeline import run

    quieten_libraries(verbose)
    with progress_bars() as progress:
        result = with_tokenizer(
            loaded, lambda recipe: run(recipe, progress=progress, accept=accept, show_examples=show_examples)
        )
    if result is None:  # this process of `accelerate launch` only helped with the sweep
        return 0
    print_verdict(result, to_stderr=as_json)
    status = exit_code(result, accept or not loaded.verdict)
    if as_json:
        examples = {"examples": [example.as_dict() for example in result.examples]} if show_examples else {}
        print_json(result.as_dict() | examples)
        return status
    if result.reports:
        split = next(iter(result.reports.values())).split
        print_reports(result.reports, f"α = {result.alpha:g}, β = {result.beta:g}, scores on {split} rows")
    print_examples(result)
    click.echo(f"unlearned model: {result.merged.folder} ({result.merged.describe().splitlines()[0]})")
    click.echo(f"report:          {result.folder / 'report.md'}")
    return status
