"""msa-lite evaluate: score a model on questions."""

from __future__ import annotations

import click


@click.command()
@click.argument("model")
@click.option("--benchmark", type=click.Choice(["qa"]), default="qa", show_default=True)
@click.option("--forget", help="Questions about the forget set: FILE, FOLDER[:CONFIGURATION] or Hub id.")
@click.option("--retain", help="Questions about the retain set.")
@click.option("--holdout", help="Questions that no model was trained on.")
@click.option("--ideal", help="A model to show beside it, or the report.json of an earlier evaluation.")
@click.option("--limit", type=click.IntRange(min=1), help="Score at most so many rows of each set.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=200, show_default=True)
@click.option("--out", required=True, type=click.Path(), help="Folder for records and reports.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.pass_obj
def command(
    verbose: bool,
    model: str,
    benchmark: str,
    forget: str | None,
    retain: str | None,
    holdout: str | None,
    ideal: str | None,
    limit: int | None,
    max_new_tokens: int,
    out: str,
    as_json: bool,
) -> None:
    """Score MODEL: probability, ROUGE-L recall, extraction strength, exact memorization, accuracy.

    \b
    msa-lite evaluate runs/mine/model --forget forget.jsonl --retain retain.jsonl --out scores
    """
    from msa_lite.cli.output import print_json, print_reports, progress_bars, quieten_libraries
    from msa_lite.data import DataSource
    from msa_lite.pipeline import evaluate

    def source(text: str | None) -> DataSource | None:
        path, _, name = (text or "").partition(":")
        return DataSource(path, name=name or None) if text else None

    quieten_libraries(verbose)
    with progress_bars() as progress:
        reports = evaluate(
            model,
            out,
            forget=source(forget),
            retain=source(retain),
            holdout=source(holdout),
            ideal=ideal,
            limit=limit,
            max_new_tokens=max_new_tokens,
            progress=progress,
        )
    if as_json:
        print_json({"out": out, "benchmark": benchmark, "metrics": {k: r.values() for k, r in reports.items()}})
        return
    print_reports(reports, model)
