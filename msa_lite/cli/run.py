"""msa-lite run: from a recipe to an unlearned model, its scores and a report."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

from msa_lite.cli.help import Command
from msa_lite.cli.invocation import Invocation, takes_recipe
from msa_lite.io.files.writing import json_form

F = TypeVar("F", bound=Callable[..., object])


def takes_run_options(body: F) -> F:
    """Give a command the options of a whole run."""
    accept = "Exit with 0 whatever the verdict. Checks before the run only warn."
    show = "Put questions with the models' answers into the report and --json."
    return click.option("--accept", is_flag=True, help=accept)(
        click.option("--show-examples", is_flag=True, help=show)(body)
    )


@click.command(cls=Command)
@takes_run_options
@takes_recipe()
def command(invocation: Invocation, accept: bool, show_examples: bool) -> int:
    """Run RECIPE: fit vectors, choose alpha and beta, merge, score, report.

    RECIPE is a YAML file, or the name of a shipped recipe (`msa-lite recipes list`). KEY.SUB=VALUE changes one of its
    keys. A second run does only what is missing or has changed.

    The verdict is printed first: PASS, PARTLY or FAIL. The exit code of FAIL is 1.

    \b
    msa-lite quickstart
    msa-lite my.yaml
    msa-lite my.yaml forget.alpha=1.25 output=runs/stronger
    accelerate launch --num_processes 4 -m msa_lite my.yaml   # on 4 GPUs
    """
    return run_whole(invocation, accept, show_examples)


def run_whole(invocation: Invocation, accept: bool, show_examples: bool) -> int:
    """Run a recipe, print verdict, scores and examples, and return the exit code."""
    from msa_lite.cli.output import exit_code, print_json, print_result, print_verdict
    from msa_lite.pipeline import run

    result = invocation.call(run, accept=accept, show_examples=show_examples)
    if result is None:  # of the processes of a launcher, the first one prints
        return 0
    print_verdict(result, to_stderr=invocation.as_json)
    status = exit_code(result, accept or not invocation.recipe.verdict)
    if invocation.as_json:
        examples = {"examples": result.examples} if show_examples else {}
        print_json(json_form(result) | examples)
    else:
        print_result(result, f"α = {result.alpha:g}, β = {result.beta:g}", with_examples=True)
    return status
