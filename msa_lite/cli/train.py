"""msa-lite train: targets, ideals and the checkpoints before them, in stages."""

from __future__ import annotations

import click

from msa_lite.cli.help import Command
from msa_lite.cli.invocation import Invocation, takes_recipe


@click.command(cls=Command)
@takes_recipe("training")
def command(invocation: Invocation) -> None:
    """Train the stages of RECIPE, one after the other.

    All weights are trained, in fp32. RECIPE is a YAML file, or the name of a shipped recipe (train/...). KEY.SUB=VALUE
    changes one of its keys. A second run does only what is missing or has changed. It writes a `history:` block, from
    which the recipe of a run chooses its prior.

    \b
    msa-lite train my-target.yaml
    msa-lite train train/tofu_c4_tofu stages.1.tokens=1M output=runs/short
    """
    from msa_lite.cli.output import print_json
    from msa_lite.pipeline import train_stages

    result = invocation.call(train_stages)
    if result is None:  # of the processes of a launcher, the first one prints
        return
    if invocation.as_json:
        print_json(result)
        return
    width = max(len(model.name) for model in result.models)
    for model in result.models:
        if model.loss is not None:
            counts = f"{model.rows} rows, {model.tokens} tokens, {model.seen_tokens} seen since the start"
            click.echo(f"{model.name:<{width}}  {counts}, loss {model.loss:.3g}")
    click.echo(f"model:   {result.model}")
    click.echo(f"history: {result.history}")
