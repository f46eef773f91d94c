"""msa-lite baseline: a method that MSA is compared with."""

from __future__ import annotations

import click

from msa_lite.cli.completion import complete_method, complete_recipe


@click.command()
@click.argument("method", shell_complete=complete_method)
@click.argument("recipe", shell_complete=complete_recipe)
@click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE ...]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.pass_obj
def command(verbose: bool, method: str, recipe: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Run METHOD on the models and data of RECIPE: training, the choice of an epoch, merge, scores, report.

    METHOD is grad_ascent, grad_diff, npo, simnpo, dpo, rmu, satimp, wga, undial or task_vector. The run goes into
    baselines/METHOD of the recipe's output; `msa-lite compare` on that output puts all of them side by side. It gets a
    verdict as MSA does, but exits with 0 whatever that is: comparing is what it is for.

    \b
    msa-lite baseline npo my.yaml
    msa-lite baseline npo my.yaml baseline.epochs=10 'baseline.methods.npo.retain_weight=[2, 4, 8]'
    msa-lite baseline rmu my.yaml baseline.start=prior 'baseline.scale=[0.5, 1.0]'
    """
    from msa_lite.baselines.methods import check_method
    from msa_lite.cli.output import (
        print_json,
        print_prior,
        print_reports,
        print_start,
        progress_bars,
        quieten_libraries,
    )
    from msa_lite.cli.tokenizer import with_tokenizer
    from msa_lite.cli.verdict import print_verdict
    from msa_lite.recipe import load_recipe

    check_method(method)
    loaded = load_recipe(recipe, overrides)
    print_start(recipe, loaded.output)
    if loaded.baseline.start == "prior":
        print_prior(loaded)
    from msa_lite.pipeline import run_baseline

    quieten_libraries(verbose)
    with progress_bars() as progress:
        result = with_tokenizer(loaded, lambda recipe: run_baseline(method, recipe, progress=progress))
    print_verdict(result, to_stderr=as_json)
    if as_json:
        print_json(result.as_dict())
        return
    chosen = ", ".join(f"{key} {value}" for key, value in result.chosen.items())
    if result.reports:
        split = next(iter(result.reports.values())).split
        print_reports(result.reports, f"{method}: {chosen}; scores on {split} rows")
    click.echo(f"unlearned model: {result.merged.folder} ({result.merged.describe().splitlines()[0]})")
    click.echo(f"report:          {result.folder / 'report.md'}")
