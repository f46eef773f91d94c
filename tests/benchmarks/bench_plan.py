"""Planned against taken: what `msa-lite plan` says of whole runs, and how long they then take.

    python tests/benchmarks/bench_plan.py [--cases quickstart full npo ...] [--folder DIR]

A case is planned first, then run, each once and in a process of its own. All but the first need what `quickstart`
leaves in the folder; `full` is a dry run of what it changes there. Seconds are of the wall clock, from the command's
start to its end, imports and preparation included. CPU: the seconds that a command computed, for each second of the
wall clock. Where it is below 1 with one thread, other programs took the rest, and the ratio is theirs as much as the
plan's.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

DATA = Path("runs/quickstart/history/data")
TEXTS = Path("texts.yaml")


@dataclass(frozen=True)
class Case:
    """A command with the words that plan it."""

    run: Sequence[str]
    plan: Sequence[str]


_FULL = ("run", "quickstart", "vector.mode=full", "forget.alpha=1.0", "--accept")
CASES = {
    "quickstart": Case(["quickstart"], ["plan", "quickstart"]),
    "full": Case(_FULL, [*_FULL, "--dry-run"]),
    "smollm2": Case(["quickstart", "--model", "smollm2"], ["plan", "quickstart-smollm2"]),
    "history": Case(["train", "train/small"], ["plan", "train/small"]),
    "npo": Case(["baseline", "npo", "quickstart"], ["plan", "quickstart", "--baseline", "npo"]),
    "texts": Case(["run", str(TEXTS), "--accept"], ["plan", str(TEXTS)]),
}


def write_texts() -> None:
    """Write a recipe whose rows are texts: questions and answers of the first try, run together."""
    places = {}
    for name in ("forget", "retain", "holdout"):
        rows = [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text("utf-8").splitlines()]
        texts = [{"text": f"{row['question']} {row['answer']}"} for row in rows]
        places[name] = f"texts-{name}.jsonl"
        Path(places[name]).write_text("".join(json.dumps(text) + "\n" for text in texts), "utf-8")
    history = DATA.parent
    recipe = {
        "target": str(history / "target"),
        "prior": str(history / "prior"),
        "forget": {"data": {"path": places["forget"], "format": "text"}},
        "retain": {"data": {"path": places["retain"], "format": "text", "sample": "match_forget"}},
        "vector": {"epochs": 20, "learning_rate": 2e-3, "batch_size": 32},
        "evaluate": {"ideal": str(history / "ideal"), "holdout": {"path": places["holdout"], "format": "text"}},
        "output": "runs/texts",
    }
    TEXTS.write_text(yaml.safe_dump(recipe), "utf-8")


def run_timed(words: Sequence[str]) -> tuple[subprocess.CompletedProcess[str], float, float]:
    """Run msa-lite; return what it printed, the seconds of the wall clock, and those of the CPU."""
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "msa_lite", *words], capture_output=True, text=True, check=False)
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - begin
    return done, wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Plan and run the cases; print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--folder", type=Path, default=Path("."), help="where runs/ lies, or is made")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    os.chdir(options.folder)
    print("case         planned, s        taken, s  taken / middle  CPU of plan  CPU of run", flush=True)
    for name in options.cases:
        if name == "texts":
            write_texts()
        planned, plan_wall, plan_cpu = run_timed([*CASES[name].plan, "--json"])
        if planned.returncode not in (0, 3):
            sys.exit(planned.stderr)
        low, high = json.loads(planned.stdout)["seconds"]
        done, wall, cpu = run_timed(CASES[name].run)
        if done.returncode > 1:
            sys.exit(done.stderr)
        ratio = 2 * wall / (low + high)
        print(
            f"{name:<12} {low:7.0f} to {high:<7.0f} {wall:8.0f} {ratio:15.2f} {plan_cpu / plan_wall:12.2f} "
            f"{cpu / wall:11.2f}",
            flush=True,
        )
        Path(f"{name}.log").write_text(done.stderr, "utf-8")


if __name__ == "__main__":
    main()
