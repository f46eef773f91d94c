"""Run the fuzzer: `python -m tests.tools.fuzz --cases 5000 --kills 500`; it exits with 1 at a breach."""

from __future__ import annotations

import argparse
import collections
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.tools.fuzz.areas import AREAS, WEIGHTS, preload
from tests.tools.fuzz.case import Case, play
from tests.tools.fuzz.kills import SCENES, Stage, choose_states, play_kills, play_states

Table = dict[str, collections.Counter[str]]
_ENDS = ("accepted", "refused", "status", "killed", "not reached")


def fuzz(
    name: str, cases: int, number: int, root: Path, keep: Path | None
) -> tuple[collections.Counter[str], list[str]]:
    """Play cases of an area; return counts of what became of them, and each breach with what led to it."""
    counts: collections.Counter[str] = collections.Counter()
    breaches: list[str] = []

    @seed(number)
    @settings(
        max_examples=cases, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
    )
    @given(AREAS[name])
    def one(case: Case) -> None:
        outcome, found = play(case, root)
        counts[{0: "accepted", 2: "refused (2)", 3: "refused (3)"}.get(outcome.status, f"status {outcome.status}")] += 1
        if not case.edits:
            counts["sound"] += 1
            if outcome.status != 0:
                found = [*found, f"sound: a sound case was refused: {outcome.err[-300:]}"]
        if found:
            for kind in {breach.partition(":")[0] for breach in found}:
                counts[f"BREACH {kind}"] += 1
            line = {"area": name, "breaches": found, "edits": case.edits, "arguments": case.arguments}
            breaches.append(json.dumps(line | {"err": outcome.err[-600:]}))
            if keep:
                place = keep / f"{name.replace(' ', '')}-{len(breaches)}"
                shutil.copytree(root, place, symlinks=True, dirs_exist_ok=True, ignore=_no_pipes)

    one()
    return counts, breaches


def _no_pipes(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if not (Path(folder, name).is_file() or Path(folder, name).is_dir())]


def main() -> int:
    """Parse the options, play the cases, print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000, help="cases in all, shared out among the areas")
    parser.add_argument("--kills", type=int, default=100, help="signals at random moments in all")
    parser.add_argument("--each", type=int, default=1, help="kills at each kind of file operation in each place")
    parser.add_argument("--few", action="store_true", help="the same in all places together")
    parser.add_argument("--seed", type=int, default=0)
    names = [*AREAS, "kills", *(f"kill {name}" for name in SCENES)]
    parser.add_argument("--only", action="append", choices=names, help="only this area; may be given again")
    parser.add_argument("--keep", type=Path, help="folder for the files of cases that break the contract")
    parser.add_argument("--log", type=Path, help="file for a line of JSON for each breach")
    options = parser.parse_args()
    names = [name for name in AREAS if not options.only or name in options.only]
    whole = sum(WEIGHTS[name] for name in names) or 1
    breaches: list[str] = []
    table: Table = {}
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        for name in names:
            preload(name)
            count = max(1, round(options.cases * WEIGHTS[name] / whole))
            table[name], found = fuzz(name, count, options.seed, Path(folder, "case"), options.keep)
            breaches += found
            _print(name, table[name], time.monotonic() - started)
            _log(options.log, breaches)
        for scene in SCENES if options.each else ():
            name = f"kill {scene}"
            if options.only and not {"kills", name} & {*options.only}:
                continue
            stage, table[name] = Stage(scene, Path(folder, "kill")), collections.Counter()
            states = choose_states(stage.states(), options.each, not options.few)
            for counts, found in (play_states(stage, states), play_kills(stage, options.kills, options.seed)):
                table[name] += counts
                breaches += found
            _print(name, table[name], time.monotonic() - started)
            _log(options.log, breaches)
    _log(options.log, breaches)
    for line in breaches[:20]:
        print(line[:1500], file=sys.stderr)
    played = sum(count for counts in table.values() for what, count in counts.items() if what.startswith(_ENDS))
    print(f"{played} cases and kills, {len(breaches)} break the contract, {time.monotonic() - started:.0f} s")
    return 1 if breaches else 0


def _log(path: Path | None, breaches: list[str]) -> None:
    if path:
        path.write_text("".join(f"{line}\n" for line in breaches))


def _print(name: str, counts: collections.Counter[str], seconds: float) -> None:
    told = ", ".join(f"{what} {count}" for what, count in sorted(counts.items()))
    print(f"{name:24} {told}  [{seconds:.0f} s]", flush=True)


if __name__ == "__main__":
    sys.exit(main())
