"""Attack the models of a finished run: does the unlearned model give back what it was to forget?

    python examples/attack.py runs/my-request
    python examples/attack.py runs/my-request --attacks quantise relearn

Target, ideal and unlearned model are attacked in the same way, on the same rows. What counts is what comes back beyond
the ideal: an attack also teaches, guesses, and gives away. Without an ideal, rows that no model saw are the control.
"""

import argparse

import msa_lite

parser = argparse.ArgumentParser(description="Attack the models of a run.")
parser.add_argument("run", help="the folder of a finished run")
parser.add_argument("--attacks", nargs="*", default=[], help="their names (default: all that are possible)")
parser.add_argument("--rows", type=int, default=40, help="forget rows to attack (default: 40)")
arguments = parser.parse_args()

with msa_lite.show_progress() as progress:
    settings = [f"attack.rows={arguments.rows}"]
    result = msa_lite.attack(arguments.run, arguments.attacks, overrides=settings, progress=progress)

for attack in result.facts.attacks:
    for name, attacked in attack.models.items():
        strongest = attacked.strongest
        print(f"{attack.name}, {name}: {strongest.words} comes back by {strongest.label} ({strongest.outcome})")
        for trial in attacked.trials:
            print(f"  {trial.label:<40} {trial.words}")
for name, reason in result.facts.left_out.items():
    print(f"{name}: left out: {reason}")
print(f"all of it: {result.folder}")
