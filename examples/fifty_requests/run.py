"""Handle fifty deletion requests of one to five rows, one after the other, by MSA, NPO and GradDiff:

    python examples/fifty_requests/run.py
    python examples/fifty_requests/run.py --requests 3 --out runs/three-requests

Each request is about one invented person. MSA merges the vectors of all requests so far into the target; NPO and
GradDiff train the model of the request before. Each request is a run of the tool of its own, in a process of its own,
so that its time and memory are its own. A second call does only what is missing. For Linux and macOS; needs
`pip install -e '.[train]'`, about 25 minutes on one free core of 2026, and 2 GB of disk.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import platform
import shutil
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from request_figure import write_figure
from request_results import Last, Request, is_spent, read_request, score_all, write_results
from request_world import METHODS, World, make_world, recipe_of, run_folder

import msa_lite

_LIBRARIES = ("matplotlib.figure", "peft", "rouge_score.rouge_scorer", "transformers", "msa_lite.pipeline.verbs.run")


@dataclass(frozen=True)
class Cost:
    """The cost of one request."""

    seconds: float
    """From start to end."""
    cpu_seconds: float
    """Of all its threads."""
    peak_mb: float
    """The most memory of its process, libraries included."""
    disk_mb: float
    """All files of its run."""


def measured(work: Callable[[], object], folder: Path) -> Cost:
    """Do the work in a process of its own, and return its cost. folder: the work's files. Raise RuntimeError if it
    fails.
    """
    began, child = time.monotonic(), os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status, usage = os.wait4(child, 0)
    seconds = time.monotonic() - began
    if status:
        raise RuntimeError(f"{folder}: the request was not finished; see above")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Cost(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e3, size / 1e6)


def handle(world: World, method: str, number: int) -> Request:
    """Handle one request by one method, unless it is done; return its scores and its cost."""
    folder = run_folder(world, method, number)
    done = world.folder / "costs" / f"{method}-{number:02}.json"
    if not done.is_file():
        shutil.rmtree(folder, ignore_errors=True)  # what a kill has left: its cost would count in parts
        recipe = recipe_of(world, method, number)
        work = (
            (lambda: msa_lite.run(recipe, accept=True))
            if method == "msa"
            else (lambda: msa_lite.run_baseline(method, recipe))
        )
        cost = measured(work, folder)
        done.parent.mkdir(exist_ok=True)
        partial = done.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(cost)))
        partial.rename(done)
    return read_request(folder, method, number, len(world.requests[number - 1]), json.loads(done.read_text()))


def handle_all(world: World, method: str) -> list[Request]:
    """Handle all requests by one method; it ends where nothing is left that it could keep (`is_spent`)."""
    handled: list[Request] = []
    for number in range(1, len(world.requests) + 1):
        handled.append(handle(world, method, number))
        print(handled[-1].line, flush=True)
        if is_spent(handled):
            print(f"{method}: ended here, nothing is kept any more", flush=True)
            break
    return handled


def score_last(world: World, last: Request) -> Last:
    """Ask the last model of a method the rows of all requests."""
    model, out = run_folder(world, last.method, last.number) / "model", world.folder / "last" / last.method
    return score_all(model, world.folder / "rows/all.jsonl", out, world.tokens)


def main() -> None:
    """Run all requests, and write results, figure and tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=50, help="how many requests (default: 50)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="(default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="a model that learns next to nothing, to try the script")
    parser.add_argument("--machine", default=platform.machine(), help="what RESULTS.md says of the machine")
    parser.add_argument("--out", type=Path, default=Path("runs/fifty-requests"))
    arguments = parser.parse_args()
    world = make_world(arguments.out, arguments.requests, arguments.seed, arguments.small)
    for name in _LIBRARIES:  # once, so that their start is no part of the cost of a request
        importlib.import_module(name)
    gc.freeze()
    measured(world.make_models, world.folder)
    by_method = {method: handle_all(world, method) for method in arguments.methods}
    handled = [request for requests in by_method.values() for request in requests]
    last = {method: score_last(world, requests[-1]) for method, requests in by_method.items()}
    write_results(handled, last, arguments.out, arguments.machine)
    write_figure(handled, arguments.out / "requests.svg")
    print(f"results: {arguments.out / 'RESULTS.md'}")


if __name__ == "__main__":
    main()
