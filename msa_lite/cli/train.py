"""msa-lite train: targets, ideals and the checkpoints before them, in stages."""

from __future__ import annotations

import click

from msa_lite.cli.completion import complete_recipe


@click.command()
@click.argument("recipe", shell_complete=complete_recipe)
@click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE ...]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.pass_obj
def command(verbose: bool, recipe: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Train the stages of RECIPE, one after the other: all weights, in fp32.

    RECIPE is a YAML file or the name of a shipped recipe (train/...). A second run does only what is missing or has
    changed. The folder holds a `history:` block, from which an unlearning recipe chooses its prior.

    \b
    msa-lite train my-target.yaml
    msa-lite train train/tofu_c4_tofu stages.1.tokens=1M output=runs/short
    """
    from msa_lite.cli.output import print_json, print_start, progress_bars, quieten_libraries
    from msa_lite.recipe import load_training

    loaded = load_training(recipe, overrides)
    print_start(recipe, loaded.output)
    from msa_lite.pipeline import train_stages

    quieten_libraries(verbose)
    with progress_bars() as progress:
        result = train_stages(loaded, progress=progress)
    if as_json:
        print_json(result.as_dict())
        return
    width = max(len(model.name) for model in result.models)
    for model in result.models:
        if model.loss is not None:
            counts = f"{model.rows} rows, {model.tokens} tokens, {model.seen_tokens} seen since the start"
            click.echo(f"{model.name:<{width}}  {counts}, loss {model.loss:.3g}")
    click.echo(f"model:   {result.model}")
    click.echo(f"history: {result.history}")
