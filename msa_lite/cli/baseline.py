"""msa-lite baseline: a method that MSA is compared with."""

from __future__ import annotations

from functools import partial

import click

from msa_lite.cli.help import Command, complete_method
from msa_lite.cli.invocation import Invocation, takes_recipe


def _checked(context: click.Context, argument: click.Parameter, method: str) -> str:
    """Return the name of a method. Raise UsageError for another name, before the recipe is loaded."""
    from msa_lite.baselines.methods import check_method

    check_method(method)
    return method


@click.command(cls=Command)
@click.argument("method", shell_complete=complete_method, callback=_checked)
@takes_recipe()
def command(invocation: Invocation, method: str) -> None:
    """Run METHOD on the models and data of RECIPE, to compare MSA with it.

    It trains, chooses an epoch, merges, scores and reports. METHOD is grad_ascent, grad_diff, npo, simnpo, dpo, rmu,
    satimp, wga, undial or task_vector. RECIPE is a YAML file, or the name of a shipped recipe. KEY.SUB=VALUE changes
    one of its keys.

    The run goes into baselines/METHOD of the recipe's output; `msa-lite compare` on that output puts all methods side
    by side. A verdict is printed as for MSA, but the exit code is 0 after a FAIL too.

    \b
    msa-lite baseline npo my.yaml
    msa-lite baseline npo my.yaml baseline.epochs=10 'baseline.methods.npo.retain_weight=[2, 4, 8]'
    msa-lite baseline rmu my.yaml baseline.start=prior 'baseline.scale=[0.5, 1.0]'
    """
    from msa_lite.cli.output import print_json, print_result, print_verdict
    from msa_lite.pipeline import run_baseline

    result = invocation.call(partial(run_baseline, method))
    if result is None:  # of the processes of a launcher, the first one prints
        return
    print_verdict(result, to_stderr=invocation.as_json)
    if invocation.as_json:
        print_json(result)
    else:
        chosen = ", ".join(f"{key} {value}" for key, value in result.chosen.items())
        print_result(result, f"{method}: {chosen}")
