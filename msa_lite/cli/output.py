"""What commands print: results on stdout, progress and warnings on stderr."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from msa_lite.io.progress import Progress
    from msa_lite.recipe import Recipe
    from msa_lite.report import Report


# What these tell of the inputs, in a line each, everybody is to see.
_TELLING = ("msa_lite.recipe.paths", "msa_lite.job.models")


def set_up_logging(verbose: bool) -> None:
    """Warnings of msa-lite go to stderr, everything of it with --verbose; other packages stay quiet below errors."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logger = logging.getLogger("msa_lite")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO if verbose else logging.WARNING)
    logger.propagate = False
    for name in _TELLING:
        logging.getLogger(name).setLevel(logging.INFO)


def quieten_libraries(verbose: bool) -> None:
    """Hide the progress bars and warnings of the libraries underneath, unless asked for."""
    if verbose:
        return
    import warnings

    import datasets
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.utils.logging.set_verbosity_error()
    for name in ("peft", "bitsandbytes", "huggingface_hub", "httpx", "httpx2", "openai", "lm_eval"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning)


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """Bars on stderr, one a label, in the order in which they appear."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description:<32}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    bars = Bars(*columns, console=Console(stderr=True))
    tasks: dict[str, Any] = {}

    def progress(label: str, done: int, total: int) -> None:
        bars.start()  # with the first step, so that nothing is shown where there is nothing to do
        if label not in tasks:
            tasks[label] = bars.add_task(label, total=total)
        bars.update(tasks[label], completed=done, total=total)

    try:
        yield progress
    finally:
        if tasks:
            bars.stop()


def print_prior(recipe: Recipe) -> None:
    """On stderr, which checkpoint of the recipe's history is the prior, and why; nothing where the prior is given."""
    if recipe.prior_reason:
        click.echo(recipe.prior_reason, err=True)


def print_json(value: Any) -> None:
    """One JSON object on stdout."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_reports(reports: Mapping[str, Report], title: str) -> None:
    """The table of models side by side on stdout."""
    from rich.console import Console

    from msa_lite.report import notes, rich_table

    console = Console()
    console.print(rich_table(reports, title))
    for note in notes(reports):
        console.print(f"{note}.", style="dim", highlight=False)
