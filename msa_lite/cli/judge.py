"""msa-lite judge: hold the verdicts of a judge against those of a person."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from msa_lite.cli.help import Group, takes_json, takes_run

if TYPE_CHECKING:
    from msa_lite.comparison.marking import JudgeAgreement
    from msa_lite.report.formats import TextTable


@click.group(cls=Group)
def judge_command() -> None:
    """Hold the verdicts of a judge against those of a person.

    \b
    msa-lite judge sample runs/mine --n 200
    msa-lite judge agree runs/mine judge-sample.csv
    """


@judge_command.command()
@takes_run
@click.option("--n", type=click.IntRange(min=1), default=200, show_default=True, help="The number of verdicts.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the draw.")
@click.option(
    "--out", metavar="FILE", type=click.Path(), default="judge-sample.csv", show_default=True, help="The CSV to write."
)
@takes_json
def sample(run: Path, n: int, seed: int, out: str, as_json: bool) -> None:
    """Write verdicts of RUN into a CSV, for a person to mark.

    RUN is the folder of a run whose answers were judged, or of `msa-lite evaluate`. Verdicts are drawn evenly at random
    from all its models. A row has the question, the answer under test and the lettered candidates as the judge saw
    them; the column letter is for the person. The CSV has neither the judge's letter, nor the model, nor which
    candidate is the truth. Texts that a spreadsheet would run as a formula begin with an apostrophe.

    The CSV holds questions and answers of the data, and `msa-lite purge` does not know of it: delete it when you are
    done. It is never written into RUN, and never replaces a file.

    \b
    msa-lite judge sample runs/mine --n 200
    msa-lite judge sample scores/openai-judge --n 50 --seed 1 --out mine.csv
    """
    import shlex

    from msa_lite.cli.output import print_json
    from msa_lite.comparison.marking import sample_verdicts

    result = sample_verdicts(run, n, seed, out)
    if as_json:
        print_json(result)
        return
    click.echo(f"written: {result.file}, {result.count} of {result.available} verdicts ({', '.join(result.models)})")
    click.echo("mark:    write into the column letter what the column choose allows: the candidate whose facts agree")
    click.echo("         best with the answer, the first of equals; Z if the answer states no fact or fits none")
    click.echo("note:    it holds rows of the data; a purge of the run does not remove it, so delete it yourself")
    click.echo(f"next:    msa-lite judge agree {shlex.quote(str(run))} {shlex.quote(str(result.file))}")


@judge_command.command("agree")
@takes_run
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@takes_json
def agree_command(run: Path, file: Path, as_json: bool) -> None:
    """Print how far the judge of RUN agrees with the person who marked FILE.

    FILE is the CSV of `msa-lite judge sample RUN`, with letters in its last column. Rows without a letter are left out.
    A spreadsheet may have saved it, with semicolons or tabs. The first line is about letters; the others are about the
    metrics that follow from them. Each has the share of equal verdicts with its 95 % interval, and Cohen's kappa, which
    is 0 for agreement by chance and 1 for full agreement.

    \b
    msa-lite judge agree runs/mine judge-sample.csv
    msa-lite judge agree runs/mine judge-sample.csv --json
    """
    from msa_lite.cli.output import print_json, print_table
    from msa_lite.comparison.marking import judge_agreement

    result = judge_agreement(run, file)
    if as_json:
        print_json(result)
        return
    print_table(_table(result))


def _table(result: JudgeAgreement) -> TextTable:
    from msa_lite.report.formats import Cell, Section, TextTable

    def number(value: float | None) -> Cell:
        return Cell("" if value is None else f"{value:.3f}")

    rows = [
        [Cell(a.name), Cell(str(a.n)), number(a.share), Cell(f"{a.low:.3f} to {a.high:.3f}"),
         Cell("not defined") if a.kappa is None else number(a.kappa), number(a.judge), number(a.person)]
        for a in result.agreements
    ]  # fmt: skip
    heads = ["", "n", "agreement", "95 % interval", "kappa", "by the judge", "by the person"]
    notes = [f"marked: {result.marked} rows; without a letter, and left out: {result.unmarked}"]
    if any(agreement.kappa is None for agreement in result.agreements):
        notes.append("kappa is not defined where judge and person give one verdict alone")
    return TextTable(heads, [Section(rows)], "judge and person", notes)
