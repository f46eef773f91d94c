"""msa-lite attack: does an unlearned model give back what it was to forget?"""

from __future__ import annotations

from pathlib import Path

import click

from msa_lite.attack_names import ATTACKS
from msa_lite.cli.help import Command, read_names, takes_dry_run, takes_json, takes_overrides, takes_run
from msa_lite.cli.output import print_dry_run, print_table, progress_bars, quieten_libraries, show


@click.command(cls=Command, groups={"Attacks": ["--attacks", "--dry-run"]})
@takes_run
@takes_overrides
@click.option(
    "--attacks",
    metavar="NAMES",
    help=f"Some of {', '.join(ATTACKS)}, with commas between them.  [default: all that are possible]",
)
@takes_dry_run
@takes_json
@click.pass_obj
def attack_command(
    verbose: bool, run: Path, overrides: tuple[str, ...], attacks: str | None, dry_run: bool, as_json: bool
) -> None:
    """Attack the models of RUN, to see whether the rows to forget come back.

    RUN is the folder of a finished run, or of a baseline in it. Target, ideal and unlearned model are attacked alike.
    What counts is what comes back beyond the ideal; without one, beyond rows that no model saw (evaluate.holdout).
    KEY.SUB=VALUE changes a key of the recipe's `attack`. The results land in RUN/attacks and in the run's report. A
    rerun does only what is missing.

    \b
    msa-lite attack runs/quickstart
    msa-lite attack runs/quickstart --dry-run
    msa-lite attack runs/quickstart --attacks quantise,relearn attack.rows=100
    """
    from msa_lite.pipeline.verbs.attack import attack, dry_attack
    from msa_lite.report.page.run_tables import GAIN_MEANING, attack_table
    from msa_lite.report.run.attacks import HOLDOUT_LIMIT

    quieten_libraries(verbose)
    names = read_names(attacks)
    if dry_run:
        print_dry_run(dry_attack(run, names, overrides), as_json)
        return
    with progress_bars() as progress:
        result = attack(run, names, overrides=overrides, progress=progress)
    facts = result.facts
    if not as_json:
        print_table(attack_table(facts, "Attacks", (f"comes back: {facts.meaning}", GAIN_MEANING)))
    lines = [*map(facts.headline, facts.models), *(f"{name}: left out: {why}" for name, why in facts.left_out.items())]
    lines += [HOLDOUT_LIMIT] if facts.control == "holdout" else []
    show(result, as_json, *lines, f"results: {result.folder}")
