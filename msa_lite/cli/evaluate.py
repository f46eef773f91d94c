"""msa-lite evaluate: score a model on a benchmark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from msa_lite.benchmark_names import BENCHMARKS, OWN, splits_help
from msa_lite.cli.help import Command, RecipeName, given_options, read_columns, takes_json
from msa_lite.cli.output import print_json, print_reports, print_start, progress_bars, quieten_libraries
from msa_lite.errors import UsageError
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
    "--benchmark", type=click.Choice(list(BENCHMARKS)), help=f"{OWN}: questions of your own.  [default: {OWN}]"
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
    "--compat", metavar="NAME", multiple=True, help="A deviation of published code to repeat, such as open-unlearning."
)
@click.option(
    "--forget", metavar="DATA", help="Questions about the forget set: FILE, FOLDER[:CONFIGURATION] or Hub id."
)
@click.option("--retain", metavar="DATA", help="Questions about the retain set, likewise.")
@click.option("--holdout", metavar="DATA", help="Questions that no model was trained on, likewise.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), help="Length limit of answers.  [default: 200]")
@click.option("--columns", help="Columns of these: question=Q,answer=A, or messages=M; the usual ones are known.")
@click.option(
    "--recipe", metavar="RECIPE", type=RecipeName(), help="Take benchmark, data, columns, prompt and judge from it."
)
@click.option("--limit", type=click.IntRange(min=1), help="Score at most this many rows of each set.")
@click.option("--out", required=True, type=click.Path(), help="Folder for records and report.json.")
@takes_json
@click.pass_obj
def evaluate_command(verbose: bool, model: str, out: str, as_json: bool, **options: Any) -> None:
    """Score MODEL on a benchmark.

    MODEL is a folder or repo[@revision] with a model or a LoRA adapter.

    \b
    msa-lite evaluate runs/mine/model --benchmark tofu --split forget10 --ideal IDEAL --out scores
    msa-lite evaluate runs/mine/model --forget forget.jsonl --retain retain.jsonl --out scores
    msa-lite evaluate ./my-finetuned-model --recipe my-request.yaml --out scores
    """

    print_start(model, out)
    from msa_lite.evals import evaluate
    from msa_lite.evals.judge.base import JudgeSettings

    quieten_libraries(verbose)
    arguments: dict[str, Any] = _from_recipe(options) if options["recipe"] else {"questions": _questions(options)}
    if options["limit"] is not None:
        arguments["limit"] = options["limit"]
    if options["judge"] is not None:
        kind, _, name = options["judge"].partition(":")
        arguments["judge"] = JudgeSettings(kind, name or None)
    with progress_bars() as progress:
        reports = evaluate(model, out, **arguments, ideal=options["ideal"], progress=progress)
    if not reports:  # under `accelerate launch`, only the first process prints
        return
    if as_json:
        results = json_form(reports)
        print_json({"out": out, **results["model"], "ideal": results.get("ideal", {}).get("metrics")})
    else:
        print_reports(reports, model)


_SETS = ("forget", "retain", "holdout")
_OWN = (*_SETS, "columns", "max_new_tokens")
_PUBLISHED = ("split", "data", "compat")


def _from_recipe(options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a recipe stands for. Raise UsageError for options that both set."""
    from msa_lite.pipeline.prepare.prompt import evaluation_arguments
    from msa_lite.recipe import load_recipe

    if twice := given_options(options, "benchmark", *_OWN, *_PUBLISHED):
        raise UsageError(f"{twice}: the recipe sets this already; leave it out, or leave out --recipe")
    return evaluation_arguments(load_recipe(options["recipe"]))


def _questions(options: dict[str, Any]) -> Asked:
    """Return what the options say to score a model on. Raise UsageError for options that do not go together."""
    from msa_lite.data import DataSource
    from msa_lite.evals.scores.suite import OwnQuestions, PublishedBenchmark

    benchmark = options["benchmark"] or OWN
    if others := given_options(options, *(_PUBLISHED if benchmark == OWN else _OWN)):
        raise UsageError(f"{others}: not for {benchmark}")
    if benchmark != OWN:
        return PublishedBenchmark(benchmark, options["split"], options["data"], options["compat"])
    columns: dict[str, Any] = {**read_columns(options["columns"], ("question", "answer", "messages"))}
    arguments: dict[str, Any] = {"max_new_tokens": options["max_new_tokens"]} if options["max_new_tokens"] else {}
    for name in filter(options.get, _SETS):
        path, _, configuration = options[name].partition(":")
        arguments[name] = DataSource(path, name=configuration or None, **columns)
    return OwnQuestions(**arguments)
