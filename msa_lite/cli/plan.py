"""msa-lite plan: memory, disk and time of a run before it starts."""

from __future__ import annotations

import click

from msa_lite.cli.help import Command, RecipeName, takes_json, takes_overrides
from msa_lite.cli.output import print_table, quieten_libraries, show
from msa_lite.errors import MismatchError


@click.command(cls=Command)
@click.argument("recipe", type=RecipeName())
@takes_overrides
@click.option("--gpu", metavar="SIZE", help="Plan for a GPU with this much memory, such as 8GB.  [default: this one]")
@click.option("--baseline", metavar="METHOD", help="Plan `msa-lite baseline METHOD` in the place of the run.")
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Processes of `accelerate launch`, each with such a GPU; they divide fits in full mode.",
)
@takes_json
@click.pass_obj
def plan_command(
    verbose: bool,
    recipe: str,
    overrides: tuple[str, ...],
    gpu: str | None,
    baseline: str | None,
    processes: int,
    as_json: bool,
) -> int:
    """Predict what RECIPE needs: memory of each stage, disk, time.

    Nothing is written. RECIPE is a YAML file, or the name of a shipped recipe, of a run or of a training (train/...).
    KEY.SUB=VALUE changes one of its keys. Models are read by their headers and configs alone, from this machine or from
    the Hub; no weights are downloaded. Times are rough: operations divided by the speed of such a GPU, or of this CPU.

    The last line says whether the run fits, and if not, which change of the recipe makes it fit at the least cost. The
    exit code is 0 if it fits, else 3.

    \b
    msa-lite plan my.yaml
    msa-lite plan my.yaml --gpu 8GB vector.mode=qlora
    msa-lite plan my.yaml --gpu 80GB --processes 2 --baseline undial vector.mode=full
    msa-lite plan my.yaml --gpu 80GB --json
    """

    from msa_lite.budget.plan import plan_lines, plan_table
    from msa_lite.pipeline.verbs.plan import plan

    quieten_libraries(verbose, needed=False)
    result = plan(recipe, overrides, gpu=gpu, baseline=baseline, processes=processes)
    if not as_json:
        print_table(plan_table(result))
    show(result, as_json, *plan_lines(result))
    return 0 if result.fits else MismatchError.exit_code
