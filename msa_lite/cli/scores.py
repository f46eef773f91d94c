"""Score a model, and read scores: evaluate, report, compare, table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from msa_lite.catalogue import BENCHMARKS, OWN, splits_help
from msa_lite.cli.arguments import (
    complete_recipe,
    given_options,
    read_columns,
    read_names,
    takes_dry_run,
    takes_force,
    takes_json,
    takes_overrides,
    takes_run,
)
from msa_lite.cli.output import (
    print_data,
    print_json,
    print_outcome,
    print_reports,
    print_rows,
    print_start,
    print_table,
    progress_bars,
    show,
)
from msa_lite.errors import StageError, UsageError
from msa_lite.io.console.libraries import require
from msa_lite.io.files.addresses import split_configuration
from msa_lite.io.files.writing import json_form

if TYPE_CHECKING:
    from msa_lite.evals.scores.suite import Asked
    from msa_lite.pipeline.table.work import TableResult


@click.command()
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
@click.option(
    "--columns",
    help="Columns of these: question=Q,answer=A, messages=M, system=S, ignore=I, …; the usual ones are known.",
)
@click.option(
    "--prompt",
    type=click.Choice(["default", "chat", "plain", "auto"]),
    help="The form of questions; default: as published, else the chat template, if there is one.  [default: default]",
)
@click.option(
    "--recipe",
    metavar="RECIPE",
    shell_complete=complete_recipe,
    help="Take benchmark, data, columns, prompt and judge from it.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Score at most this many rows of each set.")
@click.option("--out", required=True, type=click.Path(), help="Folder for records and report.json.")
@takes_json
def evaluate_command(model: str, out: str, as_json: bool, **options: Any) -> None:
    """Score MODEL on a benchmark.

    MODEL is a folder or repo[@revision] with a model or a LoRA adapter.

    \b
    msa-lite evaluate runs/mine/model --benchmark tofu --split forget10 --ideal IDEAL --out scores
    msa-lite evaluate runs/mine/model --forget forget.jsonl --retain retain.jsonl --out scores
    msa-lite evaluate ./my-finetuned-model --recipe my-request.yaml --out scores
    """

    print_start(model, out)
    from msa_lite.evals import evaluate
    from msa_lite.settings import JudgeSettings

    require("train")
    arguments: dict[str, Any] = _from_recipe(options) if options["recipe"] else {"questions": _questions(options)}
    arguments |= {name: options[name] for name in ("limit", "prompt") if options[name] is not None}
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

    if twice := given_options(options, "benchmark", "prompt", *_OWN, *_PUBLISHED):
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
    columns = read_columns(options["columns"])
    arguments: dict[str, Any] = {"max_new_tokens": options["max_new_tokens"]} if options["max_new_tokens"] else {}
    for name in filter(options.get, _SETS):
        path, configuration = split_configuration(options[name])
        arguments[name] = DataSource(path, name=configuration, **columns)
    return OwnQuestions(**arguments)


@click.command()
@takes_run
@click.option("--show-examples", is_flag=True, help="Add ten questions with the models' answers. They hold the data.")
@click.option("--rows", is_flag=True, help="Print every row to forget, and the rows to keep that were lost.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, that of report.json or of the rows.")
def report_command(run: Path, show_examples: bool, rows: bool, as_json: bool) -> None:
    """Write report.html and report.json into RUN.

    A run writes them at its end; this writes them again, for a run that was stopped, or with examples. RUN is a
    recipe's output, or a baseline's folder below it. Every file is checked against its manifest first. Without
    --show-examples the report holds no row of the data.

    --rows prints the rows with the answers of target, unlearned model and ideal. With --show-examples they are in the
    report, too.

    \b
    msa-lite report runs/mine
    msa-lite report runs/mine --rows
    msa-lite report runs/mine/baselines/npo --show-examples
    """
    from msa_lite.pipeline.run.report import REPORT_FILES, report_run
    from msa_lite.report.page.run_files import run_json

    story = report_run(run, show_examples, rows)
    if as_json:
        print_json(story.forget_rows if story.forget_rows is not None else run_json(story))
        return
    if story.forget_rows is not None:
        print_rows(story.forget_rows)
    print_outcome(story.outcome, story.sentence)
    for line in (*(f"missing: {line}" for line in story.missing), *(f"report: {run / name}" for name in REPORT_FILES)):
        click.echo(line)


@click.command()
@click.argument("paths", nargs=-1, metavar="[LABEL=]FOLDER|REPORT ...")
@click.option(
    "--format", "form", type=click.Choice(["md", "tex", "csv", "html"]), help="Print this instead of a terminal table."
)
@click.option("--published", metavar="TABLE", help="A table of the MSA paper to put below; a wrong name lists them.")
@click.option(
    "--metrics",
    metavar="NAMES",
    help="Columns, with commas between them (docs/reference/metrics.md).  [default: those of the paper]",
)
@takes_json
def compare_command(
    paths: tuple[str, ...], form: str | None, published: str | None, metrics: str | None, as_json: bool
) -> None:
    """Put reports side by side, as in the MSA paper.

    The table has target, ideal, and each method with its ratio to the ideal. FOLDER is a run, with its baselines, or an
    evaluation; REPORT is a report.json. Models that were scored on different rows are refused.

    \b
    msa-lite compare runs/mine
    msa-lite compare LoRA=runs/a full=runs/b --format md
    msa-lite compare runs/mine --published tofu-forget10-llama-3.2-1b --format tex
    """
    from msa_lite.comparison.compare import FORMATS, compare, comparison_table

    if as_json and form:
        raise UsageError("give one of --json and --format")
    names = read_names(metrics) if metrics is not None else None
    comparison = compare(paths, published, names)
    if as_json:
        print_json(comparison)
    elif form:
        print_data(FORMATS[form](comparison))
    else:
        print_table(comparison_table(comparison), dense=True)


@click.command()
@click.argument("name", metavar="NAME|FILE")
@takes_overrides
@click.option("--only", metavar="ROW,ROW", help="Labels of the rows to make; a wrong one lists them.")
@takes_force
@takes_dry_run
@takes_json
def table_command(
    name: str, overrides: tuple[str, ...], only: str | None, force: bool, is_dry: bool, as_json: bool
) -> int:
    """Make a table of the MSA paper, or one of your own, in one command.

    It trains the models that are missing, runs MSA's rows and the baselines, and puts them side by side.

    NAME is one of the paper's tables; `msa-lite recipes list` prints their names. FILE is a table of your
    own, as `msa-lite recipes show table/NAME` prints one. KEY.SUB=VALUE changes one of its keys.

    A row that is done is not made again, and one that was stopped goes on. The jobs of a Slurm array divide the rows. A
    row that fails does not stop the others; the exit code is then 4, and a second run tries it again. The verdict of a
    row changes nothing.

    \b
    msa-lite table tofu-forget10-llama-3.2-1b --dry-run
    msa-lite table tofu-forget10-llama-3.2-1b 'methods=[npo, task_vector]' output=runs/mine
    """
    from msa_lite.pipeline.table.work import look_at_table, table

    require("train")
    labels = read_names(only)
    if is_dry:
        result = look_at_table(name, overrides, only=labels)
    else:
        with progress_bars() as progress:
            result = table(name, overrides, progress, only=labels, force=force)
    if is_dry or as_json:
        width = max(len(row.label) for row in result.rows)
        show(result, as_json, *(f"{row.label:<{width}}  {row.state}" for row in result.rows))
        for note in result.notes if not as_json else ():
            click.echo(f"note: {note}", err=True)
    else:
        _print_result(result)
    return StageError.exit_code if result.of("failed") else 0


def _print_result(result: TableResult) -> None:
    """Print the comparison, the files, and the rows that are not done."""
    from msa_lite.comparison.compare import FORMATS, comparison_table
    from msa_lite.io.console.progress import duration

    for name, comparison in result.comparisons.items():
        print_table(comparison_table(comparison), dense=True)
        click.echo(f"written: {result.folder}: {', '.join(f'{name}.{ending}' for ending in FORMATS)}")
    known = [row.seconds for row in result.rows if row.seconds]
    click.echo(f"rows:    {len(result.of('done'))} of {len(result.rows)} are done, in {duration(sum(known))} of work")
    for row in result.of("failed"):
        click.echo(f"failed:  {row.label}: {row.error}")
    if left := result.of("left"):
        click.echo(f"left:    {', '.join(row.label for row in left)}")
