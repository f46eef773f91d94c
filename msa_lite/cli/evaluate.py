"""msa-lite evaluate: score a model on a benchmark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from msa_lite.benchmarks import BENCHMARKS, OWN, splits_help
from msa_lite.cli.help import Command, RecipeName, read_columns, takes_json
from msa_lite.io.files.writing import json_form

if TYPE_CHECKING:
    from msa_lite.evals.scores.suite import Asked

_GROUPS = {
    "Benchmark": ["--benchmark", "--split", "--data", "--compat", "--recipe", "--limit"],
    "Questions of your own": ["--forget", "--retain", "--holdout", "--columns", "--max-new-tokens"],
    "Yardsticks": ["--ideal", "--judge"],
    "Result": ["--out"],
}


@click.command(cls=Command, groups=_GROUPS)
@click.argument("model")
@click.option(
    "--benchmark",
    type=click.Choice(list(BENCHMARKS)),
    default=OWN,
    show_default=True,
    help="qa: questions of your own.",
)
@click.option("--split", help=f"{splits_help()}.")
@click.option("--data", metavar="DATA", help="The benchmark's data, a folder or Hub id[@revision].")
@click.option(
    "--ideal",
    metavar="MODEL|REPORT",
    help="A model that never saw the forget set, or the report of an earlier evaluation of it.",
)
@click.option(
    "--judge",
    metavar="KIND[:MODEL]",
    help="Who judges generated answers: none, openai or openai:MODEL (its server: OPENAI_BASE_URL), or local:MODEL, a "
    "folder or repo.  [default: the recipe's, else none]",
)
@click.option(
    "--compat",
    metavar="NAME",
    multiple=True,
    help="A deviation of published code to repeat, such as open-unlearning.",
)
@click.option(
    "--forget", metavar="DATA", help="Questions about the forget set: FILE, FOLDER[:CONFIGURATION] or Hub id."
)
@click.option("--retain", metavar="DATA", help="Questions about the retain set, likewise.")
@click.option("--holdout", metavar="DATA", help="Questions that no model was trained on, likewise.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), help="Length limit of answers.  [default: 200]")
@click.option("--columns", help="Columns of these: question=Q,answer=A, or messages=M; the usual ones are known.")
@click.option(
    "--recipe",
    metavar="RECIPE",
    type=RecipeName(),
    help="Take benchmark, data, columns, prompt and judge from this recipe.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Score at most this many rows of each set.")
@click.option("--out", required=True, type=click.Path(), help="Folder for records and report.json.")
@takes_json
@click.pass_context
def evaluate_command(context: click.Context, model: str, out: str, as_json: bool, **options: Any) -> None:
    """Score MODEL on a benchmark.

    MODEL is a folder or repo[@revision] with a model or a LoRA adapter.

    \b
    msa-lite evaluate runs/mine/model --benchmark tofu --split forget10 --ideal IDEAL --out scores
    msa-lite evaluate runs/mine/model --forget forget.jsonl --retain retain.jsonl --out scores
    msa-lite evaluate ./my-finetuned-model --recipe my-request.yaml --out scores
    """
    from msa_lite.cli.output import print_json, print_reports, print_start, progress_bars, quieten_libraries

    print_start(model, out)
    from msa_lite.evals import evaluate
    from msa_lite.evals.judge import JudgeSettings

    quieten_libraries(context.obj)
    if options["recipe"] is not None:
        arguments = _from_recipe(context, options)
    else:
        arguments = {"questions": _questions(options), "limit": options["limit"]}
    if options["judge"] is not None:
        kind, _, name = options["judge"].partition(":")
        arguments["judge"] = JudgeSettings(kind, name or None)
    with progress_bars() as progress:
        reports = evaluate(model, out, **arguments, ideal=options["ideal"], progress=progress)
    if not reports:  # of the processes of `accelerate launch`, the first one prints
        return
    if as_json:
        results = json_form(reports)
        ideal = results["ideal"]["metrics"] if "ideal" in results else None
        print_json({"out": out, **results["model"], "ideal": ideal})
    else:
        print_reports(reports, model)


_SETS = ("forget", "retain", "holdout")
_OPTIONS = {
    OWN: (*_SETS, "max_new_tokens"),
    "published": ("split", "data", "compat"),
}  # by what is scored
_IN_RECIPES = (
    "benchmark",
    *dict.fromkeys(name for names in _OPTIONS.values() for name in names),
    "columns",
)


def _from_recipe(context: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a recipe stands for. Raise UsageError for options that both set."""
    from click.core import ParameterSource

    from msa_lite.errors import UsageError
    from msa_lite.pipeline.prepare.prompt import evaluation_arguments
    from msa_lite.recipe import load_recipe

    explicit = [name for name in options if context.get_parameter_source(name) is not ParameterSource.DEFAULT]
    if twice := [f"--{name.replace('_', '-')}" for name in _IN_RECIPES if name in explicit]:
        raise UsageError(f"{', '.join(twice)}: the recipe sets this already; leave it out, or leave out --recipe")
    arguments = evaluation_arguments(load_recipe(options["recipe"]))
    return arguments | ({"limit": options["limit"]} if "limit" in explicit else {})


def _questions(options: dict[str, Any]) -> Asked:
    """Return what the options say to score a model on. Raise UsageError for options that do not go together."""
    from msa_lite.data import DataSource
    from msa_lite.errors import UsageError, join_faults
    from msa_lite.evals.scores.suite import OwnQuestions, PublishedBenchmark

    columns: dict[str, Any] = {**read_columns(options["columns"], ("question", "answer", "messages"))}
    if columns and not any(options[name] for name in _SETS):
        raise UsageError("--columns: of which data? Give --forget, --retain or --holdout")
    benchmark = options["benchmark"]
    takes = _OPTIONS.get(benchmark, _OPTIONS["published"])
    others = dict.fromkeys(name for names in _OPTIONS.values() for name in names if name not in takes)
    if faults := [f"{name}: not for {benchmark}" for name in others if options[name]]:
        raise UsageError(faults[0] if len(faults) == 1 else join_faults("these options do not fit:", faults))
    if benchmark == OWN:
        arguments: dict[str, Any] = {"max_new_tokens": options["max_new_tokens"]} if options["max_new_tokens"] else {}
        for name in filter(options.get, _SETS):
            path, _, configuration = options[name].partition(":")
            arguments[name] = DataSource(path, name=configuration or None, **columns)
        return OwnQuestions(**arguments)
    return PublishedBenchmark(benchmark, options["split"], options["data"], options["compat"])
