"""msa-lite attack: does an unlearned model give back what it was to forget?"""

from __future__ import annotations

import re
from pathlib import Path

import click

from msa_lite.attack_names import ATTACKS
from msa_lite.cli.help import Command, read_names, takes_dry_run, takes_json, takes_overrides, takes_run

_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@click.command(cls=Command, groups={"Attacks": ["--attacks", "--budget", "--dry-run"], "Models": ["--model"]})
@takes_run
@takes_overrides
@click.option(
    "--attacks",
    metavar="NAMES",
    help=f"Some of {', '.join(ATTACKS)}, with commas between them.  [default: all that are possible]",
)
@click.option("--budget", metavar="TIME", help="Time for all of it, as 10m or 2h: fewer rows, then fewer attacks.")
@click.option("--model", "models", metavar="NAME=MODEL", multiple=True, help="Attack this model, too.")
@takes_dry_run
@takes_json
@click.pass_obj
def attack_command(
    verbose: bool,
    run: Path,
    overrides: tuple[str, ...],
    attacks: str | None,
    budget: str | None,
    models: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Attack the models of RUN, to see whether the rows to forget come back.

    RUN is the folder of a finished run, or of a baseline in it. Target, ideal and unlearned model are attacked alike.
    What counts is what comes back beyond the ideal; without one, beyond rows that no model saw (evaluate.holdout).
    KEY.SUB=VALUE changes a key of the recipe's `attack`. The results land in RUN/attacks and in the run's report. A
    rerun does only what is missing.

    \b
    msa-lite attack runs/quickstart
    msa-lite attack runs/quickstart --dry-run
    msa-lite attack runs/quickstart --attacks quantise,relearn --budget 10m
    msa-lite attack runs/quickstart attack.rows=100 attack.sample.samples=200
    """
    from msa_lite.cli.output import print_dry_run, print_json, print_table, progress_bars, quieten_libraries
    from msa_lite.pipeline.verbs.attack import attack, dry_attack
    from msa_lite.report.attacks import HOLDOUT_LIMIT
    from msa_lite.report.evidence_sections import GAIN_MEANING, attack_table

    quieten_libraries(verbose)
    names = read_names(attacks)
    more, seconds = _read_models(models), _read_time(budget)
    if dry_run:
        ahead = dry_attack(run, names, overrides=overrides, models=more, budget=seconds)
        print_dry_run(ahead, as_json)
        return
    with progress_bars() as progress:
        result = attack(run, names, overrides=overrides, models=more, budget=seconds, progress=progress)
    if as_json:
        print_json(result)
        return
    facts = result.facts
    print_table(attack_table(facts, "Attacks", (f"comes back: {facts.meaning}", GAIN_MEANING)))
    for name in facts.models:
        click.echo(facts.headline(name))
    for name, reason in facts.left_out.items():
        click.echo(f"{name}: left out: {reason}")
    if facts.control == "holdout":
        click.echo(HOLDOUT_LIMIT)
    click.echo(f"results: {result.folder}")


def _read_models(texts: tuple[str, ...]) -> dict[str, str]:
    """Return further models by name, from NAME=MODEL. Raise UsageError for another form, or a name twice."""
    from msa_lite.errors import UsageError

    models: dict[str, str] = {}
    for text in texts:
        name, sign, place = text.partition("=")
        if not sign or not place or not re.fullmatch(r"[\w-]+", name):
            raise UsageError(f"--model {text}: NAME=MODEL is wanted, with a name of letters, digits, '-' and '_'")
        if name in models:
            raise UsageError(f"--model {text}: the name {name} stands twice")
        models[name] = place
    return models


def _read_time(text: str | None) -> float | None:
    """Return a time in seconds: "90s", "10m", "1.5h", or a number of seconds. Raise UsageError for another form."""
    from msa_lite.errors import UsageError

    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)?", text.strip())
    if not match or not float(match[1]):
        raise UsageError(f"--budget {text}: a time is wanted, as 90s, 10m or 2h")
    return float(match[1]) * _UNITS[match[2] or "s"]
